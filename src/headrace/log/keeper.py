"""The keeper: moves tails into segments, takes checkpoints, applies retention and compaction. One step at a time, off the ack path."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from headrace.errors import CorruptData
from headrace.limits import MIB
from headrace.log.compaction import compact
from headrace.log.files import DISK_FULL_ERRNOS, is_exhausted
from headrace.log.health import FAILURES_MAX, retry_seconds
from headrace.log.journal import SyncFailed
from headrace.log.manifest import Checkpointed, Manifest, write_manifest
from headrace.log.partition import Partition
from headrace.log.segment import HEADER_BYTES, Segment, index_path, log_directory, remove_logs
from headrace.records import NEVER

if TYPE_CHECKING:
    from headrace.log.store import Store

TICK_SECONDS: Final = 0.5
SPILL_BYTES: Final = 8 * MIB
"""So much in tails is written to segments at once, without waiting for the next checkpoint."""
SPARE_JOURNALS: Final = 2
OPEN_SEGMENTS_MAX: Final = 512
STEP: Final = "log maintenance"
"""The name of the keeper in the health of the store."""


class Keeper:
    """Runs on its own thread when the store has threads. `_mutex` makes its steps exclude each other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = threading.RLock()
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._stopping = False
        self._halt = threading.Event()
        """Ends a pause between two attempts."""
        self._thread: threading.Thread | None = None
        self._checkpointed_journal = store.journal.current
        self._ticks = 0
        self._unexpected = 0
        """How many attempts in a row met a failure that waiting may not cure."""
        self._touched: set[Partition] = set()
        """Partitions that have a tail."""
        self._tail_bytes = 0
        self._touching = threading.Lock()
        self._unsynced = {partition for partition in store.partitions.values() if any(segment.dirty for segment in partition.segments)}
        """Partitions that have segments to sync: at first those of which recovery read more than a checkpoint had made sure of."""
        self._retired: list[list[Segment]] = []
        """Segments that retention took out of their partitions, and whose files go after the next checkpoint."""
        self._doomed: set[int] = set()
        """Deleted logs whose files are not gone yet, or that no checkpoint has left out yet."""
        recovered = [partition for partition in store.partitions.values() if partition.tail]
        self.touch(recovered, sum(partition.tail_bytes for partition in recovered))

    def touch(self, partitions: list[Partition], size_bytes: int) -> None:
        """The writer has put `size_bytes` bytes into the tails of these."""
        with self._touching:
            self._touched.update(partitions)
            self._tail_bytes += size_bytes

    # The thread.

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="headrace-keeper", daemon=True)
        thread.start()
        self._thread = thread

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
        """Take what is due, and survive it. Returns how many attempts have failed in a row.

        Want of descriptors, threads or memory is waited out for as long as it takes. Any other failure that is not a failed write (which
        ends writing at once) is retried `FAILURES_MAX` times; then writing ends.
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
            with self._progress:  # the writer does not wait for who cannot help
                self._progress.notify_all()
        return failures

    def tick(self, *, urgent: bool = False) -> None:
        """What is due now: a checkpoint when a journal file is full or the interval is over, otherwise tails into segments."""
        store = self._store
        self._ticks += not urgent
        due = self._ticks * TICK_SECONDS * 1000 >= store.options.checkpoint_interval_ms
        if store.journal.current != self._checkpointed_journal or (due and (self._touched or self._unsynced or self._doomed)):
            succeeded = self.checkpoint()
            if succeeded:
                self._ticks = 0
        else:
            with self._mutex:
                succeeded = self._guarded(self._spill_all)
        if not urgent:
            succeeded &= self._guarded(store.journal.sync)
            if not store.files.reserve():
                with self._mutex:
                    self._release_clean()
        # Under load the writer wakes the keeper before every interval is over: whoever only looked when it is would never look.
        self._watch_headroom()
        if succeeded:
            store.health.succeeded(STEP)

    @property
    def is_behind(self) -> bool:
        """Whether more waits in memory than may, and the last attempt to write it to segments failed."""
        return self._tail_bytes >= self._store.options.tail_bytes_max and self._store.health.failures(STEP) > 0

    def after_flush(self) -> None:
        """Called by the writer: wake the keeper when there is enough to do, and wait for it when there is too much."""
        store = self._store
        tail = self._tail_bytes
        if tail >= SPILL_BYTES or store.journal.current != self._checkpointed_journal:
            self._wake.set()
        if tail < store.options.tail_bytes_max or self._thread is None:
            return
        with self._progress:
            self._progress.wait_for(
                lambda: (
                    self._tail_bytes < store.options.tail_bytes_max
                    or store.failure is not None
                    or store.full
                    or self.is_behind
                    or self._stopping
                ),
                timeout=30,
            )

    def stop(self) -> None:
        """A last checkpoint, so that the next start has nothing to replay."""
        self._stopping = True
        self._halt.set()
        self._wake.set()
        with self._progress:
            self._progress.notify_all()
        if self._thread is not None:
            self._thread.join()
        try:
            self.checkpoint(closing=True)
        except Exception as failure:
            self._store.fence(f"the last checkpoint failed: {failure!r}")  # the journal has what it did not reach
            raise

    # Steps.

    def checkpoint(self, *, closing: bool = False) -> bool:
        """Tails to segments, segments to disk, then the manifest that says so; after that older journal files may go. False if it has
        to be tried again."""
        counters = self._store.counters
        with self._mutex:
            before = counters.checkpoints
            succeeded = self._guarded(lambda: self._checkpoint(closing))
            if self._doomed:
                succeeded &= self._guarded(lambda: self._remove_doomed(left_out=counters.checkpoints > before))
            return succeeded

    def _checkpoint(self, closing: bool) -> None:
        store = self._store
        # Frames in files before the current one were pushed to their tails before the writer opened it.
        journal = store.journal.current
        if closing:
            journal += 1
        self._spill_all()
        partitions = dict(store.partitions)
        known = {log: _checkpointed(partition) for log, partition in partitions.items()}
        dirty = [segment for partition in sorted(self._unsynced, key=attrgetter("id")) for segment in partition.segments if segment.dirty]
        self._sync(dirty)
        self._unsynced.clear()
        if closing:
            for partition in partitions.values():
                if partition.segments:
                    partition.segments[-1].store_index()
        # One whose files are still there has to be named as well: recovery would take them for a log it knows nothing of.
        deleted = {log: number for log, number in store.deleted.items() if number >= journal or log in self._doomed}
        write_manifest(store.files, Manifest(journal, store.journal.next_frame, store.next_log, known, deleted))
        for log in store.deleted.keys() - deleted.keys():
            del store.deleted[log]
        store.journal.recycle(journal, SPARE_JOURNALS)
        self._checkpointed_journal = journal
        store.counters.checkpoints += 1
        self._release_files(partitions)

    def _sync(self, dirty: list[Segment]) -> None:
        """Never a second sync of pages whose first one failed: a failure fences the store."""
        files = [segment.file() for segment in dirty]
        try:
            self._store.files.sync_many(files)
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure
        # Only now: a round that ends before this line has made nothing durable, and the next one has to sync the same segments.
        for segment in dirty:
            segment.dirty = False

    def _spill_all(self) -> None:
        with self._touching:
            touched, self._touched = sorted(self._touched, key=attrgetter("id"), reverse=True), set()
        try:
            while touched:
                self._spill(touched[-1])
                touched.pop()
        finally:
            with self._touching:
                self._touched.update(touched)

    def _spill(self, partition: Partition) -> None:
        """The only way from a tail to a segment: what was moved, be it a part before a failure, is synced by the next checkpoint."""
        before = partition.spilled_bytes
        self._unsynced.add(partition)
        try:
            partition.spill()
        finally:
            self._settle(partition.spilled_bytes - before)

    def _settle(self, moved: int) -> None:
        """So many bytes left the tails: the writer may be waiting for that."""
        with self._touching:
            self._tail_bytes -= moved
        with self._progress:
            self._progress.notify_all()

    def _release_files(self, partitions: dict[int, Partition]) -> None:
        """Descriptors are few, partitions may be many."""
        if sum(len(partition.segments) for partition in partitions.values()) > OPEN_SEGMENTS_MAX:
            self._release_clean()

    def _release_clean(self) -> None:
        """One that is dirty stays open: the failure of a write to it is reported to this descriptor, and perhaps to no other."""
        for partition in list(self._store.partitions.values()):
            for segment in partition.segments:
                if not segment.dirty:
                    segment.release()

    def _relieve(self) -> None:
        """There are no descriptors left: sync the segments that hold one, and let go of all of them."""
        with self._mutex:
            self._sync([segment for partition in self._unsynced for segment in partition.segments if segment.dirty and segment.is_open])
            self._release_clean()

    def _guarded(self, step: Callable[[], None]) -> bool:
        """Run one step; a full disk is waited out, want of descriptors or memory makes it fail for now, any other failure of the disk ends
        writing, after which there are no more steps. False if the step has to be taken again."""
        store = self._store
        if store.failure is not None:
            return False
        try:
            try:
                step()
            except (OSError, MemoryError) as failure:
                if not is_exhausted(failure):
                    raise
                store.health.failed(STEP, str(failure) or "out of memory")
                self._relieve()
                return False
        except SyncFailed as failure:
            store.fence(f"syncing failed: {failure}")
            return False
        except OSError as failure:
            if failure.errno not in DISK_FULL_ERRNOS:
                store.fence(f"writing failed: {failure}")
                return False
            store.full = True
            return True
        with contextlib.suppress(OSError):  # `_watch_headroom` meets the same, and is heard
            if store.full and self._has_headroom():
                store.full = False
        return True

    def _has_headroom(self) -> bool:
        return self._store.files.free_bytes() >= self._store.options.headroom_bytes

    def _watch_headroom(self) -> None:
        """Raises what `statvfs` raises: that says nothing about the log."""
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
            # The manifest says that they are gone before they go: what a crash leaves of them is recognised and removed.
            self._checkpoint(closing=False)
            while self._retired:
                self._remove_segments(self._retired[0])
                self._retired.pop(0)
        # A record must not go for the sake of a newer one that a power cut may take: all that segments hold is in frames synced here.
        self._store.journal.sync()
        unreadable: list[CorruptData] = []
        for partition in partitions:
            if partition.options.compact:
                self._unsynced.add(partition)
                try:
                    compact(self._store.files, partition, now, self._store.keyring, self._store.report.damaged)
                except CorruptData as damage:  # of this log; the others are compacted all the same
                    unreadable.append(damage)
        if unreadable:
            raise unreadable[0]

    def _expired(self, partition: Partition, now: int) -> list[Segment]:
        """The oldest segments that retention no longer keeps; never the active one, which is closed first if all of it is due."""
        options = partition.options
        if options.compact:
            return []
        active = partition.segments[-1:] if not partition.tail else []
        if active and active[0].size > HEADER_BYTES and self._is_over(active[0], partition, now):
            partition.roll()
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
        """Whether all records of the segment are past retention, or have all expired."""
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
        """All files of deleted logs, after a checkpoint that says so."""
        with self._mutex:
            for partition in partitions:
                self._unsynced.discard(partition)
                self._settle(partition.drop())
            self._doomed.update(partition.id for partition in partitions)
            self.checkpoint()

    def _remove_doomed(self, *, left_out: bool) -> None:
        """Give the space back even if a full disk had no room for the checkpoint. The logs stay on the list until one has left them out."""
        remove_logs(self._store.files, sorted(self._doomed))
        if left_out:
            self._doomed.clear()

    def is_removed(self, logs: Iterable[int]) -> bool:
        """Whether these deleted logs are gone for good."""
        return self._doomed.isdisjoint(logs)


def _checkpointed(partition: Partition) -> Checkpointed:
    with partition.lock:
        end = partition.tail[0][0].base_offset if partition.tail else partition.end
        active = partition.segments[-1] if partition.segments else None
        return Checkpointed(partition.first, end, active.base_offset if active else 0, active.size if active else 0)
