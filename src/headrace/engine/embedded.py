"""Embedded engine: implements the contract over the store of one data directory, in this process.

The event loop stages appends. The store's writer thread makes them safe and returns the completions of a whole flush in one call. Reads
run on the loop if the page cache has the bytes, otherwise on a reader thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

from headrace.engine.catalog import (
    CATALOG_LOG,
    CATALOG_SEGMENT_BYTES,
    Catalog,
    Entry,
    delete_records,
    log_options,
    put_record,
    removed_record,
)
from headrace.engine.checks import check_batch
from headrace.engine.completions import Completions
from headrace.engine.contract import (
    Ack,
    Appended,
    AppendedEach,
    Batch,
    Bounds,
    Capabilities,
    Health,
    Located,
    Ownership,
    Topic,
    TopicConfig,
    Write,
)
from headrace.engine.partition_limits import check_partitions
from headrace.engine.single_writes import SingleWrites
from headrace.errors import (
    BrokerError,
    CorruptData,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.records import AnyBatch, ColumnBatch, RecordBatch
from headrace.storage.batch import StoredBatch
from headrace.storage.files import Files, NotCached
from headrace.storage.health import retry_seconds
from headrace.storage.identity import PATH as IDENTITY
from headrace.storage.partition import LogOptions, Partition
from headrace.storage.staged import LateBatch
from headrace.storage.store import Store, StoreOptions

_READ_THREADS: Final = 4
_THREADS_START_SECONDS: Final = 60
_MAINTAIN: Final = "retention and compaction"
_REMOVE: Final = "removal of deleted topics"
_PAUSE_INTERVALS_MAX: Final = 10
"""Longest pause after failed maintenance, in intervals."""
_LOOP_READ_BYTES_MAX: Final = 1024 * 1024
_TURN_BYTES_MAX: Final = 1024 * 1024
"""Reads of one turn of the event loop, after which further ones wait for the next turn. Many loops of the broker read until they find
something, and a read from memory does not suspend them."""
_BATCH_COST_BYTES: Final = 8 * 1024
"""Cost of a batch of any size in that sum."""
_SMALL_READ_RECORDS_MAX: Final = 32
"""A read of at most this many records has a reserve of the same size, so that it does not wait because others have read a lot."""
_CATALOG_READ_BYTES: Final = 1024 * 1024
_T = TypeVar("_T")


def _checked(build: LateBatch) -> LateBatch:
    """Apply the same checks to a batch that is built on the writer thread."""

    def built(placed: Sequence[Appended]) -> AnyBatch:
        batch = build(placed)
        check_batch(batch)
        return batch

    return built


def _may_read_on_loop(log: Partition, offset: int, bytes_max: int) -> bool:
    """Reading megabytes blocks the loop for milliseconds even from the page cache. Reading the tail in memory does not."""
    return bytes_max <= _LOOP_READ_BYTES_MAX or offset >= log.segments_end()


class EmbeddedEngine:
    """Implements `headrace.engine.contract.Engine` on disk."""

    capabilities = Capabilities()
    epoch = 0
    offset_store = None

    def __init__(
        self, files: Files, options: StoreOptions | None = None, *, clock: Callable[[], int], maintain_interval_seconds: float = 30
    ) -> None:
        self._files = files
        self._options = options or StoreOptions()
        self._clock = clock
        self._maintain_interval_seconds = maintain_interval_seconds
        self._catalog = Catalog()
        self._topics: dict[str, Topic] = {}
        self._partitions = 0
        """Of all topics that are not internal."""
        self._places: dict[tuple[str, int], tuple[int, Ack]] = {}
        """Log and ack level by topic and partition. Cleared when a topic changes."""
        self._logs: dict[tuple[str, int], int] = {}
        self._acks: set[Ack] = set()
        """The logs of `_places`, and all its ack levels."""
        self._readable: dict[tuple[str, int], Partition] = {}
        """Partitions that `read_now` has read, by topic and partition. Cleared when a topic changes."""
        self.ownership = Ownership()
        self.topic_changed: Callable[[str], None] = lambda name: None  # one process owns the directory
        self._changing = asyncio.Lock()
        """Serializes the creation, change and deletion of topics."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="headrace-reader")
        self._upkeep = ThreadPoolExecutor(1, thread_name_prefix="headrace-upkeep")
        """Runs maintenance, deletions and closing, also when no more threads can be started."""
        self._turn_bytes = 0
        """Bytes read on the event loop in this turn, approximately."""
        self.health = Health()
        self._store: Store | None = None
        self._completions: Completions | None = None
        self._single_writes: SingleWrites | None = None
        """Both are those of the open store."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def store(self) -> Store:
        assert self._store is not None, "the engine is not open"
        return self._store

    @property
    def _opened_completions(self) -> Completions:
        assert self._completions is not None, "the engine is not open"
        return self._completions

    @property
    def opened_store(self) -> Store | None:
        """The store while the engine is open. Its counters may be read by any thread."""
        return self._store

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._start_readers()
        self._store = await self._off_loop(partial(Store.open, self._files, self._options, threads=False, health=self.health))
        self._completions = Completions(self._loop)
        self._store.deliver = self._completions.deliver
        self._single_writes = SingleWrites(self._store, self._places, self._place, self._clock)
        try:
            await self._off_loop(self._load_catalog)
            self._store.start()
        except BaseException:
            await self._off_loop(self._store.close)
            self._completions.close()
            self._store = self._single_writes = None
            raise
        for first, logs in list(self._catalog.deleted.items()):
            self._spawn(self._remove(first, logs))
        self._spawn(self._maintain_forever())

    async def _start_readers(self) -> None:
        """Start all threads of the pool, because connections may use up the threads later."""
        together = threading.Barrier(_READ_THREADS, timeout=_THREADS_START_SECONDS)
        assert self._loop is not None
        try:
            started = [self._loop.run_in_executor(self._readers, together.wait) for _ in range(_READ_THREADS)]
        except RuntimeError:
            together.abort()
            raise
        await asyncio.gather(*started)

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        """Run on the upkeep thread."""
        assert self._loop is not None
        return await self._loop.run_in_executor(self._upkeep, work)

    def _load_catalog(self) -> None:
        store, has_key = self.store, self._options.key is not None
        store.open_log(CATALOG_LOG, LogOptions(segment_bytes=CATALOG_SEGMENT_BYTES, compact=True, encrypt=has_key))
        bounds = store.bounds(CATALOG_LOG)
        offset = bounds.first
        while offset < bounds.end:
            batches = store.read(CATALOG_LOG, offset, bytes_max=_CATALOG_READ_BYTES)
            if not batches:
                break
            self._catalog.apply(batches)
            offset = batches[-1].next_offset
        for entry in self._catalog.entries.values():
            self._topics[entry.topic.name] = entry.topic
            self._count_partitions(entry.topic, None)
            for log in entry.logs:
                store.open_log(log, log_options(entry.topic.config, has_key=has_key))
        for logs in self._catalog.deleted.values():
            for log in logs:
                store.open_log(log, LogOptions())  # reserves its number, so that no new topic gets it

    async def close(self) -> None:
        store, self._store, self._single_writes = self._store, None, None
        self._readable.clear()
        if store is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._off_loop(store.close)
        finally:
            self._opened_completions.close()
            self._readers.shutdown()
            self._upkeep.shutdown()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Topics.

    def topics(self) -> Mapping[str, Topic]:
        return MappingProxyType(self._topics)

    async def look_for_topic(self, name: str) -> bool:
        return name in self._topics

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        async with self._changing:
            if name in self._topics:
                raise TopicExists(name)
            check_partitions(self._topics, name, partitions, internal=internal, taken=self._partitions)
            options = log_options(config, has_key=self._options.key is not None)
            entry = Entry(Topic(name, partitions, config, internal), [self.store.create_log(options) for _ in range(partitions)])
            await self._record(put_record(entry))
            return self._install(entry)

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        async with self._changing:
            entry = self._entry(name)
            wanted = entry.topic.partitions if partitions is None else partitions
            check_partitions(self._topics, name, wanted, internal=entry.topic.internal, taken=self._partitions)
            config = entry.topic.config if config is None else config
            options = log_options(config, has_key=self._options.key is not None)
            added = [self.store.create_log(options) for _ in range(wanted - entry.topic.partitions)]
            entry = Entry(Topic(name, wanted, config, entry.topic.internal), entry.logs + added)
            await self._record(put_record(entry))
            for log in entry.logs:
                self.store.open_log(log, options)
            return self._install(entry)

    async def delete_topic(self, name: str) -> None:
        async with self._changing:
            entry = self._entry(name)
            await self._record(delete_records(entry))
            del self._topics[name], self._catalog.entries[name]
            self._count_partitions(None, entry.topic)
            self._forget_places()
        completions = self._opened_completions
        for log in entry.logs:
            completions.wake(log)
            completions.forget(log)
        self._spawn(self._remove(entry.logs[0], entry.logs))

    async def _remove(self, first: int, logs: list[int]) -> None:
        """Remove the files of deleted logs. The catalog entry is removed only when no journal file could restore the logs."""
        await self._retried(_REMOVE, partial(self._remove_files, logs))
        with contextlib.suppress(BrokerError):  # the next start finds the entry and tries again
            await self._record(removed_record(first))
            self._catalog.deleted.pop(first, None)

    async def _remove_files(self, logs: list[int]) -> None:
        store = self.store
        if not await self._off_loop(partial(store.delete_logs, logs)) and store.failure is None:
            raise Unavailable("files of deleted topics cannot be removed now; retrying")

    async def _retried(self, step: str, work: Callable[[], Awaitable[None]]) -> None:
        """Retry a step until it succeeds, and report failures to the health."""
        while True:
            try:
                await work()
            except Exception as failure:
                await asyncio.sleep(retry_seconds(self.health.failed(step, str(failure) or repr(failure))))
            else:
                self.health.succeeded(step)
                return

    async def _record(self, batch: RecordBatch) -> None:
        future = self._future()
        self._stage([(CATALOG_LOG, batch)], Ack.DURABLE, future, size_bytes=batch.size_bytes, reserve=True)
        await future

    def _count_partitions(self, topic: Topic | None, before: Topic | None) -> None:
        for one, sign in ((topic, 1), (before, -1)):
            if one is not None and not one.internal:
                self._partitions += sign * one.partitions

    def _install(self, entry: Entry) -> Topic:
        self._count_partitions(entry.topic, self._topics.get(entry.topic.name))
        self._catalog.entries[entry.topic.name] = entry
        self._topics[entry.topic.name] = entry.topic
        self._forget_places()
        return entry.topic

    def _forget_places(self) -> None:
        self._places.clear()
        self._logs.clear()
        self._acks.clear()
        self._readable.clear()

    def _entry(self, name: str) -> Entry:
        entry = self._catalog.entries.get(name)
        if entry is None:
            raise UnknownTopic(name)
        return entry

    def _log(self, topic: str, partition: int) -> int:
        logs = self._entry(topic).logs
        if not 0 <= partition < len(logs):
            raise UnknownPartition(topic, partition)
        return logs[partition]

    def _partition(self, topic: str, partition: int) -> Partition:
        found = self.store.partitions.get(self._log(topic, partition))
        if found is None:
            raise UnknownTopic(topic)
        return found

    # Appending.

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        appends: list[tuple[int, AnyBatch | LateBatch]] = []
        size_bytes, strongest, reserve = 0, Ack.NONE, True
        entry: Entry | None = None
        for write in writes:
            batch = write.batch
            if entry is None or entry.topic.name != write.topic:
                entry = self._entry(write.topic)
                topic_ack = entry.topic.config.ack
                if topic_ack is Ack.DURABLE or strongest is Ack.NONE:
                    strongest = topic_ack
                # User records, and data that is not durable, must not use the space reserved for internal tables.
                reserve = reserve and entry.topic.internal and topic_ack is Ack.DURABLE
            if not 0 <= write.partition < len(entry.logs):
                raise UnknownPartition(write.topic, write.partition)
            if isinstance(batch, (RecordBatch, ColumnBatch)):
                write.size_bytes = check_batch(batch)
                size_bytes += write.size_bytes
            else:
                batch = _checked(batch)
            appends.append((entry.logs[write.partition], batch))
        future = self._future()
        self._stage(appends, strongest if ack is None else ack, future, size_bytes=size_bytes, reserve=reserve, urgent=urgent)
        return future

    def append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        assert self._single_writes is not None, "the engine is not open"
        self._single_writes.append(write, done)

    def _place(self, place: tuple[str, int]) -> tuple[int, Ack]:
        """Return log and ack level, and keep them until a topic changes."""
        log, ack = found = self._places[place] = (self._log(*place), self._entry(place[0]).topic.config.ack)
        self._logs[place] = log
        self._acks.add(ack)
        return found

    def append_each(
        self, places: Sequence[tuple[str, int]], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[AppendedEach]:
        size_bytes, known = check_batch(RecordBatch(values, keys)), self._logs
        try:
            logs = list(map(known.__getitem__, places))
        except KeyError:
            for place in set(places) - known.keys():
                self._place(place)
            logs = list(map(known.__getitem__, places))
        acks = self._acks if len(self._acks) == 1 else {self._places[place][1] for place in places}
        assert self._loop is not None
        future: asyncio.Future[AppendedEach] = self._loop.create_future()

        def done(result: AppendedEach | BrokerError) -> None:
            if future.done():
                return
            if isinstance(result, BrokerError):
                future.set_exception(result)
            else:
                future.set_result(result)

        ack = next(level for level in (Ack.DURABLE, Ack.WRITTEN, Ack.NONE) if level in acks)
        self.store.stage_each(logs, values, keys, ack=ack, now=self._clock(), done=done, size_bytes=size_bytes)
        return future

    def _future(self) -> asyncio.Future[list[Appended]]:
        assert self._loop is not None
        return self._loop.create_future()

    def _stage(
        self,
        appends: list[tuple[int, AnyBatch | LateBatch]],
        ack: Ack,
        future: asyncio.Future[list[Appended]],
        *,
        size_bytes: int,
        reserve: bool,
        urgent: bool = False,
    ) -> None:
        def done(result: list[Appended] | BrokerError) -> None:
            if future.done():  # the caller was cancelled; the append is valid
                return
            if isinstance(result, BrokerError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.store.stage(appends, ack=ack, now=self._clock(), done=done, size_bytes=size_bytes, reserve=reserve, urgent=urgent)

    # Reading.

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        log = self._partition(topic, partition)
        assert self._loop is not None
        if _may_read_on_loop(log, offset, bytes_max):
            if not self._may_read(records_max):
                await asyncio.sleep(0)
            try:
                batches = log.read(offset, bytes_max, records_max, cached_only=True)
            except NotCached:
                pass
            else:
                self._count_read(batches)
                return [*batches]
        try:
            return [*await self._loop.run_in_executor(self._readers, log.read, offset, bytes_max, records_max)]
        except CorruptData:
            self._partition(topic, partition)  # the topic may have been deleted meanwhile, which is not damage
            raise

    def read_now(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> Sequence[Batch] | None:
        place = (topic, partition)
        log = self._readable.get(place)
        if log is None:
            log = self._find_readable(place)
            if log is None:
                return None
        if not self._may_read(records_max) or not _may_read_on_loop(log, offset, bytes_max):
            return None
        try:
            batches = log.read(offset, bytes_max, records_max, cached_only=True)
        except (NotCached, BrokerError):
            return None
        if not batches:
            return None
        self._count_read(batches)
        return batches

    def _find_readable(self, place: tuple[str, int]) -> Partition | None:
        entry = self._catalog.entries.get(place[0])
        if entry is None or self._store is None or not 0 <= place[1] < len(entry.logs):
            return None
        log = self._store.partitions.get(entry.logs[place[1]])
        if log is not None:
            self._readable[place] = log
        return log

    def _may_read(self, records_max: int) -> bool:
        """Return whether the reads of this turn leave room for one more."""
        return self._turn_bytes < (_TURN_BYTES_MAX if records_max > _SMALL_READ_RECORDS_MAX else 2 * _TURN_BYTES_MAX)

    def _count_read(self, batches: list[StoredBatch]) -> None:
        before = self._turn_bytes
        for batch in batches:
            self._turn_bytes += batch.size_estimate_bytes + _BATCH_COST_BYTES
        if before < _TURN_BYTES_MAX // 16 <= self._turn_bytes:  # many small reads need no call of the loop each
            assert self._loop is not None
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_bytes = 0

    @property
    def local_file(self) -> str:
        return self._files.absolute(IDENTITY)

    async def locate(self, topic: str, partition: int, offset: int, stop: int) -> Located:
        assert self._loop is not None
        return await self._loop.run_in_executor(self._readers, self._partition(topic, partition).locate, offset, stop)

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self._partition(topic, partition).bounds

    def size_bytes(self, topic: str, partition: int) -> int:
        return self._partition(topic, partition).size_bytes

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        assert self._loop is not None
        return await self._loop.run_in_executor(self._readers, self._partition(topic, partition).offset_for_time, timestamp)

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        return self._opened_completions.watch(self._log(topic, partition), wake)

    # Upkeep.

    async def maintain(self) -> None:
        await self._off_loop(partial(self.store.maintain, self._clock()))

    async def _maintain_forever(self) -> None:
        """Run maintenance periodically. Failures are reported to the health and retried with growing pauses."""
        failures = 0
        while True:
            await asyncio.sleep(self._maintain_interval_seconds * min(failures + 1, _PAUSE_INTERVALS_MAX))
            try:
                await self.maintain()
            except Exception as failure:
                failures = self.health.failed(_MAINTAIN, repr(failure))
            else:
                failures = 0
                self.health.succeeded(_MAINTAIN)
