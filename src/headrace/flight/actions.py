"""The actions of the Flight endpoint: each takes its request apart, asks the broker on its loop, and answers with what JSON can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.engine.contract import Topic
from headrace.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic
from headrace.flight import request
from headrace.flight.bridge import Bridge
from headrace.limits import FLIGHT_SCHEMAS_BYTES_MAX, FLIGHT_WAITS_MAX

_PROBE_BYTES: Final = 1


class Verbs:
    """`answer` is called on a Flight thread; what it calls on the broker runs on the loop."""

    def __init__(self, broker: Broker, bridge: Bridge) -> None:
        self._broker, self._bridge = broker, bridge
        self._waiting = 0

    def answer(self, who: Principal, verb: str, body: bytes) -> object:
        """Raises `InvalidRequest` and whatever the broker raises."""
        kind = request.ACTIONS.get(verb)
        if kind is None:
            raise InvalidRequest(f"no action {verb[:60]!r}; there are {', '.join(request.ACTIONS)}")
        asked = request.decode(body or b"{}", kind, f"body of {verb}")
        handler: Callable[[Principal, Any], Any] = getattr(self, f"_{verb}")
        return self._bridge.wait(lambda: handler(who, asked))

    async def _topics(self, who: Principal, asked: request.Topics) -> list[str]:
        return [topic.name for topic in self._broker.topics(who)]

    async def _describe(self, who: Principal, asked: request.Describe) -> object:
        if asked.topics is not None:
            return await self._states(who, asked.topics)
        return await self._states(who, [topic.name for topic in self._broker.topics(who)], if_there=True)

    async def _states(self, who: Principal, names: Iterable[str], *, if_there: bool = False) -> dict[str, object]:
        """Topics as they are, each once. There may be thousands of partitions, and others want the loop."""
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

    async def _split(self, who: Principal, asked: request.Split) -> list[tuple[int, int]]:
        return await self.split(who, asked.topic, asked.partition, asked.start, asked.stop, asked.parts)

    async def split(self, who: Principal, topic: str, partition: int, start: int, stop: int, parts: int) -> list[tuple[int, int]]:
        """Ranges that begin where batches do, of about as many offsets each. Fewer than `parts` where batches are large."""
        bounds = self._broker.bounds(who, topic, partition)
        if start > stop:
            raise InvalidRequest(f"a range cannot end at {stop} before it starts at {start}")
        if start < bounds.first or stop > bounds.end:
            raise OffsetOutOfRange(wanted=start if start < bounds.first else stop, first=bounds.first, end=bounds.end)
        cuts = [start]
        for part in range(1, parts):
            wanted = start + (stop - start) * part // parts
            if wanted <= cuts[-1]:
                continue
            found = await self._broker.fetch(who, topic, partition, wanted, bytes_max=_PROBE_BYTES, records_max=1)
            await asyncio.sleep(0)  # what is in the page cache is read at once, and there may be thousands of these
            border = found.batches[0].base_offset if found.batches else stop
            if cuts[-1] < border < stop:
                cuts.append(border)
        return list(zip(cuts, [*cuts[1:], stop], strict=True)) if start < stop else []

    async def _commit(self, who: Principal, asked: request.Commit) -> None:
        offsets = {(topic, partition): offset for topic, places in asked.offsets.items() for partition, offset in places.items()}
        if offsets:
            await self._broker.commit(who, asked.group, offsets)

    async def _committed(self, who: Principal, asked: request.Committed) -> dict[int, int]:
        partitions = range(self._broker.topic(who, asked.topic).partitions)
        found = {partition: self._broker.committed(who, asked.group, asked.topic, partition) for partition in partitions}
        return {partition: offset for partition, offset in found.items() if offset is not None}

    async def _offset_for_time(self, who: Principal, asked: request.OffsetForTime) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for partition, time_ms in asked.times.items():
            end = self._broker.bounds(who, asked.topic, partition).end
            offset = await self._broker.offset_for_time(who, asked.topic, partition, time_ms)
            found[partition] = offset if offset < end else None
        return found

    async def _wait(self, who: Principal, asked: request.Wait) -> object:
        if asked.wait_ms:
            self._waiting += 1
            try:
                if self._waiting <= FLIGHT_WAITS_MAX:  # one more is answered at once: it asks again, and nobody is refused
                    await self._broker.wait_for_growth(who, asked.ends, asked.wait_ms)
            finally:
                self._waiting -= 1
        return await self._states(who, asked.ends)

    async def _schema(self, who: Principal, asked: request.Schema) -> object:
        self._broker.topic(who, asked.topic)
        schemas = self._broker.schemas
        wanted = schemas.requirement(who, asked.topic)
        if wanted is None:
            return None
        found = schemas.find(who, wanted.schema, asked.version or wanted.version)
        versions = schemas.versions(who, wanted.schema)
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

    async def _create_topic(self, who: Principal, asked: request.CreateTopic) -> object:
        topic = await self._broker.create_topic(who, asked.name, partitions=asked.partitions)
        return {"name": topic.name, "partitions": topic.partitions}

    async def _ensure_topic(self, who: Principal, asked: request.EnsureTopic) -> object:
        topic = await self._broker.ensure_topic(who, asked.name)
        return {"name": topic.name, "partitions": topic.partitions}

    # Exactly-once writers

    async def _publish(self, who: Principal, asked: request.Publish) -> object:
        done = await self._broker.publish_staged(
            who, asked.writer, asked.version, asked.handles, epoch=asked.epoch, remember_ms=asked.remember_ms
        )
        return {"writer": done.writer, "version": done.version, "already": done.already, "records": done.records}

    async def _drop(self, who: Principal, asked: request.Drop) -> int:
        return await self._broker.drop_staged(who, asked.handles)

    async def _last_version(self, who: Principal, asked: request.LastVersion) -> int | None:
        return self._broker.last_version(who, asked.writer)
