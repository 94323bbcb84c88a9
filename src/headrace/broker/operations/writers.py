"""Broker operations of exactly-once writers: stage records, then publish all of them atomically and once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.coordinated import Coordinated
from headrace.broker.writers.progress import WriterEntry
from headrace.broker.writers.stages import Publication, StageEntry, Stages, StageSize
from headrace.engine.contract import Engine
from headrace.errors import NotAuthorized
from headrace.records import AnyBatch

_KIND: Final = "writer"
"""Resource kind of a writer in access rules."""


class WriterOperations(Coordinated):
    """Part of `Broker`. `Stages` asks `WriterPermissions` while it works: what a call needs depends on the writer's row and its stages."""

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
        """Stage records; they are invisible until `publish_staged`. The future resolves when there is room for them: await it before
        staging more. The batches of a handle keep the order of the calls.

        Raises at once as `publish` does, `StaleEpoch`, `UnknownStage` for a removed handle, `LimitExceeded`, and `InvalidRequest` for a
        handle that is sealed or belongs to another writer. The future fails with `DiskFull` or `StorageFailed`. After an error nothing
        of the batch is staged.
        """
        self.check_coordinator()
        return self._stages.stage(who, handle, topic, batch, writer=writer, epoch=epoch, order=order, partition=partition)

    async def seal(self, who: Principal, handle: str, *, writer: str = "", epoch: str = "", order: int = 0) -> StageSize:
        """Close a stage for further records. Idempotent. Creates an empty stage if `writer` is given, else raises `UnknownStage` for
        an unknown handle."""
        self.check_coordinator()
        return await self._stages.seal(who, handle, writer, epoch, order)

    async def publish_staged(
        self, who: Principal, writer: str, version: int, handles: Sequence[str], *, epoch: str = "", remember_ms: int = 0
    ) -> Publication:
        """Publish all records of these handles atomically. If this or a later version of the writer is already published, publish nothing
        and drop the handles. Durable when it returns. `remember_ms` is how long to remember a writer that will not return.

        Raises `UnknownStage`, `StaleEpoch`, `InvalidRequest` for a handle that is not sealed, and as a transaction's commit does.
        """
        self.check_coordinator()
        return await self._stages.publish(who, writer, version, handles, epoch, remember_ms)

    async def drop_staged(self, who: Principal, handles: Sequence[str]) -> int:
        """Drop staged records and return how many handles existed. None of the handles can be used again."""
        self.check_coordinator()
        return await self._stages.drop(who, handles)

    def last_version(self, who: Principal, writer: str) -> int | None:
        """Return the last version that the writer has published completely; None if there is none."""
        self.check_coordinator()
        return self._stages.last_version(who, writer)

    async def forget_writer(self, who: Principal, writer: str) -> None:
        """Forget the writer's versions, epochs and stages. It may then start with any version. Raises `NoSuchEntry`."""
        self.check_coordinator()
        await self._stages.forget_writer(who, writer)

    def writers(self, who: Principal) -> list[WriterEntry]:
        """Return the exactly-once writers that this principal may see, by name."""
        self.check_coordinator()
        return self._stages.writers(who)

    def stages(self, who: Principal) -> list[StageEntry]:
        """Return the stages of writers that this principal may see, by handle."""
        self.check_coordinator()
        return self._stages.stages(who)


class WriterPermissions:
    """Permissions on writers. A writer's name alone grants nothing: its versions and stages belong to principals that may publish to the
    topics of its last publication."""

    def __init__(self, authorizer: Authorizer, engine: Engine) -> None:
        self._authorizer, self._engine = authorizer, engine

    def check_publishes(self, who: Principal, writer: str) -> None:
        self._authorizer.check(who, Action.PUBLISH, _KIND, writer)

    def check_deletes(self, who: Principal, writer: str) -> None:
        self._authorizer.check(who, Action.DELETE, _KIND, writer)

    def check_sees(self, who: Principal, writer: str, topics: Iterable[str]) -> None:
        if not self.sees(who, writer, topics):
            raise NotAuthorized(principal=who.name, action=Action.DESCRIBE.value, resource=f"{_KIND} {writer!r}")

    def check_topics(self, who: Principal, writer: str, topics: Iterable[str]) -> None:
        """Raise `NotAuthorized`, which names the topic only to principals that may see it."""
        for topic in self._present(topics):
            try:
                self._authorizer.check(who, Action.PUBLISH, "topic", topic)
            except NotAuthorized:
                if self._authorizer.allows_topic(who, topic):
                    raise
                raise NotAuthorized(principal=who.name, action=Action.PUBLISH.value, resource=f"{_KIND} {writer!r}") from None

    def acts(self, who: Principal, writer: str) -> bool:
        """Return whether the principal may act for the writer. Uses `check`, so that a denial is audited although the caller hides it."""
        try:
            self.check_publishes(who, writer)
        except NotAuthorized:
            return False
        return True

    def sees(self, who: Principal, writer: str, topics: Iterable[str]) -> bool:
        """Return whether the principal may see the writer and the topics it writes to."""
        may = any(self._authorizer.allows(who, action, _KIND, writer) for action in (Action.DESCRIBE, Action.PUBLISH))
        return may and all(self._authorizer.allows_topic(who, topic) for topic in self._present(topics))

    def _present(self, topics: Iterable[str]) -> list[str]:
        """Return the topics that exist. A deleted topic leaves nothing to protect."""
        known = self._engine.topics()
        return [topic for topic in topics if topic in known]
