"""Background maintenance of the store: moves tails into segments, takes checkpoints, applies retention and compaction."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from headrace.errors import CorruptData
from headrace.limits import BATCH_JOINED_BYTES_MAX, MIB
from headrace.records import NEVER
from headrace.storage.compaction import compact
from headrace.storage.files import DISK_FULL_ERRNOS, Files, is_exhausted
from headrace.storage.health import FAILURES_MAX, retry_seconds
from headrace.storage.journal import SyncFailed
from headrace.storage.manifest import Checkpointed, Manifest, write_manifest
from headrace.storage.partition import Partition
from headrace.storage.segment import HEADER_BYTES, Segment, index_path, log_directory, remove_logs

if TYPE_CHECKING:
    from headrace.storage.store import Store

TICK_SECONDS: Final = 0.5
SPILL_BYTES: Final = 8 * MIB
"""Tails of this total size are written to segments without waiting for the next checkpoint."""
REFERENCED_BYTES_MAX: Final = 256 * MIB
"""Large appends of this total size since the last checkpoint are due for another one, because recovery verifies them."""
SPARE_JOURNALS: Final = 2
OPEN_SEGMENTS_MAX: Final = 512
SPILLED_TOGETHER: Final = 256
"""Logs whose first segments are created together."""
_PROGRESS_SECONDS_MAX: Final = 30
"""Time for which the writer waits for maintenance."""
STEP: Final = "log maintenance"
"""Name of maintenance in the health of the store."""


class Maintenance:
    """Maintenance of one store, on its own thread if the store has threads. `_mutex` serializes its steps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = threading.RLock()
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._stopping = False
        self._halt = threading.Event()
        """Ends the pause between two attempts."""
        self._runner: threading.Thread | None = None
        self._checkpointed_journal = store.journal.current
        self._ticks = 0
        self._unexpected = 0
        """Consecutive attempts that failed for a reason that waiting may not resolve."""
        self._touched: set[Partition] = set()
        """Partitions with a tail."""
        self._large: set[Partition] = set()
        """Those of them whose tail does not wait for the checkpoint."""
        self._tail_bytes = 0
        self._waiting_bytes = 0
        """Size of the small tails that wait for the next checkpoint."""
        self._referenced_bytes = 0
        """Size of large appends since the last checkpoint."""
        self._touching = threading.Lock()
        """Guards the sets and sums that the writer changes too."""
        self._unsynced = {partition for partition in store.partitions.values() if any(segment.dirty for segment in partition.segments)}
        """Partitions with segments to sync: at first those with data beyond the last checkpoint."""
        self._retired: list[list[Segment]] = []
        """Segments that retention removed from their partitions. Their files are removed after the next checkpoint."""
        self._removing: set[int] = set()
        """Deleted logs whose files still exist, or that the last checkpoint still lists."""
        recovered = [partition for partition in store.partitions.values() if partition.has_tail]
        self.touch(recovered, list(filter(_is_large, recovered)), sum(partition.tail_bytes for partition in recovered))

    def touch(self, partitions: list[Partition], large: list[Partition], size_bytes: int) -> None:
        """Record that the writer added `size_bytes` bytes to tails: which partitions may have had none before, and which have a large tail
        now."""
        with self._touching:
            self._touched.update(partitions)
            self._large.update(large)
            self._tail_bytes += size_bytes

    def touch_large(self, partition: Partition, size_bytes: int) -> None:
        """Record that the writer added `size_bytes` bytes to a segment of the partition."""
        with self._touching:
            self._unsynced.add(partition)
            self._referenced_bytes += size_bytes

    # Thread.

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="headrace-maintenance", daemon=True)
        thread.start()
        self._runner = thread

    def _run(self) -> None:
        failures = 0
        while True:
            if failures:
                self._halt.wait(retry_seconds(failures))
            woken = self._wake.wait(0 if failures else TICK_SECONDS)
            self._wake.clear()
            if self._stopping:
                return
            failures = self.attempt(urgent=woken and not failures)

    def attempt(self, *, urgent: bool = False) -> int:
        """Run the due steps and catch failures. Returns the number of consecutive failed attempts.

        Lack of descriptors, threads or memory is retried indefinitely. A failed write stops writing at once. Any other failure is retried
        `FAILURES_MAX` times; then writing stops.
        """
        store = self._store
        try:
            self.tick(urgent=urgent)
            self._unexpected = 0
        except Exception as failure:
            store.health.failed(STEP, f"{failure!r}")
            self._unexpected = 0 if is_exhausted(failure) else self._unexpected + 1
            if self._unexpected >= FAILURES_MAX:
                store.fence(f"log maintenance failed {self._unexpected} times in a row: {failure!r}")
        failures = store.health.failures(STEP)
        if failures:
            with self._progress:  # the writer must not wait while maintenance fails
                self._progress.notify_all()
        return failures

    def tick(self, *, urgent: bool = False) -> None:
        """Run the due steps: a checkpoint if a journal file is full or the interval is over, otherwise tails to segments."""
        store = self._store
        self._ticks += not urgent
        due = self._ticks * TICK_SECONDS * 1000 >= store.options.checkpoint_interval_ms
        is_full = store.journal.current != self._checkpointed_journal or self._referenced_bytes >= REFERENCED_BYTES_MAX
        if is_full or (due and (self._touched or self._unsynced or self._removing)):
            succeeded = self.checkpoint()
            if succeeded:
                self._ticks = 0
        else:
            with self._mutex:
                succeeded = self._guarded(self._spill_large)
        if not urgent:
            succeeded &= self._guarded(store.journal.sync)
            if not store.files.reserve():
                with self._mutex:
                    self._release_clean()
        # Also on urgent ticks: under load the writer wakes this thread before each interval is over.
        self._watch_headroom()
        if succeeded:
            store.health.succeeded(STEP)

    @property
    def is_behind(self) -> bool:
        """Whether the tails exceed their limit and the last attempt to write them to segments failed."""
        return self._tail_bytes >= self._store.options.tail_bytes_max and self._store.health.failures(STEP) > 0

    def after_flush(self) -> None:
        """Wake maintenance when there is enough to do, and wait for it when there is too much. Called by the writer."""
        store = self._store
        tail = self._tail_bytes
        referenced = self._referenced_bytes
        spilled_from = min(self._waiting_bytes + SPILL_BYTES, store.options.tail_bytes_max)
        if tail >= spilled_from or store.journal.current != self._checkpointed_journal or referenced >= REFERENCED_BYTES_MAX:
            self._wake.set()
        if tail < store.options.tail_bytes_max or self._runner is None:
            return
        with self._progress:
            self._progress.wait_for(
                lambda: (
                    self._tail_bytes < store.options.tail_bytes_max
                    or store.failure is not None
                    or store.full
                    or self.is_behind
                    or self._stopping
                    or store.is_large_ready  # maintenance may wait for the locks that it holds until its frame
                ),
                timeout=_PROGRESS_SECONDS_MAX,
            )

    def large_ready(self) -> None:
        """Wake the writer if it waits for maintenance: a large append is ready for its frame."""
        with self._progress:
            self._progress.notify_all()

    def stop(self) -> None:
        """Stop the thread and take a last checkpoint, so that the next start has nothing to replay."""
        self._stopping = True
        self._halt.set()
        self._wake.set()
        with self._progress:
            self._progress.notify_all()
        if self._runner is not None:
            self._runner.join()
        try:
            self.checkpoint(closing=True)
        except Exception as failure:
            self._store.fence(f"the last checkpoint failed: {failure!r}")  # the journal still has the batches
            raise

    # Steps.

    def checkpoint(self, *, closing: bool = False) -> bool:
        """Write tails to segments, sync them, write the manifest, recycle older journal files. Returns False if it has to be retried."""
        counters = self._store.counters
        with self._mutex:
            before = counters.checkpoints
            succeeded = self._guarded(lambda: self._checkpoint(closing))
            if self._removing:
                succeeded &= self._guarded(lambda: self._remove_logs(excluded=counters.checkpoints > before))
            return succeeded

    def _checkpoint(self, closing: bool) -> None:
        store = self._store
        # The writer adds the frames of earlier files to their tails before it opens the current file.
        journal = store.journal.current
        if closing:
            journal += 1
        self._spill_all()
        referenced = self._referenced_bytes
        partitions = dict(store.partitions)
        known = {log: _checkpointed(partition) for log, partition in partitions.items()}
        # After `known`: a partition that the writer has spilled since is synced by the next checkpoint.
        with self._touching:
            unsynced, self._unsynced = sorted(self._unsynced, key=attrgetter("id")), set()
        try:
            self._sync([segment for partition in unsynced for segment in partition.segments if segment.dirty])
        except BaseException:
            with self._touching:
                self._unsynced.update(unsynced)
            raise
        if closing:
            for partition in partitions.values():
                if partition.segments:
                    partition.segments[-1].store_index()
        # A log whose files still exist must be listed too: otherwise recovery would take it for an unknown log.
        deleted = {log: number for log, number in store.deleted.items() if number >= journal or log in self._removing}
        write_manifest(store.files, Manifest(journal, store.journal.next_frame, store.next_log, known, deleted))
        for log in store.deleted.keys() - deleted.keys():
            del store.deleted[log]
        store.journal.recycle(journal, SPARE_JOURNALS)
        self._checkpointed_journal = journal
        with self._touching:
            self._referenced_bytes -= referenced
        store.counters.checkpoints += 1
        self._release_files(partitions)

    def _sync(self, dirty: list[Segment]) -> None:
        """Sync segments. A failure fences the store, because a second sync of the same pages would not report it."""
        files = [segment.file() for segment in dirty]
        changes = [segment.changes for segment in dirty]
        try:
            self._store.files.sync_many(files)
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure
        # Only after all syncs: a round that fails has made nothing durable, and the next one must sync the same segments.
        for segment, before in zip(dirty, changes, strict=True):
            if segment.changes == before:  # otherwise the writer has changed it since
                segment.dirty = False

    def _spill_large(self) -> None:
        """Write large tails to segments. Small ones wait for the checkpoint, so that more of their batches are joined, unless there are
        too many of them."""
        store = self._store
        if not store.full:
            self._spill_all(only_large=True)
        if store.full or self._tail_bytes >= store.options.tail_bytes_max // 2:
            self._spill_all()
        self._waiting_bytes = self._tail_bytes

    def spill(self) -> bool:
        """Write tails to segments. Returns False if it has to be retried."""
        with self._mutex:
            return self._guarded(self._spill_all)

    def _spill_all(self, *, only_large: bool = False) -> None:
        """Move tails to segments."""
        with self._touching:
            touched = sorted(self._large if only_large else self._touched, key=attrgetter("id"), reverse=True)
            self._touched.difference_update(touched)
            self._large.difference_update(touched)
        lowest_bytes = self._tail_bytes
        try:
            while touched:
                self._start_logs(touched[-SPILLED_TOGETHER:])
                for partition in reversed(touched[-SPILLED_TOGETHER:]):
                    self.spill_partition(partition)
                    touched.pop()
                    lowest_bytes = min(lowest_bytes, self._tail_bytes)
                    if self._tail_bytes >= lowest_bytes + SPILL_BYTES and not only_large:
                        # Thousands of small tails take seconds. The writer must not wait for them because a few others have grown.
                        self._spill_all(only_large=True)
        finally:
            with self._touching:
                self._touched.update(touched)
                self._large.update(filter(_is_large, touched))

    def _start_logs(self, partitions: Sequence[Partition]) -> None:
        """Create the first segments of new logs together: parallel syncs of their directories share the work of the file system. A log
        that the writer holds gets its segment later."""
        with contextlib.ExitStack() as held:
            new: list[Partition] = []
            for partition in partitions:
                if partition.has_tail and not partition.segments and partition.writing.acquire(blocking=False):
                    held.callback(partition.writing.release)
                    new.append(partition)
            if len(new) > 1:
                _create_segments(self._store.files, new)

    def spill_partition(self, partition: Partition) -> None:
        """Move a tail to segments. The next checkpoint syncs the moved batches, also those moved before a failure.

        Maintenance calls this, and the writer before a large append.
        """
        with partition.writing:
            before = partition.spilled_bytes
            with self._touching:
                self._unsynced.add(partition)
            try:
                partition.spill()
            finally:
                self._subtract_tail(partition.spilled_bytes - before)

    def _subtract_tail(self, moved: int) -> None:
        """Subtract bytes that left the tails, and wake the writer, which may wait for that."""
        with self._touching:
            self._tail_bytes -= moved
        with self._progress:
            self._progress.notify_all()

    def _release_files(self, partitions: dict[int, Partition]) -> None:
        """Close clean segments if there are more segments than descriptors for them."""
        if sum(len(partition.segments) for partition in partitions.values()) > OPEN_SEGMENTS_MAX:
            self._release_clean()

    def _release_clean(self) -> None:
        """Close the files of clean segments. A dirty one stays open, because a write failure may be reported to this descriptor only."""
        for partition in list(self._store.partitions.values()):
            for segment in partition.segments:
                if not segment.dirty:
                    segment.release()

    def _relieve(self) -> None:
        """Sync the open segments and close all files, after descriptors ran out."""
        with self._mutex:
            with self._touching:
                unsynced = list(self._unsynced)
            self._sync([segment for partition in unsynced for segment in partition.segments if segment.dirty and segment.is_open])
            self._release_clean()

    def _guarded(self, step: Callable[[], None]) -> bool:
        """Run one step. Returns False if it has to be retried.

        A full disk is waited out. Lack of descriptors or memory makes the step fail for now. Any other disk failure stops writing.
        """
        store = self._store
        if store.failure is not None:
            return False
        try:
            try:
                step()
            except (OSError, MemoryError) as lack:
                if not is_exhausted(lack):
                    raise
                store.health.failed(STEP, str(lack) or "out of memory")
                self._relieve()
                return False
        except SyncFailed as unsynced:
            store.fence(f"syncing failed: {unsynced}")
            return False
        except OSError as failure:
            if failure.errno not in DISK_FULL_ERRNOS:
                store.fence(f"writing failed: {failure}")
                return False
            store.full = True
            return True
        with contextlib.suppress(OSError):  # `_watch_headroom` meets and reports the same failure
            if store.full and self._has_headroom():
                store.full = False
        return True

    def _has_headroom(self) -> bool:
        return self._store.files.free_bytes() >= self._store.options.headroom_bytes

    def _watch_headroom(self) -> None:
        """Update `full`. Raises the errors of `statvfs`, which do not concern the log."""
        if not self._has_headroom():
            self._store.full = True
        elif self._store.full and not self._tail_bytes:
            self._store.full = False

    # Retention, compaction, deletion.

    def maintain(self, now: int) -> None:
        with self._mutex:
            self._guarded(lambda: self._maintain(now))

    def _maintain(self, now: int) -> None:
        self._spill_all()
        partitions = list(self._store.partitions.values())
        expired = [(partition, segments) for partition in partitions if (segments := self._expired(partition, now))]
        for partition, segments in expired:
            with partition.lock:
                partition.segments = partition.segments[len(segments) :]
                partition.first = partition.segments[0].base_offset
                partition.generation += 1
            self._retired.append(segments)
        if self._retired:
            # The manifest excludes these segments before their files are removed, so that recovery recognizes files that a crash leaves.
            self._checkpoint(closing=False)
            while self._retired:
                self._remove_segments(self._retired[0])
                self._retired.pop(0)
        # Compaction must not remove a record in favour of a newer one that a power cut may lose, so all frames in segments are synced.
        self._store.journal.sync()
        unreadable: list[CorruptData] = []
        for partition in partitions:
            if partition.options.compact:
                with self._touching:
                    self._unsynced.add(partition)
                try:
                    compact(self._store.files, partition, now, self._store.keyring, self._store.report.damaged)
                except CorruptData as damage:  # the other logs are still compacted
                    unreadable.append(damage)
        if unreadable:
            raise unreadable[0]

    def _expired(self, partition: Partition, now: int) -> list[Segment]:
        """Return the oldest segments past retention, never the active one. Closes the active one first if all its records are due."""
        options = partition.options
        if options.compact:
            return []
        active = partition.segments[-1:] if not partition.has_tail else []
        if active and active[0].size > HEADER_BYTES and self._is_over(active[0], partition, now):
            partition.roll()
            with self._touching:
                self._unsynced.add(partition)
        segments = partition.segments
        size = partition.size_bytes
        count = 0
        for segment in segments[:-1]:
            over = options.retention_bytes and size - segment.size >= options.retention_bytes
            if not (over or self._is_over(segment, partition, now)):
                break
            size -= segment.size
            count += 1
        return segments[:count]

    def _is_over(self, segment: Segment, partition: Partition, now: int) -> bool:
        """Return whether all records of the segment are past retention or have expired."""
        keyring, damaged, options = self._store.keyring, self._store.report.damaged, partition.options
        if options.retention_ms and segment.load_index(keyring, damaged).max_timestamp < now - options.retention_ms:
            return True
        expiry = segment.expires_at(keyring, damaged)
        return expiry != NEVER and expiry <= now - options.expired_keep_ms

    def _remove_segments(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._store.files.remove(segment.path)
            self._store.files.remove(index_path(segment.log, segment.base_offset))
        if segments:
            self._store.files.sync_dir(log_directory(segments[0].log))

    def remove(self, partitions: Sequence[Partition]) -> None:
        """Remove all files of deleted logs, after a checkpoint that excludes them."""
        with self._mutex:
            for partition in partitions:
                with self._touching:
                    self._unsynced.discard(partition)
                self._subtract_tail(partition.drop())
            self._removing.update(partition.id for partition in partitions)
            self.checkpoint()

    def _remove_logs(self, *, excluded: bool) -> None:
        """Remove files even if a full disk had no room for the checkpoint. The logs stay listed until a checkpoint excludes them."""
        remove_logs(self._store.files, sorted(self._removing))
        if excluded:
            self._removing.clear()

    def is_removed(self, logs: Iterable[int]) -> bool:
        """Return whether these deleted logs are removed completely."""
        return self._removing.isdisjoint(logs)


def _create_segments(files: Files, partitions: Sequence[Partition]) -> None:
    """Create the first segments of logs that have a tail only. Requires `writing` of each. After a failure none is created."""
    directories = [log_directory(partition.id) for partition in partitions]
    files.make_dir(*directories)
    created: list[Segment] = []
    try:
        for partition in partitions:
            created.append(Segment.create(files, partition.id, partition.segments_end(), durable=False))
        files.sync_dir(*directories)
    except BaseException:
        for segment in created:
            files.remove(segment.path)
        raise
    for partition, segment in zip(partitions, created, strict=True):
        partition.start(segment)


def _is_large(partition: Partition) -> bool:
    return partition.tail_bytes >= BATCH_JOINED_BYTES_MAX


def _checkpointed(partition: Partition) -> Checkpointed:
    with partition.lock:
        end = partition.tail_offset
        active = partition.segments[-1] if partition.segments else None
        return Checkpointed(partition.first, end, active.base_offset if active else 0, active.size if active else 0)
