"""The keeper: moves tails into segments, takes checkpoints, applies retention and compaction. One step at a time, off the ack path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from headrace.limits import MIB
from headrace.log.compaction import compact
from headrace.log.files import DISK_FULL_ERRNOS, File
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


class Keeper:
    """Runs on its own thread when the store has threads. `_mutex` makes its steps exclude each other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = threading.RLock()
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._checkpointed_journal = store.journal.current
        self._ticks = 0
        self._touched: set[Partition] = set()
        """Partitions that have a tail."""
        self._tail_bytes = 0
        self._touching = threading.Lock()
        self._unsynced = {partition for partition in store.partitions.values() if any(segment.dirty for segment in partition.segments)}
        """Partitions that have segments to sync: at first those of which recovery read more than a checkpoint had made sure of."""
        recovered = [partition for partition in store.partitions.values() if partition.tail]
        self.touch(recovered, sum(partition.tail_bytes for partition in recovered))

    def touch(self, partitions: list[Partition], size_bytes: int) -> None:
        """The writer has put `size_bytes` bytes into the tails of these."""
        with self._touching:
            self._touched.update(partitions)
            self._tail_bytes += size_bytes

    # The thread.

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="headrace-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            if self._stopping:
                return
            self.tick(urgent=woken)

    def tick(self, *, urgent: bool = False) -> None:
        """What is due now: a checkpoint when a journal file is full or the interval is over, otherwise tails into segments."""
        store = self._store
        self._ticks += not urgent
        due = self._ticks * TICK_SECONDS * 1000 >= store.options.checkpoint_interval_ms
        if store.journal.current != self._checkpointed_journal or (due and (self._touched or self._unsynced)):
            self._ticks = 0
            self.checkpoint()
        else:
            with self._mutex:
                self._guarded(self._spill_all)
        if not urgent:
            self._guarded(store.journal.sync)
            self._watch_headroom()

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
                lambda: self._tail_bytes < store.options.tail_bytes_max or store.failure is not None or store.full or self._stopping,
                timeout=30,
            )

    def stop(self) -> None:
        """A last checkpoint, so that the next start has nothing to replay."""
        self._stopping = True
        self._wake.set()
        with self._progress:
            self._progress.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.checkpoint(closing=True)

    # Steps.

    def checkpoint(self, *, closing: bool = False) -> None:
        """Tails to segments, segments to disk, then the manifest that says so; after that older journal files may go."""
        with self._mutex:
            self._guarded(lambda: self._checkpoint(closing))

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
        deleted = {log: number for log, number in store.deleted.items() if number >= journal}
        write_manifest(store.files, Manifest(journal, store.journal.next_frame, store.next_log, known, deleted))
        for log in store.deleted.keys() - deleted.keys():
            del store.deleted[log]
        store.journal.recycle(journal, SPARE_JOURNALS)
        self._checkpointed_journal = journal
        store.counters.checkpoints += 1
        self._release_files(partitions)

    def _sync(self, dirty: list[Segment]) -> None:
        """Never a second sync of pages whose first one failed: a failure fences the store."""
        files: list[File] = []
        for segment in dirty:
            segment.dirty = False
            files.append(segment.file())
        try:
            self._store.files.sync_many(files)
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure

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
        segments = [segment for partition in partitions.values() for segment in partition.segments]
        if len(segments) > OPEN_SEGMENTS_MAX:
            for segment in segments:
                if not segment.dirty:
                    segment.release()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run one step; a full disk is waited out, any other failure of the disk ends writing, after which there are no more steps."""
        store = self._store
        if store.failure is not None:
            return
        try:
            step()
            if store.full and self._has_headroom():
                store.full = False
        except SyncFailed as failure:
            store.fence(f"syncing failed: {failure}")
        except OSError as failure:
            if failure.errno in DISK_FULL_ERRNOS:
                store.full = True
            else:
                store.fence(f"writing failed: {failure}")

    def _has_headroom(self) -> bool:
        return self._store.files.free_bytes() >= self._store.options.headroom_bytes

    def _watch_headroom(self) -> None:
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
        if expired:
            for partition, segments in expired:
                with partition.lock:
                    partition.segments = partition.segments[len(segments) :]
                    partition.first = partition.segments[0].base_offset
                    partition.generation += 1
            # The manifest says that they are gone before they go: what a crash leaves of them is recognised and removed.
            self._checkpoint(closing=False)
            for _, segments in expired:
                self._remove_segments(segments)
        # A record must not go for the sake of a newer one that a power cut may take: all that segments hold is in frames synced here.
        self._store.journal.sync()
        for partition in partitions:
            if partition.options.compact:
                self._unsynced.add(partition)
                compact(self._store.files, partition, now, self._store.keyring, self._store.report.damaged)

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
            self.checkpoint()
            remove_logs(self._store.files, [partition.id for partition in partitions])


def _checkpointed(partition: Partition) -> Checkpointed:
    with partition.lock:
        end = partition.tail[0][0].base_offset if partition.tail else partition.end
        active = partition.segments[-1] if partition.segments else None
        return Checkpointed(partition.first, end, active.base_offset if active else 0, active.size if active else 0)
