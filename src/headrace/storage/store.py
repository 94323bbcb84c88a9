"""All logs of one data directory, with the writer thread and background maintenance.

    stage() ─ staged ─▶ flush(): place · build batches · one journal frame · fdatasync ─▶ tails, acknowledgements   (writer)
                                                                tails ─▶ segments ─▶ checkpoint ─▶ old journals     (maintenance)

Large appends go to their segment first, and the journal frame only refers to them (`storage/large.py`).

The writer takes everything that was staged during the last flush, so that batches grow with the load and an idle store replies at once.
With `threads=False` no thread is started and the caller takes the steps, as the crash tests do.

If a journal write or a sync fails, the store accepts no more writes. Reads continue, and opening it again starts from the state on disk.
A full disk and lack of descriptors, threads or memory do not count as such failures: the append leaves no trace and may be retried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from headrace.errors import BrokerError, DiskFull, StorageFailed, Unavailable
from headrace.histogram import BYTES, Histogram
from headrace.limits import BATCH_BYTES_TARGET, BATCH_JOINED_BYTES_MAX, KIB, LARGE_APPEND_BYTES, MIB, OPENED_BATCHES_BYTES_MAX
from headrace.records import Ack, AnyBatch, Appended, Bounds, ColumnBatch, RecordBatch
from headrace.storage.batch import Built, StoredBatch
from headrace.storage.batching import chunked, fits_one, plain_values
from headrace.storage.crypt import Keyring
from headrace.storage.encoding import build, build_plain
from headrace.storage.files import DISK_FULL_ERRNOS, Files, is_exhausted
from headrace.storage.health import Health
from headrace.storage.journal import Journal, SyncFailed
from headrace.storage.large import LargeAppends, LargeThread, built_large
from headrace.storage.lone import write_lone
from headrace.storage.maintenance import Maintenance
from headrace.storage.opened import OpenedBatches
from headrace.storage.partition import LogOptions, Partition, StoreContext
from headrace.storage.pending import Pending, build_each, count_records, push_each
from headrace.storage.recovery import RecoveryReport, recover
from headrace.storage.staged import (
    AnyStaged,
    Completion,
    Done,
    DoneEach,
    LateBatch,
    Placed,
    Staged,
    StagedEach,
    Waiting,
    Written,
    are_spread,
)
from headrace.storage.wakeup import Wakeup

STAGED_BYTES_MAX: Final = 512 * MIB
_NONE, _DURABLE = Ack.NONE, Ack.DURABLE
_SINGLE_BYTES_MAX: Final = 64 * KIB
"""Size of a value that is built as a single record. It is no large append by itself."""

Deliver: TypeAlias = Callable[[list[Completion], list[int]], None]
"""Called with the completions of one flush and the logs whose end moved."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of a data directory."""

    journal_bytes: int = 64 * MIB
    checkpoint_interval_ms: int = 5_000
    headroom_bytes: int = 256 * MIB
    """Reserved free space. When less is free, only internal tables and deletes may write."""
    tail_bytes_max: int = 64 * MIB
    """Total size of tails above which the writer waits for maintenance."""
    large_bytes: int = LARGE_APPEND_BYTES
    """Size from which on the records that a flush adds to one log go to the segment first."""
    opened_bytes_max: int = OPENED_BATCHES_BYTES_MAX
    key: bytes | None = field(default=None, repr=False)
    ticks: Callable[[], float] = lambda: 0.0
    """Seconds of a monotonic clock, for the durations in `StoreCounters`."""


@dataclass(slots=True)
class StoreCounters:
    """Counters for metrics and benchmarks."""

    records: int = 0
    journal_bytes: int = 0
    checkpoints: int = 0
    append_duration: Histogram = field(default_factory=Histogram)
    """Duration of each flush: one observation for all appends that share it."""
    flush_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))
    sync_duration: Histogram = field(default_factory=Histogram)


def _deliver_here(completions: list[Completion], advanced: list[int]) -> None:
    for done, result in completions:
        done(result)


def _journal_again(journal: Journal, report: RecoveryReport) -> None:
    """Write recovered batches that only a segment has to the journal: maintenance will write their records to the same place of the
    segment, joined differently, and a power cut may then leave neither."""
    if not report.unjournaled:
        return
    try:
        journal.append(report.unjournaled)
        journal.sync()
    except SyncFailed as unsynced:
        raise StorageFailed(f"syncing the journal failed: {unsynced}") from unsynced
    except OSError as failure:
        if failure.errno not in DISK_FULL_ERRNOS:  # a full disk must not keep the broker from starting
            raise
    report.unjournaled.clear()


class Store:
    """Store of one data directory; created by `Store.open`."""

    def __init__(
        self,
        context: StoreContext,
        options: StoreOptions,
        journal: Journal,
        partitions: dict[int, Partition],
        report: RecoveryReport,
        health: Health | None = None,
    ) -> None:
        self.files = context.files
        self.options = options
        self.partitions = partitions
        self.report = report
        self.counters = StoreCounters()
        self.failure: StorageFailed | None = None
        """Reason why writes are rejected."""
        self.health = health or Health()
        self._full = False
        self.keyring = context.keyring
        self._context = context
        self.journal = journal
        self.deliver: Deliver = _deliver_here
        self._next_log = report.next_log
        self._log_options: dict[LogOptions, LogOptions] = {}
        """Logs with equal options share one object: a flush to thousands of logs then finds it in the cache of the processor."""
        self.deleted = dict(report.deleted)
        """Deleted logs, each with the last journal file that may hold batches of it."""
        self._waiting = Waiting(options.large_bytes)
        self._single_bytes_max = min(_SINGLE_BYTES_MAX, self._waiting.bulk_bytes_min - 1)
        self._wakeup: Wakeup | None = None
        """Of the writer; None without threads."""
        self._stopping = False
        self._writer: threading.Thread | None = None
        self._large: LargeThread[Written] | None = None
        """None without threads: the caller of `flush` then writes large appends, too."""
        self._large_placed: tuple[Placed, LargeAppends] | None = None
        """The large append whose segments are being written."""
        self.maintenance = Maintenance(self)

    @classmethod
    def open(cls, files: Files, options: StoreOptions, *, threads: bool = True, health: Health | None = None) -> Store:
        """Lock the directory, recover, start a new journal. Background failures are reported to `health`.

        Raises `DirectoryLocked`, `WrongKey`, `CorruptData`, `OSError`.
        """
        files.lock()
        try:
            keyring = None if options.key is None else Keyring(options.key)
            report = RecoveryReport()
            context = StoreContext(files, keyring, report.damaged, OpenedBatches(options.opened_bytes_max))
            partitions, position = recover(context, report)
            journal = Journal(files, options.journal_bytes, position)
            journal.start()
            if keyring is not None:
                keyring.start_epoch(position.journal)
            _journal_again(journal, report)
        except BaseException:
            files.close()
            raise
        store = cls(context, options, journal, partitions, report, health)
        with contextlib.suppress(OSError):  # maintenance retries and reports it
            store.full = files.free_bytes() < options.headroom_bytes
        if threads:
            store.start()
        return store

    def start(self) -> None:
        """Start the threads. Logs that recovery did not find must be opened before, because a checkpoint lists all existing logs."""
        self._wakeup = Wakeup()
        self._wake()  # appends may be staged already
        self._large = LargeThread(self._large_ready)
        writer = threading.Thread(target=self._write_forever, name="headrace-writer", daemon=True)
        writer.start()
        self._writer = writer
        self.maintenance.start()

    @property
    def full(self) -> bool:
        """Whether the disk or its headroom is full."""
        return self._full

    @full.setter
    def full(self, full: bool) -> None:
        if full and not self._full:
            self.health.failed("disk space", f"less than {self.options.headroom_bytes} bytes are free, or a write failed for lack of space")
        elif not full:
            self.health.succeeded("disk space")
        self._full = full

    # Logs.

    @property
    def next_log(self) -> int:
        return self._next_log

    def create_log(self, options: LogOptions) -> int:
        """Create an empty log. Nothing is on disk before its first record."""
        log = self._next_log
        self.open_log(log, options)
        return log

    def open_log(self, log: int, options: LogOptions) -> None:
        """Set the options of a log, and create it if recovery did not find it."""
        options = self._log_options.setdefault(options, options)
        partition = self.partitions.get(log)
        if partition is None:
            partition = self.partitions[log] = Partition(self._context, log, options)
        partition.options = options
        self._next_log = max(self._next_log, log + 1)

    def delete_logs(self, logs: Sequence[int]) -> bool:
        """Delete logs and their files. Takes a checkpoint, so that no crash can restore them. Returns False if that did not succeed yet:
        maintenance retries, and another call returns the current state."""
        gone = [partition for log in logs if (partition := self.partitions.pop(log, None)) is not None]
        for partition in gone:
            self.deleted[partition.id] = self.journal.current + 1  # a current flush may open one more file
            self._context.opened.forget(partition.id)
        if gone:
            self.maintenance.remove(gone)
        return self.maintenance.is_removed(logs)

    def bounds(self, log: int) -> Bounds:
        return self.partitions[log].bounds

    def read(self, log: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31, cached_only: bool = False) -> list[StoredBatch]:
        return self.partitions[log].read(offset, bytes_max, records_max, cached_only=cached_only)

    # Appending.

    def stage(
        self,
        appends: Sequence[tuple[int, AnyBatch | LateBatch]],
        *,
        ack: Ack,
        now: int,
        done: Done,
        size_bytes: int,
        reserve: bool = False,
        urgent: bool = False,
    ) -> None:
        """Queue one atomic append. `done` gets its placements or an error. `reserve` allows it to use the headroom; `urgent` writes it
        before the others."""
        self._queue(Staged(appends, ack, now, done, size_bytes), reserve, urgent)

    def stage_each(
        self,
        logs: Sequence[int],
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        *,
        ack: Ack,
        now: int,
        done: DoneEach,
        size_bytes: int,
    ) -> None:
        """Queue independent records. A log that is deleted before they are written fails only its own."""
        self._queue(StagedEach(logs, values, keys, ack, now, done, size_bytes), False, False)

    def _queue(self, item: AnyStaged, reserve: bool, urgent: bool) -> None:
        error = self._rejection(item.size_bytes, reserve)
        if error is not None:
            item.done(error)
            return
        self._waiting.add(item, urgent=urgent)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.wake()

    def _large_ready(self) -> None:
        self._wake()
        self.maintenance.large_ready()

    @property
    def is_large_ready(self) -> bool:
        return self._large is not None and self._large.is_ready

    def _rejection(self, size_bytes: int, reserve: bool) -> BrokerError | None:
        if self.failure is not None:
            return self.failure
        if self._stopping:
            return Unavailable("the store is closing")
        if self.full and not reserve:
            return DiskFull(f"less than {self.options.headroom_bytes} bytes are free on the disk")
        if self.maintenance.is_behind and not reserve:
            return Unavailable(
                f"more than {self.options.tail_bytes_max} bytes wait in memory, and log maintenance is failing: try again later"
            )
        if self._waiting and self._waiting.size_bytes + size_bytes > STAGED_BYTES_MAX:
            return Unavailable(f"more than {STAGED_BYTES_MAX} bytes wait to be written")
        return None

    def flush(self) -> bool:
        """Write what is staged. Returns whether there was anything to write."""
        thread = self._large
        if thread is not None and thread.is_ready:
            self._commit_large(thread)
            return True
        is_begun = thread is not None and self._begin_large(thread)
        staged = self._waiting.take()
        if not staged:
            return is_begun
        self._flushing(staged, lambda: self._write_placed(staged))
        return True

    def _flushing(self, staged: list[AnyStaged], step: Callable[[], None]) -> None:
        """Take a step of the flush of these appends."""
        began = self.options.ticks()
        try:
            step()
            self.counters.append_duration.observe(self.options.ticks() - began)
        except BaseException as failure:
            # A defect must not leave a caller waiting forever. A second result for the same append is ignored.
            error = self.fence(f"the writer failed: {failure!r}")
            self.deliver([(item.done, error) for item in staged], [])
            raise

    def _write_placed(self, staged: list[AnyStaged]) -> None:
        if write_lone(self, staged):
            return
        placed = self._placed(staged, self.options.large_bytes)
        if placed is not None:
            self._commit(placed)

    def _begin_large(self, thread: LargeThread[Written]) -> bool:
        """Let the other thread write the segments of a large append, if enough is staged."""
        staged = self._waiting.take_large()
        if not staged:
            return False

        def begin() -> None:
            placed = self._placed(staged, self._waiting.bulk_bytes_min)
            if placed is not None:
                large = LargeAppends(self.files, self.maintenance)
                self._large_placed = placed, large
                thread.begin(large, partial(self._prepare, placed, large))

        try:
            self._flushing(staged, begin)
        finally:
            if self._large_placed is None:
                self._waiting.release()
        return True

    def _commit_large(self, thread: LargeThread[Written]) -> None:
        """Commit the large append whose segments are written."""
        assert self._large_placed is not None
        placed, large = self._large_placed
        try:
            self._flushing(placed.items, lambda: self._commit_prepared(placed, large, thread.result))
        finally:
            self._large_placed = None
            thread.end()
            self._waiting.release()

    def _placed(self, staged: list[AnyStaged], large_bytes: int) -> Placed | None:
        """Assign offsets, and decide which logs get a large append: from `large_bytes` on. Returns None if nothing is to be written."""
        if self.failure is not None:
            self.deliver([(item.done, self.failure) for item in staged], [])
            return None
        # One time for the whole flush: records without a timestamp then use the batch's timestamp and need no column.
        now, size = staged[0].now, staged[0].size_bytes
        for item in staged[1:]:
            now, size = max(now, item.now), size + item.size_bytes
        placed = Placed(staged, now, is_small=size <= BATCH_BYTES_TARGET, is_spread=are_spread(staged, self._single_bytes_max))
        pending, ordered = placed.pending, list[Completion]()
        for item in staged:
            result = placed.place_each(item, self.partitions) if isinstance(item, StagedEach) else self._place(item, placed, now)
            ack = item.ack
            if ack is _DURABLE:
                placed.is_durable = True
            (ordered if ack is _NONE else placed.waiting).append((item.done, result))
        if ordered:
            self.deliver(ordered, [])
        if not pending and not len(placed.singles):
            if placed.waiting:
                self.deliver(placed.waiting, [])
            return None
        if size >= large_bytes and placed.is_durable:
            placed.choose_large(large_bytes)
        return placed

    def _place(self, item: Staged, flush: Placed, now: int) -> list[Appended] | BrokerError:
        """Assign offsets to each batch of one append, to all or to none."""
        if len(item.appends) == 1 and isinstance(batch := item.appends[0][1], RecordBatch):
            return self._place_one(item.appends[0][0], batch, flush.pending, now)
        placed: list[Appended] = []
        taken: list[tuple[int, Partition, AnyBatch]] = []
        ends: dict[int, int] = {}
        for log, record_batch in item.appends:
            partition = self.partitions.get(log)
            if partition is None:
                return Unavailable(f"log {log} was deleted before the append was written")
            try:
                record_batch = record_batch if isinstance(record_batch, (RecordBatch, ColumnBatch)) else record_batch(placed)
            except BrokerError as error:
                return error
            base, count = ends.get(log, partition.next), len(record_batch.values)
            ends[log] = base + count
            placed.append(Appended(base, count, now if record_batch.timestamps is None else record_batch.timestamps[0]))
            taken.append((log, partition, record_batch))
        for log, partition, record_batch in taken:
            flush.add(log, partition, record_batch, self._single_bytes_max)
        return placed

    def _place_one(self, log: int, batch: RecordBatch, pending: dict[int, Pending], now: int) -> list[Appended] | BrokerError:
        """Assign offsets to one batch. Most appends have only one, and most flushes only one append."""
        partition = self.partitions.get(log)
        if partition is None:
            return Unavailable(f"log {log} was deleted before the append was written")
        base, count = partition.next, len(batch.values)
        if (ahead := pending.get(log)) is None:
            pending[log] = Pending(partition, base, [batch])
        else:
            ahead.add(batch)
        partition.next = base + count
        return [Appended(base, count, now if batch.timestamps is None else batch.timestamps[0])]

    def _commit(self, placed: Placed) -> None:
        """Write the frame, sync it if an append requires it, and deliver the results."""
        with LargeAppends(self.files, self.maintenance) as large:
            self._commit_prepared(placed, large, lambda: self._prepare(placed, large))

    def _commit_prepared(self, placed: Placed, large: LargeAppends, prepared: Callable[[], Written]) -> None:
        pending, singles, waiting = placed.pending, placed.singles, placed.waiting
        error: BrokerError
        try:
            written = self._write(placed, large, prepared)
            if placed.is_durable:
                self._sync()
        except (SyncFailed, BrokerError) as failure:
            error = failure if isinstance(failure, BrokerError) else self.fence(f"syncing the log failed: {failure}")
            self.deliver([(done, error) for done, _ in waiting], [])
            return
        size = singles.push(placed.now, self._context.locks) + push_each(written.partitions, written.batches)
        for partition, batches in written.others:
            size += partition.push(batches)
            written.partitions.append(partition)
        large_tails = [partition for partition in written.partitions if partition.tail_bytes >= BATCH_JOINED_BYTES_MAX]
        self.maintenance.touch(written.partitions + singles.touched, large_tails + singles.large, size)
        counters = self.counters
        counters.records += count_records(pending.values()) + len(singles)
        counters.journal_bytes += size
        counters.flush_bytes.observe(size)
        if large.references:
            large.reveal()
        self.deliver(waiting, [*pending, *singles.logs])

    def _sync(self) -> None:
        began = self.options.ticks()
        self.journal.sync()
        self.counters.sync_duration.observe(self.options.ticks() - began)

    def _prepare(self, placed: Placed, large: LargeAppends) -> Written:
        """Build all batches, write large appends to their segments and sync these. Returns the batches for the frame.

        Raises `OSError`, `MemoryError` and `SyncFailed`.
        """
        now, small = placed.now, placed.is_small
        written = Written((len(placed.singles), placed.singles.encode(now)))
        for ahead in build_each(placed.pending.values(), now, small, written.partitions, written.batches):
            if ahead.is_large:
                large.hold(ahead)
                large.write(ahead.partition, built_large(ahead, now, small=small))
            else:
                written.others.append((ahead.partition, self._build(ahead, now, small)))
        if large.references:
            large.sync()
        return written

    def _write(self, placed: Placed, large: LargeAppends, prepared: Callable[[], Written]) -> Written:
        """Write the frame of what `prepared` returns, and return that.

        Raises `DiskFull` and `Unavailable`, after which nothing is written, and `StorageFailed` and `SyncFailed`.
        """
        try:
            written = prepared()
            batches = written.batches + [one for _, batches in written.others for one in batches]
            self.journal.append(batches, large.references, written.singles)
            return written
        except (OSError, MemoryError) as failure:
            for ahead in placed.pending.values():
                ahead.partition.next = ahead.base_offset
            placed.singles.retract()
            if is_exhausted(failure) or (isinstance(failure, OSError) and failure.errno in DISK_FULL_ERRNOS):
                large.retract()
            raise self.unwritten(failure) from failure

    def unwritten(self, failure: OSError | MemoryError) -> BrokerError:
        """Return the error for appends whose frame could not be written. Fences the log, unless nothing was written."""
        if isinstance(failure, OSError) and failure.errno in DISK_FULL_ERRNOS:
            return DiskFull(f"no room for the journal or a segment: {failure.strerror}; nothing was written, try again when there is space")
        if is_exhausted(failure):
            why = str(failure) or "out of memory"
            return Unavailable(f"the append cannot be written now: {why}; nothing was written, try again")
        return self.fence(f"writing the log failed: {failure}")

    def _build(self, pending: Pending, now: int, small: bool) -> list[Built]:
        """Build batches of about `BATCH_BYTES_TARGET` for one log; a single one if the whole flush is `small` and has no column batches."""
        batches: list[Built] = []
        partition, offset = pending.partition, pending.base_offset
        compress, keyring = partition.options.compress, partition.keyring
        values: Sequence[bytes] | None = pending.values if pending.value is None else [pending.value]
        if values is not None and (compress or keyring is not None or not fits_one(values, small=small)):
            pending.batches, values = [RecordBatch(values)], None
        if values is None and len(pending.batches) == 1 and not (compress or keyring):
            values = plain_values(pending.batches[0], small=small)
        if values is not None:
            assert offset + len(values) == partition.next, "every record has its assigned offset"
            return [build_plain(partition.id, offset, values, now)]
        for part in chunked(pending.batches, now, small=small):
            batches.append(build(partition.id, offset, part, now=now, compress=compress, keyring=keyring))
            offset += len(part.values)
        assert offset == partition.next, "every record has its assigned offset"
        return batches

    def fence(self, why: str) -> StorageFailed:
        """Reject all further writes, because the content of the disk is uncertain. Returns the error for the current writes."""
        if self.failure is None:
            self.failure = StorageFailed(f"{why}; the broker accepts no writes until it is restarted. This write was not written")
            self.health.ended(why)
        return StorageFailed(f"{why}; the outcome of this write is unknown: its records may be present after the broker is restarted")

    def _write_forever(self) -> None:
        wakeup = self._wakeup
        assert wakeup is not None
        while True:
            wakeup.wait()
            try:
                wakeup.forget()
                while self.flush():
                    self.maintenance.after_flush()
                    wakeup.forget()
            except Exception as failure:
                self.fence(f"the writer failed: {failure!r}")  # as a failed flush has done already
                self._wake()  # the next round rejects the other appends
            if self._stopping and not self._waiting and self._large_placed is None:
                return

    # Maintenance steps, for callers without threads.

    def checkpoint(self) -> None:
        self.maintenance.checkpoint()

    def maintain(self, now: int) -> None:
        """Apply retention and compaction once."""
        self.maintenance.maintain(now)

    def close(self) -> None:
        """Flush, take a checkpoint, unlock the directory. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._writer is not None:
            self._wake()
            self._writer.join()
        if self._large is not None:
            self._large.stop()
            self._large = None
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None
        try:
            while self.flush():
                pass
            self.maintenance.stop()
        finally:
            self.journal.close()
            self.files.close()

    @property
    def staged_bytes(self) -> int:
        """Bytes of appends that wait for the writer."""
        return self._waiting.size_bytes

    def size_bytes(self) -> int:
        return sum(partition.size_bytes for partition in list(self.partitions.values()))
