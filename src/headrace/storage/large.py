"""Large appends, which are written once.

    spill the tail · write to the segment · sync the segment · journal frame with a reference · sync the journal · readable, acknowledged

The segment is synced before the frame that refers to it is written, so a frame never refers to bytes that a power cut can take away.
Without its frame a large append does not exist: its batches are marked, and recovery removes marked batches that no frame refers to.
A frame with references may hold batches of other logs too, and is still valid only as a whole.

Until its frame, a large append needs nothing of the journal. So a thread of its own writes and syncs the segments, while the writer serves
appends to other logs. The writer then commits the frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

from headrace.storage.batch import BuiltInPlace
from headrace.storage.batching import chunked
from headrace.storage.encoding import build_large
from headrace.storage.files import Files
from headrace.storage.journal import Reference, SyncFailed
from headrace.storage.maintenance import Maintenance
from headrace.storage.partition import Partition
from headrace.storage.pending import Pending

_T = TypeVar("_T")


class LargeAppends:
    """The large appends of one flush. As a context manager, it keeps maintenance from writing to their segments."""

    def __init__(self, files: Files, maintenance: Maintenance) -> None:
        self._files, self._maintenance = files, maintenance
        self._written: list[tuple[Partition, Sequence[BuiltInPlace]]] = []
        self._held: ExitStack | None = None
        """Locks of the logs; None while there is none, as in most flushes."""
        self.references: list[Reference] = []

    def __enter__(self) -> LargeAppends:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if self._held is not None:
            self._held.close()

    def hold(self, ahead: Pending) -> None:
        """Lock the log for writing. A log that was deleted meanwhile is not written to: the journal takes its batches."""
        self._held = self._held or ExitStack()
        self._held.enter_context(ahead.partition.writing)
        ahead.is_large = not ahead.partition.dropped

    def write(self, partition: Partition, batches: Sequence[BuiltInPlace]) -> None:
        """Write batches after those in the tail. Raises `OSError`."""
        self._maintenance.spill_partition(partition)
        self._written.append((partition, batches))
        self.references.append(partition.write_large(batches))

    def sync(self) -> None:
        """Sync the segments. Raises `SyncFailed`, after which the store must not write."""
        segments = [partition.segments[-1] for partition, _ in self._written]
        files = [segment.file() for segment in segments]
        try:
            self._files.sync_many(files)
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure
        for segment in segments:
            segment.dirty = False

    def reveal(self) -> int:
        """Make the batches readable, after the journal is safe. Returns their size in bytes."""
        size = 0
        for (partition, batches), reference in zip(self._written, self.references, strict=True):
            partition.reveal(batches)
            self._maintenance.touch_large(partition, reference.size)
            size += reference.size
        return size

    def retract(self) -> None:
        """Remove the batches again, because no frame refers to them."""
        for partition, _ in self._written:
            partition.retract()


def is_large(ahead: Pending, large_bytes: int) -> bool:
    """Return whether what the flush adds to one log goes to the segment first."""
    # Compaction reads its log while the writer appends, and must find each batch in the journal or in a synced segment.
    if not ahead.batches or ahead.partition.options.compact:
        return False
    return sum(batch.size_bytes for batch in ahead.batches) >= large_bytes


def built_large(ahead: Pending, now: int, *, small: bool) -> list[BuiltInPlace]:
    """Build the batches of a large append to one log. `small` as in `chunked`."""
    partition, offset = ahead.partition, ahead.base_offset
    batches: list[BuiltInPlace] = []
    for part in chunked(ahead.batches, now, small=small):
        batches.append(build_large(partition.id, offset, part, now=now, compress=partition.options.compress, keyring=partition.keyring))
        offset += len(part.values)
    assert offset == partition.next, "every record has its assigned offset"
    return batches


class LargeThread(Generic[_T]):
    """Thread that writes the segments of one large append at a time. The writer starts it with `begin` and ends it with `end`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        """Called when a large append is ready for its frame."""
        self._begun, self._ended = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], _T] | None = None
        self._held: LargeAppends | None = None
        self._outcome: Callable[[], _T] | None = None
        self._writer = threading.Thread(target=self._run, name="headrace-large", daemon=True)
        self._writer.start()

    @property
    def is_ready(self) -> bool:
        """Whether the segments are written, or that has failed."""
        return self._outcome is not None

    def begin(self, large: LargeAppends, work: Callable[[], _T]) -> None:
        """Write the segments of a large append. `large` keeps its locks until `end`."""
        self._work, self._held = work, large
        self._begun.release()

    def result(self) -> _T:
        """Return the result of the work, or raise its failure."""
        assert self._outcome is not None
        return self._outcome()

    def end(self) -> None:
        """Release the locks, after the batches are readable or were removed again."""
        self._outcome = None
        self._ended.release()

    def stop(self) -> None:
        self._work = None
        self._begun.release()
        self._writer.join()

    def _run(self) -> None:
        while True:
            self._begun.acquire()
            work, held, self._held = self._work, self._held, None
            if work is None or held is None:
                return
            with held:
                self._outcome = _attempted(work)
                del work
                self._wake()
                self._ended.acquire()


def _attempted(work: Callable[[], _T]) -> Callable[[], _T]:
    """Do the work. Returns a function that returns its result or raises its failure."""
    try:
        result = work()
    except BaseException as failure:
        failed = failure

        def fail() -> _T:
            raise failed

        return fail
    return lambda: result
