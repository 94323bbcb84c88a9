"""The broker's verbs for exactly-once writers: records are staged out of sight, and published at once and once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.broker.authorizer import Principal
from headrace.broker.writers.progress import WriterEntry
from headrace.broker.writers.stages import Publication, StageEntry, Stages, StageSize
from headrace.records import AnyBatch


class WriterOperations:
    """A part of `Broker`: each verb hands over to `Stages`, which passes the gate."""

    _stages: Stages

    def stage(
        self,
        who: Principal,
        handle: str,
        topic: str,
        batch: AnyBatch,
        *,
        writer: str,
        epoch: str = "",
        order: int = 0,
        partition: int | None = None,
    ) -> asyncio.Future[None]:
        """Put records where nobody sees them, until `publish_staged`. Resolves when there was room for them, so that whoever waits for
        it before staging more is not ahead of memory and disk; the runs of a handle keep the order of the calls.

        Raises at once as `publish` does, `StaleEpoch`, `UnknownStage` for a handle that is gone, `LimitExceeded`, and `InvalidRequest` for
        one that is sealed or another writer's; the future fails with `DiskFull` or `StorageFailed`. Then nothing of the run is staged.
        """
        return self._stages.stage(who, handle, topic, batch, writer=writer, epoch=epoch, order=order, partition=partition)

    async def seal(self, who: Principal, handle: str, *, writer: str = "", epoch: str = "", order: int = 0) -> StageSize:
        """No more may be staged. Idempotent. Raises `UnknownStage`, unless `app` is given: then an empty one is made."""
        return await self._stages.seal(who, handle, writer, epoch, order)

    async def publish_staged(
        self, who: Principal, writer: str, version: int, handles: Sequence[str], *, epoch: str = "", remember_ms: int = 0
    ) -> Publication:
        """All records of these handles at once, unless this version or a later one of the app has been published: then nothing, and the
        handles are dropped. Durable when it returns. A writer that will not come back says with `remember_ms` for how long to ask.

        Raises `UnknownStage`, `StaleEpoch`, `InvalidRequest` for a handle that is not sealed, and as a transaction's commit does.
        """
        return await self._stages.publish(who, writer, version, handles, epoch, remember_ms)

    async def drop_staged(self, who: Principal, handles: Sequence[str]) -> int:
        """Forget what was staged; returns how many handles there were. Nothing can be staged under any of them again."""
        return await self._stages.drop(who, handles)

    def last_version(self, who: Principal, writer: str) -> int | None:
        """The last version that the app has published whole; None if there is none."""
        return self._stages.last_version(who, writer)

    async def forget_writer(self, who: Principal, writer: str) -> None:
        """Its versions, runs and stages: it may begin anew with any version. Raises `NoSuchEntry`."""
        await self._stages.forget_writer(who, writer)

    def writers(self, who: Principal) -> list[WriterEntry]:
        """The exactly-once writers that this principal may see, by name."""
        return self._stages.writers(who)

    def stages(self, who: Principal) -> list[StageEntry]:
        """What waits to be published by writers that this principal may see, by handle."""
        return self._stages.stages(who)
