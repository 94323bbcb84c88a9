"""Broker operations of positions: the bounds of a partition, and where its records lie in files."""

from __future__ import annotations

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.meters import Meters
from headrace.broker.publishing.publish import Publisher
from headrace.broker.topics import Topics
from headrace.engine.contract import Bounds, Engine, Located
from headrace.errors import OffsetOutOfRange


class PositionOperations:
    """Part of `Broker`."""

    _authorizer: Authorizer
    _engine: Engine
    _topics: Topics
    _publisher: Publisher
    meters: Meters

    def _check_sees(self, who: Principal, topic: str) -> None:
        raise NotImplementedError

    def bounds(self, who: Principal, topic: str, partition: int) -> Bounds:
        """Return the first offset and the end offset, which is the next to be assigned."""
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return self._engine.bounds(topic, partition)

    async def offset_for_time(self, who: Principal, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset whose record is at or after the time; the end offset if there is none."""
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return await self._engine.offset_for_time(topic, partition, timestamp_ms)

    def size_bytes(self, who: Principal, topic: str, partition: int) -> int:
        """Return the approximate disk space of the partition."""
        self._check_sees(who, topic)
        self._topics.find_partition(topic, partition)
        return self._engine.size_bytes(topic, partition)

    @property
    def local_file(self) -> str:
        """Path of a file that exactly those processes of this machine can open that can read the files of the log; empty if it has none."""
        return self._engine.local_file

    async def locate(self, who: Principal, topic: str, partition: int, offset: int, stop: int) -> Located:
        """Return where batches with offsets in [offset, stop) lie in files, for a reader on this machine. Their records count as delivered.
        All others must be fetched. Raises `OffsetOutOfRange` as `fetch` does."""
        self._authorizer.check(who, Action.READ, "topic", topic)
        self._topics.find_partition(topic, partition)
        bounds = self._engine.bounds(topic, partition)
        if not bounds.first <= offset <= stop <= bounds.end:
            raise OffsetOutOfRange(wanted=stop if bounds.first <= offset <= bounds.end else offset, first=bounds.first, end=bounds.end)
        if self._publisher.tracer is not None:
            return Located(stop)  # spans need the headers of the records
        began = self.meters.ticks()
        located = await self._engine.locate(topic, partition, offset, stop)
        meter = self.meters.meter(topic, who.protocol)
        for batch in located.batches:
            records = min(batch.base_offset + batch.count, stop) - max(batch.base_offset, offset)
            meter.delivered_records += records
            meter.delivered_bytes += batch.content_bytes * records // batch.count
        meter.fetch_duration.observe(self.meters.ticks() - began)
        return located
