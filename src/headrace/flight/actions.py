"""Handlers of DoAction: each decodes its request, calls the broker on its event loop, and returns a JSON value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.overview import Report, overview, topic_counters
from headrace.engine.contract import Topic
from headrace.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic
from headrace.flight import request
from headrace.flight.bridge import Bridge
from headrace.flight.local import machine
from headrace.limits import FLIGHT_SCHEMAS_BYTES_MAX, FLIGHT_WAITS_MAX

_PROBE_BYTES: Final = 1


class Actions:
    """The handlers. `answer` is called on a Flight thread; the handlers run on the broker's event loop."""

    def __init__(self, broker: Broker, bridge: Bridge, report: Report = dict, *, local_files: bool = True) -> None:
        """`report` returns the facts of the server process. `local_files`: callers on this machine may learn where the files are."""
        self._broker, self._bridge, self._report, self._local_files = broker, bridge, report, local_files
        self._waiting = 0

    def answer(self, who: Principal, action: str, body: bytes) -> object:
        """Execute an action. Raises `InvalidRequest` and the errors of the broker."""
        kind = request.ACTIONS.get(action)
        if kind is None:
            raise InvalidRequest(f"unknown action {action[:60]!r}; expected one of {', '.join(request.ACTIONS)}")
        wanted = request.decode(body or b"{}", kind, f"body of {action}")
        handler: Callable[[Principal, Any], Any] = getattr(self, f"_{action}")
        return self._bridge.wait(lambda: self._broker.with_new_topics(lambda: handler(who, wanted)))

    async def _topics(self, who: Principal, wanted: request.Topics) -> list[str]:
        return await self._names(who)

    async def _describe(self, who: Principal, wanted: request.Describe) -> object:
        if wanted.topics is not None:
            return await self._states(who, wanted.topics)
        return await self._states(who, await self._names(who), if_there=True)

    async def _names(self, who: Principal) -> list[str]:
        return [name for names in await self._broker.listed(who, lambda topics: [topic.name for topic in topics]) for name in names]

    async def _states(self, who: Principal, names: Iterable[str], *, if_there: bool = False) -> dict[str, object]:
        """Return the states of topics, without duplicates. Yields to the event loop between topics: partitions may be thousands."""
        found: dict[str, object] = {}
        for name in dict.fromkeys(names):
            try:
                found[name] = self._state(who, self._broker.topic(who, name))
            except UnknownTopic:
                if not if_there:
                    raise
            await asyncio.sleep(0)
        return found

    def _state(self, who: Principal, topic: Topic) -> object:
        bounds = [self._broker.bounds(who, topic.name, partition) for partition in range(topic.partitions)]
        sizes = [self._broker.size_bytes(who, topic.name, partition) for partition in range(topic.partitions)]
        return {
            "partitions": [[held.first, held.end, size] for held, size in zip(bounds, sizes, strict=True)],
            "retention_ms": topic.config.retention_ms,
            "cleanup": topic.config.cleanup.value,
        }

    async def _split(self, who: Principal, wanted: request.Split) -> list[tuple[int, int]]:
        return await self.split(who, wanted.topic, wanted.partition, wanted.start, wanted.stop, wanted.parts)

    async def split(self, who: Principal, topic: str, partition: int, start: int, stop: int, parts: int) -> list[tuple[int, int]]:
        """Divide a range into at most `parts` ranges of about equal size, at batch boundaries where there are any."""
        bounds = self._broker.bounds(who, topic, partition)
        if start > stop:
            raise InvalidRequest(f"a range cannot end at {stop} before it starts at {start}")
        if start < bounds.first or stop > bounds.end:
            raise OffsetOutOfRange(wanted=start if start < bounds.first else stop, first=bounds.first, end=bounds.end)
        cuts = [start]
        for part in range(1, parts):
            target = start + (stop - start) * part // parts
            if target <= cuts[-1]:
                continue
            found = await self._broker.fetch(who, topic, partition, target, bytes_max=_PROBE_BYTES, records_max=1)
            await asyncio.sleep(0)  # reads from the page cache do not yield, and there may be thousands
            border = found.batches[0].base_offset if found.batches else stop
            if border <= cuts[-1]:
                border = target  # inside a batch, which two readers then read
            if border < stop:
                cuts.append(border)
        return list(zip(cuts, [*cuts[1:], stop], strict=True)) if start < stop else []

    async def _local_file(self, who: Principal, wanted: request.LocalFile) -> str | None:
        return (self._broker.local_file or None) if self._local_files and wanted.machine == machine() != "" else None

    async def _locate(self, who: Principal, wanted: request.Locate) -> object:
        if wanted.start > wanted.stop:
            raise InvalidRequest(f"a range cannot end at {wanted.stop} before it starts at {wanted.start}")
        return await self._broker.locate(who, wanted.topic, wanted.partition, wanted.start, wanted.stop)

    async def _commit(self, who: Principal, wanted: request.Commit) -> None:
        offsets = {(topic, partition): offset for topic, places in wanted.offsets.items() for partition, offset in places.items()}
        if offsets:
            await self._broker.commit(who, wanted.group, offsets)

    async def _committed(self, who: Principal, wanted: request.Committed) -> dict[int, int]:
        partitions = range(self._broker.topic(who, wanted.topic).partitions)
        found = {partition: self._broker.committed(who, wanted.group, wanted.topic, partition) for partition in partitions}
        return {partition: offset for partition, offset in found.items() if offset is not None}

    async def _offset_for_time(self, who: Principal, wanted: request.OffsetForTime) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for partition, time_ms in wanted.times.items():
            end = self._broker.bounds(who, wanted.topic, partition).end
            offset = await self._broker.offset_for_time(who, wanted.topic, partition, time_ms)
            found[partition] = offset if offset < end else None
        return found

    async def _wait(self, who: Principal, wanted: request.Wait) -> object:
        if wanted.wait_ms:
            self._waiting += 1
            try:
                if self._waiting <= FLIGHT_WAITS_MAX:  # beyond the limit the reply is immediate, and the client waits again
                    await self._broker.wait_for_growth(who, wanted.ends, wanted.wait_ms)
            finally:
                self._waiting -= 1
        return await self._states(who, wanted.ends)

    async def _schema(self, who: Principal, wanted: request.Schema) -> object:
        self._broker.topic(who, wanted.topic)
        schemas = self._broker.schemas
        required = schemas.requirement(who, wanted.topic)
        if required is None:
            return None
        found = schemas.find(who, required.schema, wanted.version or required.version)
        versions = schemas.versions(who, required.schema)
        others = [one for one in reversed(versions) if one.version < found.version] + [
            one for one in versions if one.version > found.version
        ]
        room, kept = FLIGHT_SCHEMAS_BYTES_MAX, list[bytes]()
        for one in others:
            room -= len(one.definition)
            if room < 0:
                break
            kept.append(one.definition)
        return {"name": found.name, "version": found.version, "kind": found.type.value, "definition": found.definition, "others": kept}

    async def _create_topic(self, who: Principal, wanted: request.CreateTopic) -> object:
        topic = await self._broker.create_topic(who, wanted.name, partitions=wanted.partitions)
        return {"name": topic.name, "partitions": topic.partitions}

    async def _ensure_topic(self, who: Principal, wanted: request.EnsureTopic) -> object:
        topic = await self._broker.ensure_topic(who, wanted.name)
        return {"name": topic.name, "partitions": topic.partitions}

    async def _status(self, who: Principal, wanted: request.Status) -> object:
        return await overview(self._broker, who, self._report())

    async def _topic_counters(self, who: Principal, wanted: request.TopicCounters) -> object:
        return await topic_counters(self._broker, who)

    # Exactly-once writers

    async def _publish(self, who: Principal, wanted: request.Publish) -> object:
        done = await self._broker.publish_staged(
            who, wanted.writer, wanted.version, wanted.handles, epoch=wanted.epoch, remember_ms=wanted.remember_ms
        )
        return {"writer": done.writer, "version": done.version, "already": done.already, "records": done.records}

    async def _drop(self, who: Principal, wanted: request.Drop) -> int:
        return await self._broker.drop_staged(who, wanted.handles)

    async def _last_version(self, who: Principal, wanted: request.LastVersion) -> int | None:
        return self._broker.last_version(who, wanted.writer)
