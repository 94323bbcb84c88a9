"""The store: all logs of one data directory, the writer that makes appends safe, the keeper that tidies up behind it.

    stage() ─ staged ─▶ flush(): place · build batches · one journal frame · fdatasync ─▶ tails, acknowledgements   (writer)
                                                                tails ─▶ segments ─▶ checkpoint ─▶ old journals     (keeper)

The writer drains whatever was staged while the last flush was under way, so batches grow with the load and an idle store answers
at once. With `threads=False` nothing runs by itself and the caller takes the steps: that is how the crash tests see every state.

If a journal write or a sync fails, the store takes no more writes; reads go on, and opening it again starts from what the disk holds.
A full disk and want of descriptors, threads or memory are no such failures: the append that meets them leaves no trace and may be repeated.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from headrace.errors import BrokerError, DiskFull, StorageFailed, Unavailable
from headrace.limits import BATCH_BYTES_TARGET, MIB
from headrace.records import Ack, AnyBatch, Appended, Bounds, ColumnBatch, RecordBatch
from headrace.storage.batch import Batch, Built, build
from headrace.storage.batching import pieces
from headrace.storage.crypt import Keyring
from headrace.storage.files import DISK_FULL_ERRNOS, Files, is_exhausted
from headrace.storage.health import Health
from headrace.storage.journal import Journal, SyncFailed
from headrace.storage.keeper import Keeper
from headrace.storage.partition import Commons, LogOptions, Partition, Pending
from headrace.storage.recovery import RecoveryReport, recover

FLUSH_BYTES_MAX: Final = 8 * MIB
"""A flush takes no more than this at once (but always one append whole): whoever comes next waits no longer than for that."""
STAGED_BYTES_MAX: Final = 512 * MIB

LateRun: TypeAlias = Callable[[Sequence[Appended]], AnyBatch]
Done: TypeAlias = Callable[["list[Appended] | BrokerError"], None]
Completion: TypeAlias = tuple[Done, "list[Appended] | BrokerError"]
Deliver: TypeAlias = Callable[[list[Completion], list[int]], None]
"""Takes the completions of one flush and the logs whose end moved."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a data directory is kept."""

    journal_bytes: int = 64 * MIB
    checkpoint_interval_ms: int = 5_000
    headroom_bytes: int = 256 * MIB
    """Free space kept back: below it, only writes that may use the reserve (tables, deletes) are taken."""
    tail_bytes_max: int = 64 * MIB
    """What may wait in memory for its segment before the writer waits for the keeper."""
    key: bytes | None = field(default=None, repr=False)


@dataclass(slots=True)
class Staged:
    """One atomic append on its way to the journal."""

    appends: Sequence[tuple[int, AnyBatch | LateRun]]
    ack: Ack
    now: int
    done: Done
    size_bytes: int


@dataclass(slots=True)
class StoreCounters:
    """Plain numbers for metrics and benchmarks."""

    flushes: int = 0
    records: int = 0
    journal_bytes: int = 0
    checkpoints: int = 0


def _deliver_here(completions: list[Completion], advanced: list[int]) -> None:
    for done, result in completions:
        done(result)


class Store:
    """Open it with `Store.open`."""

    def __init__(
        self,
        commons: Commons,
        options: StoreOptions,
        journal: Journal,
        partitions: dict[int, Partition],
        report: RecoveryReport,
        health: Health | None = None,
    ) -> None:
        self.files = commons.files
        self.options = options
        self.partitions = partitions
        self.report = report
        self.counters = StoreCounters()
        self.failure: StorageFailed | None = None
        """Why no writes are taken any more."""
        self.health = health or Health()
        self._full = False
        self.keyring = commons.keyring
        self._commons = commons
        self.journal = journal
        self.deliver: Deliver = _deliver_here
        self._next_log = report.next_log
        self.deleted = dict(report.deleted)
        """Deleted logs, and the last journal file that may hold batches of each."""
        self._staged: deque[Staged] = deque()
        self._urgent: deque[Staged] = deque()
        """What goes before the rest."""
        self._staged_bytes = 0
        self._wake = threading.Event()
        self._stopping = False
        self._writer: threading.Thread | None = None
        self.keeper = Keeper(self)

    @classmethod
    def open(cls, files: Files, options: StoreOptions, *, threads: bool = True, health: Health | None = None) -> Store:
        """Lock the directory, recover, start a new journal. Background failures are reported to `health`.

        Raises `DirectoryLocked`, `WrongKey`, `CorruptData`, `OSError`.
        """
        files.lock()
        try:
            keyring = None if options.key is None else Keyring(options.key)
            report = RecoveryReport()
            commons = Commons(files, keyring, report.damaged)
            partitions, position = recover(commons, report)
            journal = Journal(files, options.journal_bytes, position)
            journal.start()
            if keyring is not None:
                keyring.start_epoch(position.journal)
        except BaseException:
            files.close()
            raise
        store = cls(commons, options, journal, partitions, report, health)
        with contextlib.suppress(OSError):  # the keeper asks again, and reports it
            store.full = files.free_bytes() < options.headroom_bytes
        if threads:
            store.start()
        return store

    def start(self) -> None:
        """Begin to write and to keep by itself. Whoever knows of logs that recovery did not find opens them first: a checkpoint
        names all the logs there are."""
        writer = threading.Thread(target=self._write_forever, name="headrace-writer", daemon=True)
        writer.start()
        self._writer = writer
        self.keeper.start()

    @property
    def full(self) -> bool:
        """Whether the disk (or its headroom) is used up."""
        return self._full

    @full.setter
    def full(self, full: bool) -> None:
        if full and not self._full:
            self.health.failed("disk space", f"less than {self.options.headroom_bytes} bytes are free, or a write found no room")
        elif not full:
            self.health.succeeded("disk space")
        self._full = full

    # Logs.

    @property
    def next_log(self) -> int:
        return self._next_log

    def create_log(self, options: LogOptions) -> int:
        """A new, empty log. Nothing of it is on disk before its first record."""
        log = self._next_log
        self.open_log(log, options)
        return log

    def open_log(self, log: int, options: LogOptions) -> None:
        """Set the options of a log, making it if recovery found no trace of it."""
        partition = self.partitions.get(log)
        if partition is None:
            partition = self.partitions[log] = Partition(self._commons, log, options)
        partition.options = options
        self._next_log = max(self._next_log, log + 1)

    def delete_log(self, log: int) -> None:
        self.delete_logs([log])

    def delete_logs(self, logs: Sequence[int]) -> bool:
        """Forget these logs and give their space back. Takes a checkpoint, so that no crash can bring them back. False if that did not
        succeed: the keeper tries again, and another call tells whether it has succeeded since."""
        gone = [partition for log in logs if (partition := self.partitions.pop(log, None)) is not None]
        for partition in gone:
            self.deleted[partition.id] = self.journal.current + 1  # a flush that is under way may open one more file
            self._commons.partial_reads.forget(partition.id)
        if gone:
            self.keeper.remove(gone)
        return self.keeper.is_removed(logs)

    def bounds(self, log: int) -> Bounds:
        return self.partitions[log].bounds

    def read(self, log: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31, cached_only: bool = False) -> list[Batch]:
        return self.partitions[log].read(offset, bytes_max, records_max, cached_only=cached_only)

    # Appending.

    def stage(
        self,
        appends: Sequence[tuple[int, AnyBatch | LateRun]],
        *,
        ack: Ack,
        now: int,
        done: Done,
        size_bytes: int,
        reserve: bool = False,
        urgent: bool = False,
    ) -> None:
        """Queue one atomic append; `done` gets its placements or the reason why not. `reserve` lets it use the headroom, `urgent` go
        before what waits."""
        refusal = self._refusal(size_bytes, reserve)
        if refusal is not None:
            done(refusal)
            return
        self._staged_bytes += size_bytes
        (self._urgent if urgent else self._staged).append(Staged(appends, ack, now, done, size_bytes))
        if not self._wake.is_set():
            self._wake.set()

    def _refusal(self, size_bytes: int, reserve: bool) -> BrokerError | None:
        if self.failure is not None:
            return self.failure
        if self._stopping:
            return Unavailable("the store is closing")
        if self.full and not reserve:
            return DiskFull(f"less than {self.options.headroom_bytes} bytes are free on the disk")
        if self.keeper.is_behind and not reserve:
            return Unavailable(
                f"more than {self.options.tail_bytes_max} bytes wait in memory, and log maintenance is failing: try again later"
            )
        if self._staged_bytes + size_bytes > STAGED_BYTES_MAX and self._staged:
            return Unavailable(f"more than {STAGED_BYTES_MAX} bytes wait to be written")
        return None

    def flush(self) -> bool:
        """One step of the writer. Returns whether there was anything to do."""
        staged = self._drain()
        if not staged:
            return False
        try:
            self._flush(staged)
        except BaseException as failure:
            # A bug of ours must not leave anybody waiting for ever; a second answer to the same append is ignored.
            refusal = self.fence(f"the writer failed: {failure!r}")
            self.deliver([(item.done, refusal) for item in staged], [])
            raise
        return True

    def _flush(self, staged: list[Staged]) -> None:
        if self.failure is not None:
            self.deliver([(item.done, self.failure) for item in staged], [])
            return
        # One clock for the whole flush: every record that has no time of its own gets the time of its batch, which costs no column.
        now = max(item.now for item in staged)
        small = sum(item.size_bytes for item in staged) <= BATCH_BYTES_TARGET
        pending: dict[int, Pending] = {}
        completions: dict[Ack, list[Completion]] = {ack: [] for ack in Ack}
        for item in staged:
            completions[item.ack].append((item.done, self._place(item, pending, now)))
        if completions[Ack.NONE]:
            self.deliver(completions[Ack.NONE], [])
        if pending:
            self._commit(pending, completions, now, small)
        elif waiting := completions[Ack.WRITTEN] + completions[Ack.DURABLE]:
            self.deliver(waiting, [])

    def _drain(self) -> list[Staged]:
        """What is urgent does not even share its flush: it would have to wait for the rest of it."""
        drained: list[Staged] = []
        size, waiting = 0, self._urgent or self._staged
        while waiting and size < FLUSH_BYTES_MAX:
            item = waiting.popleft()
            size += item.size_bytes
            drained.append(item)
        self._staged_bytes -= size
        return drained

    def _place(self, item: Staged, pending: dict[int, Pending], now: int) -> list[Appended] | BrokerError:
        """Give each run of one append its offsets; all of it or nothing."""
        placed: list[Appended] = []
        taken: list[tuple[int, Partition, AnyBatch]] = []
        ends: dict[int, int] = {}
        for log, record_batch in item.appends:
            partition = self.partitions.get(log)
            if partition is None:
                return Unavailable(f"log {log} was deleted while the append was under way")
            try:
                record_batch = record_batch if isinstance(record_batch, (RecordBatch, ColumnBatch)) else record_batch(placed)
            except BrokerError as refusal:
                return refusal
            base = ends.get(log, partition.next)
            ends[log] = base + len(record_batch)
            placed.append(Appended(base, len(record_batch), now if record_batch.timestamps is None else record_batch.timestamps[0]))
            taken.append((log, partition, record_batch))
        for log, partition, record_batch in taken:
            ahead = pending.get(log)
            if ahead is None:
                ahead = pending[log] = Pending(partition, partition.next)
            ahead.batches.append(record_batch)
            partition.next += len(record_batch)
        return placed

    def _commit(self, pending: dict[int, Pending], completions: dict[Ack, list[Completion]], now: int, small: bool) -> None:
        """Write the frame, sync it if anybody was promised so, and tell everybody."""
        waiting = completions[Ack.WRITTEN] + completions[Ack.DURABLE]
        refusal: BrokerError
        try:
            built = self._write(pending, now, small)
            if completions[Ack.DURABLE]:
                self.journal.sync()
        except (SyncFailed, BrokerError) as failure:
            refusal = failure if isinstance(failure, BrokerError) else self.fence(f"syncing the journal failed: {failure}")
            self.deliver([(done, refusal) for done, _ in waiting], [])
            return
        size = sum(partition.push(batches) for partition, batches in built)
        self.keeper.touch([partition for partition, _ in built], size)
        self.counters.flushes += 1
        self.counters.records += sum(header.count for _, batches in built for header, _ in batches)
        self.counters.journal_bytes += size
        self.deliver(waiting, list(pending))

    def _write(self, pending: dict[int, Pending], now: int, small: bool) -> list[tuple[Partition, list[Built]]]:
        """Write the frame. Raises `DiskFull` and `Unavailable`, after which there is no trace of it, and `StorageFailed`."""
        try:
            built = [(ahead.partition, self._build(ahead, now, small)) for ahead in pending.values()]
            self.journal.append([encoded for _, batches in built for encoded in batches])
            return built
        except (OSError, MemoryError) as failure:
            for ahead in pending.values():
                ahead.partition.next = ahead.base_offset
            if isinstance(failure, OSError) and failure.errno in DISK_FULL_ERRNOS:
                raise DiskFull(
                    f"no room for the journal: {failure.strerror}; nothing was written, try again when there is space"
                ) from failure
            if is_exhausted(failure):
                why = str(failure) or "out of memory"
                raise Unavailable(f"the journal cannot be written now: {why}; nothing was written, try again") from failure
            raise self.fence(f"writing the journal failed: {failure}") from failure

    def _build(self, pending: Pending, now: int, small: bool) -> list[Built]:
        """Batches of about `BATCH_BYTES_TARGET` from the runs of one log; one if the whole flush is `small` and has no columns."""
        batches: list[Built] = []
        partition, offset = pending.partition, pending.base_offset
        compress, keyring = partition.options.compress, partition.keyring
        for part in pieces(pending.batches, now, small=small):
            batches.append(build(partition.id, offset, part, now=now, compress=compress, keyring=keyring))
            offset += len(part.values)
        assert offset == partition.next, "every record has the offset it was promised"
        return batches

    def fence(self, why: str) -> StorageFailed:
        """Take no more writes: what the disk holds is no longer certain. Returns the error for the writes that were under way."""
        if self.failure is None:
            self.failure = StorageFailed(f"{why}; no more writes are taken until the broker is started again. This one was not written")
            self.health.ended(why)
        return StorageFailed(f"{why}; the outcome of this write is unknown: its records may be present after the broker is started again")

    def _write_forever(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                while self.flush():
                    self.keeper.after_flush()
            except Exception:
                self._wake.set()  # the store is fenced, with the reason; whoever else waits is told so in the next round
            if self._stopping and not self._staged and not self._urgent:
                return

    # The keeper's steps, for callers that take them by hand.

    def checkpoint(self) -> None:
        self.keeper.checkpoint()

    def maintain(self, now: int) -> None:
        """Retention and compaction, once over everything that is due."""
        self.keeper.maintain(now)

    def close(self) -> None:
        """Flush, checkpoint, let go of the directory. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._writer is not None:
            self._wake.set()
            self._writer.join()
        try:
            while self.flush():
                pass
            self.keeper.stop()
        finally:
            self.journal.close()
            self.files.close()

    def size_bytes(self) -> int:
        return sum(partition.size_bytes for partition in list(self.partitions.values()))
