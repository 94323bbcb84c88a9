"""In-memory engine: the readable definition of the contract.

Nothing survives the process, so `ack` guarantees only order. Everything else is as in the embedded engine: an append is staged at once
and becomes visible in the next turn of the loop, together with all writes of the same call. Then its future resolves and the watchers
wake. `close` followed by `open` on the same object keeps the records, as a restart does.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from headrace.engine.catalog import log_options
from headrace.engine.checks import check_batch
from headrace.engine.contract import (
    Ack,
    Appended,
    AppendedEach,
    Batch,
    Bounds,
    Capabilities,
    Cleanup,
    Health,
    Located,
    Ownership,
    Topic,
    TopicConfig,
    Write,
)
from headrace.engine.each import append_by_future, append_by_partition
from headrace.engine.partition_limits import check_partitions
from headrace.errors import (
    BrokerError,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.records import NEVER, ColumnBatch, RecordBatch
from headrace.storage.batch import StoredBatch
from headrace.storage.batching import chunked
from headrace.storage.encoding import encode


@dataclass(slots=True, eq=False)
class _Partition:
    number: int
    first: int = 0
    end: int = 0
    batches: list[StoredBatch] = field(default_factory=list)
    watchers: dict[object, Callable[[], None]] = field(default_factory=dict)
    gone: bool = False

    def wake(self) -> None:
        for watcher in list(self.watchers.values()):
            watcher()


@dataclass(slots=True)
class _Staged:
    writes: list[tuple[Write, _Partition, TopicConfig]]
    future: asyncio.Future[list[Appended]]


class MemoryEngine:
    """Implements `Engine` in memory. `clock` returns Unix ms; it stamps batches without timestamps and drives retention."""

    capabilities = Capabilities(sync_per_append=False)
    epoch = 0
    offset_store = None
    local_file = ""

    def __init__(self, *, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.health = Health()
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[str, list[_Partition]] = {}
        self._staged: list[_Staged] = []
        self._numbers = 0
        self._is_open = False
        self.ownership = Ownership()
        self.topic_changed: Callable[[str], None] = lambda name: None

    async def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._flush()
        self._is_open = False

    # Topics

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        if name in self._topics:
            raise TopicExists(name)
        check_partitions(self._topics, name, partitions, internal=internal)
        self._topics[name] = Topic(name, partitions, config, internal)
        self._partitions[name] = [self._new_partition() for _ in range(partitions)]
        return self._topics[name]

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        old = self._topics.get(name)
        if old is None:
            raise UnknownTopic(name)
        count = old.partitions if partitions is None else partitions
        check_partitions(self._topics, name, count, internal=old.internal)
        self._topics[name] = Topic(name, count, old.config if config is None else config, old.internal)
        self._partitions[name] += [self._new_partition() for _ in range(count - old.partitions)]
        return self._topics[name]

    async def delete_topic(self, name: str) -> None:
        if self._topics.pop(name, None) is None:
            raise UnknownTopic(name)
        for partition in self._partitions.pop(name):
            partition.gone = True
            partition.wake()

    def topics(self) -> Mapping[str, Topic]:
        return MappingProxyType(self._topics)

    async def look_for_topic(self, name: str) -> bool:
        return name in self._topics

    def _new_partition(self) -> _Partition:
        self._numbers += 1
        return _Partition(self._numbers)

    def _find(self, topic: str, partition: int) -> _Partition:
        partitions = self._partitions.get(topic)
        if partitions is None:
            raise UnknownTopic(topic)
        if not 0 <= partition < len(partitions):
            raise UnknownPartition(topic, partition)
        return partitions[partition]

    # Writing

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        if not self._is_open:
            raise Unavailable("the engine is not open")
        found = [(write, self._find(write.topic, write.partition), self._topics[write.topic].config) for write in writes]
        for write in writes:
            if isinstance(write.batch, (RecordBatch, ColumnBatch)):
                write.size_bytes = check_batch(write.batch)
        loop = asyncio.get_running_loop()
        if not self._staged:
            loop.call_soon(self._flush)
        staged = _Staged(found, loop.create_future())
        self._staged.append(staged)
        return staged.future

    def append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        append_by_future(self.append, write, done)

    def append_each(
        self, places: Sequence[tuple[str, int]], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[AppendedEach]:
        for topic, partition in places:
            self._find(topic, partition)
        return append_by_partition(self.append, places, values, keys)

    def _flush(self) -> None:
        """Make all staged writes visible, in order; then resolve futures and wake watchers."""
        round_, self._staged = self._staged, []
        moved: dict[_Partition, None] = {}
        for staged in round_:
            try:
                appended, batches = self._prepare(staged.writes)
            except BrokerError as error:
                if not staged.future.cancelled():
                    staged.future.set_exception(error)
                continue
            for partition, batch in batches:
                partition.batches.append(batch)
                partition.end = batch.next_offset
                moved[partition] = None
            if not staged.future.cancelled():
                staged.future.set_result(appended)
        for partition in moved:
            partition.wake()

    def _prepare(self, writes: list[tuple[Write, _Partition, TopicConfig]]) -> tuple[list[Appended], list[tuple[_Partition, StoredBatch]]]:
        """Encode the writes of one call without making any visible: a failure here fails all of them."""
        now = self._clock()
        ends: dict[_Partition, int] = {}
        appended: list[Appended] = []
        batches: list[tuple[_Partition, StoredBatch]] = []
        for write, partition, config in writes:
            if partition.gone:
                raise UnknownTopic(write.topic)
            record_batch = write.batch
            if not isinstance(record_batch, (RecordBatch, ColumnBatch)):
                record_batch = record_batch(list(appended))
                check_batch(record_batch)
            base = offset = ends.get(partition, partition.end)
            for chunk in chunked([record_batch], now, small=False):
                batches.append((partition, StoredBatch.parse(encode(partition.number, offset, chunk, now=now, compress=config.compress))))
                offset += len(chunk)
            ends[partition] = offset
            appended.append(Appended(base, len(record_batch), now if record_batch.timestamps is None else record_batch.timestamps[0]))
        return appended, batches

    # Reading

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        return self._read(topic, partition, offset, bytes_max, records_max)

    def read_now(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch] | None:
        try:
            return self._read(topic, partition, offset, bytes_max, records_max) or None
        except BrokerError:
            return None

    def _read(self, topic: str, partition: int, offset: int, bytes_max: int, records_max: int) -> list[Batch]:
        log = self._find(topic, partition)
        if not log.first <= offset <= log.end:
            raise OffsetOutOfRange(wanted=offset, first=log.first, end=log.end)
        found: list[Batch] = []
        index = bisect_right(log.batches, offset, key=lambda batch: batch.next_offset)
        for batch in log.batches[index:]:
            rest = batch.from_offset(offset)
            if len(rest) == 0:
                continue
            part = _fit(rest, bytes_max, records_max, at_least=0 if found else 1)
            if len(part):
                found.append(part)
            if len(part) < len(rest):
                break
            bytes_max -= sum(_record_sizes(part))
            records_max -= len(part)
        return found

    async def locate(self, topic: str, partition: int, offset: int, stop: int) -> Located:
        return Located(stop)

    def bounds(self, topic: str, partition: int) -> Bounds:
        log = self._find(topic, partition)
        return Bounds(log.first, log.end)

    def size_bytes(self, topic: str, partition: int) -> int:
        return sum(batch.header.size for batch in self._find(topic, partition).batches)

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        log = self._find(topic, partition)
        for batch in log.batches:
            if batch.header.max_timestamp >= timestamp:
                return next(offset for offset, time in zip(batch.offsets(), batch.timestamps(), strict=True) if time >= timestamp)
        return log.end

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        log, token = self._find(topic, partition), object()
        log.watchers[token] = wake

        def stop() -> None:
            log.watchers.pop(token, None)

        return stop

    # Housekeeping

    async def maintain(self) -> None:
        now = self._clock()
        for name, topic in self._topics.items():
            for partition in self._partitions[name]:
                if topic.config.cleanup is Cleanup.COMPACT:
                    _compact(partition, now - topic.config.tombstone_retention_ms)
                else:
                    _retain(partition, topic.config, now)


def _record_sizes(batch: StoredBatch) -> list[int]:
    keys = batch.keys()
    if keys is None:
        return batch.value_sizes()
    return [size + len(key or b"") for size, key in zip(batch.value_sizes(), keys, strict=True)]


def _fit(batch: StoredBatch, bytes_max: int, records_max: int, *, at_least: int) -> StoredBatch:
    """Return the longest prefix of the batch within both limits."""
    count = 0
    for size in _record_sizes(batch):
        bytes_max -= size
        if count >= at_least and (bytes_max < 0 or count >= records_max):
            break
        count += 1
    return batch.window(0, count)


def _retain(partition: _Partition, config: TopicConfig, now: int) -> None:
    """Drop the oldest batches that exceed the age or size limit or have expired."""
    kept = partition.batches
    total = sum(batch.header.size for batch in kept)
    dropped = 0
    for batch in kept:
        too_old = config.retention_ms > 0 and batch.header.max_timestamp < now - config.retention_ms
        expiry = _expires_at(batch)
        expired = expiry != NEVER and expiry <= now - log_options(config, has_key=False).expired_keep_ms
        too_much = config.retention_bytes > 0 and total - batch.header.size >= config.retention_bytes
        if not (too_old or too_much or expired):
            break
        total -= batch.header.size
        dropped += 1
    if dropped:
        partition.batches = kept[dropped:]
        partition.first = partition.batches[0].first_offset if partition.batches else partition.end


def _expires_at(batch: StoredBatch) -> int:
    expiries = batch.expiries()
    return NEVER if expiries is None or NEVER in expiries else max(expiries)


def _compact(partition: _Partition, tombstones_before: int) -> None:
    """Keep the newest record of each key and every record without a key. Offsets do not change, so gaps appear. `first` stays too: a reader
    that starts there misses no kept record."""
    newest: dict[bytes | None, int] = {}
    for batch in partition.batches:
        newest.update(zip(batch.keys() or (), batch.offsets(), strict=False))
    kept = [_survivors(batch, newest, tombstones_before) for batch in partition.batches]
    partition.batches = [batch for batch in kept if batch is not None]


def _survivors(batch: StoredBatch, newest: Mapping[bytes | None, int], tombstones_before: int) -> StoredBatch | None:
    records = [
        record
        for record in batch.records()
        if record.key is None
        or (newest[record.key] == record.offset and not (record.value is None and record.timestamp <= tombstones_before))
    ]
    if len(records) == len(batch) or not records:
        return batch if records else None
    record_batch = RecordBatch(
        [record.value for record in records],
        [record.key for record in records],
        [record.headers for record in records],
        [record.timestamp for record in records],
        [record.expiry for record in records],
    )
    base = batch.header.base_offset
    deltas = [record.offset - base for record in records]
    return StoredBatch.parse(encode(batch.header.log, base, record_batch, now=0, deltas=deltas, span=batch.header.span))
