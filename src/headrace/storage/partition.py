"""One partition: its segments on disk, its tail in memory, and reads over both.

    first ………………………………………… segments ……………………………………… | tail ……… end
    [ closed segment ][ closed segment ][ active segment ][ batch ][ batch ]

A batch is in the tail from the moment its journal frame is safe until maintenance has written it to the active segment. It is readable
all the time. The writer appends to the tail, maintenance moves batches from its front to the segment, readers take snapshots. `lock`
guards the few shared lines and is never held during disk access.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from headrace.errors import CorruptData, OffsetOutOfRange, Unavailable
from headrace.limits import BATCH_JOINED_BYTES_MAX, KIB, MIB, READ_BATCHES_MAX
from headrace.located import Located
from headrace.records import Bounds
from headrace.storage import batch as batch_format
from headrace.storage.batch import BatchHeader, Built, BuiltInPlace, StoredBatch
from headrace.storage.crypt import Keyring
from headrace.storage.files import Files, NotCached, is_exhausted
from headrace.storage.followed import Followed
from headrace.storage.joining import fitting, join, join_singles
from headrace.storage.journal import Damage, Reference, headers_crc
from headrace.storage.locating import locate
from headrace.storage.opened import OpenedBatches
from headrace.storage.segment import HEADER_BYTES, Segment, log_directory

_HINTS_MAX = 64
_LARGE_BYTES_MIN: Final = 1 * MIB
"""Size from which on a part of the tail is written to its segment like a large append."""
_ALONE_BYTES_MIN: Final = 128 * KIB
"""A batch of this size is read alone, smaller ones together."""
_DAMAGED = -1
_SPILLED_BATCHES_MAX: Final = 2_048
"""Batches that are joined and written at once. Joining more would keep the event loop waiting for the interpreter."""
_KEPT_READ_BYTES_MAX: Final = 1 * MIB
"""A larger read is part of a scan, which does not return to its batches. Only the batch that it read in part is kept."""
_LOCKS: Final = 64
_KEPT_BATCH_BYTES_MIN: Final = 4 * KIB
"""Keeping a smaller batch costs more than reading it again."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Settings of one log. Zero means no limit."""

    segment_bytes: int = 128 * 1024 * 1024
    joined_bytes_max: int = BATCH_JOINED_BYTES_MAX
    """Size up to which small batches are joined; 0 does not join."""
    compress: bool = False
    encrypt: bool = False
    compact: bool = False
    retention_ms: int = 0
    retention_bytes: int = 0
    tombstone_retention_ms: int = 24 * 3600 * 1000
    expired_keep_ms: int = 0
    """Time for which a segment is kept after the last of its records has expired."""


@dataclass(slots=True)
class StoreContext:
    """State that all partitions of a store use."""

    files: Files
    keyring: Keyring | None
    damaged: Callable[[Damage], None]
    opened: OpenedBatches = field(default_factory=OpenedBatches)
    locks: list[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in range(_LOCKS)])
    """Each partition uses one of them as its `lock`. A thread that holds one takes no other, except the writer, which takes all of them for
    a flush to thousands of logs."""


class Partition:
    """Log of one partition. `id` is its number in journal and segments, which is never reused."""

    __slots__ = (
        "_batch_bytes",
        "_damaged",
        "_files",
        "_followed",
        "_keyring",
        "_opened",
        "batches",
        "compacted_to",
        "dropped",
        "end",
        "first",
        "generation",
        "id",
        "lock",
        "next",
        "options",
        "segments",
        "singles",
        "spilled_bytes",
        "tail_bytes",
        "writing",
    )

    def __init__(self, context: StoreContext, log: int, options: LogOptions) -> None:
        self.id = log
        self.options = options
        self.first = 0
        self.end = 0
        """End of the readable offsets. Everything below it is safe."""
        self.next = 0
        """Next offset to assign. Only the writer uses it; it is ahead of `end` only during a flush."""
        self.segments: list[Segment] = []
        self.batches: list[Built] = []
        self.singles: list[bytes | int] = []
        """The tail: batches, then the values and timestamps of records without anything else, in turns. Each of these is a batch of its own
        in the journal. They become batches when somebody reads them, or when they leave the tail."""
        self.tail_bytes = 0
        self.spilled_bytes = 0
        """Bytes that `spill` has moved since the store was opened."""
        self.dropped = False
        self.lock = context.locks[log % len(context.locks)]
        self.writing = threading.RLock()
        """Held while the active segment is written or replaced. The writer holds it from the first byte of a large append until the append
        is readable, so that maintenance does not write to the same place."""
        self.generation = 0
        """Number of changes of `segments` by compaction or retention. Readers compare it."""
        self.compacted_to = 0
        """Offsets below this were compacted since the store was opened."""
        self._followed: Followed | None = None
        """None before the first large write to a segment."""
        self._batch_bytes = 0
        """Size of the last batch read, as an estimate for the next one."""
        self._opened = context.opened
        self._files = context.files
        self._keyring = context.keyring
        self._damaged = context.damaged

    @property
    def keyring(self) -> Keyring | None:
        return self._keyring if self.options.encrypt else None

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.first, self.end)

    @property
    def size_bytes(self) -> int:
        with self.lock:
            return sum(segment.size for segment in self.segments) + self.tail_bytes

    @property
    def has_tail(self) -> bool:
        return bool(self.batches or self.singles)

    @property
    def tail(self) -> list[Built]:
        """All batches of the tail."""
        with self.lock:
            self.settle()
            return list(self.batches)

    @property
    def tail_offset(self) -> int:
        """First offset of the tail, or `end` if it is empty. Requires the lock."""
        return self.batches[0][0].base_offset if self.batches else self.end - len(self.singles) // 2

    def settle(self) -> None:
        """Make batches of the single records. Requires the lock."""
        if self.singles:
            values = cast("list[bytes]", self.singles[0::2])
            times = cast("list[int]", self.singles[1::2])
            self.batches += join_singles(self.id, self.end - len(values), values, times, self.options.joined_bytes_max)
            self.singles = []

    # Called by the writer.

    def push(self, batches: list[Built]) -> int:
        """Make batches readable that are safe in the journal. Returns their size in bytes."""
        size = batches[0][0].size if len(batches) == 1 else sum(header.size for header, _ in batches)
        with self.lock:
            if self.dropped:
                return 0
            self.settle()
            self.batches += batches
            self.tail_bytes += size
            self.end = self.next
        return size

    def write_large(self, batches: Sequence[BuiltInPlace]) -> Reference:
        """Write batches to the active segment, for a journal frame that refers to them. Requires `writing`, and that the tail is empty. The
        caller syncs the segment. They are readable after `reveal`; `retract` removes them."""
        assert not self.has_tail, "the batches of a segment are in order"
        headers = [header for header, _ in batches]
        size, base_offset = sum(header.size for header in headers), headers[0].base_offset
        segment = self.segments[-1] if self.segments else None
        if segment is None or segment.covers_to or (segment.size > HEADER_BYTES and segment.size + size > self.options.segment_bytes):
            segment = self._roll(base_offset)
        self._append_large(segment, batches, size)
        return Reference(self.id, headers_crc(headers), segment.base_offset, segment.size, size, base_offset, headers[-1].next_offset)

    def reveal(self, batches: Sequence[BuiltInPlace]) -> None:
        """Make the batches of `write_large` readable."""
        segment = self.segments[-1]
        size = sum(header.size for header, _ in batches)
        with self.lock:
            segment.extend(batches, segment.size + size)
            self.end = self.next

    def retract(self) -> None:
        """Remove batches that no journal frame refers to. If this fails, recovery or a later write removes them."""
        for segment in self.segments[-1:]:
            with contextlib.suppress(OSError):
                segment.cut_off()

    # Called by maintenance.

    def spill(self) -> None:
        """Write the tail to segments, small batches joined. Batches that cannot be written stay in the tail, readable and safe.

        Requires `writing`.
        """
        while True:
            with self.lock:
                self.settle()
                batches, segment = self.batches[:_SPILLED_BATCHES_MAX], self.segments[-1] if self.segments else None
            if not batches:
                return
            if segment is None or segment.size >= self.options.segment_bytes or segment.covers_to:
                segment = self._roll(batches[0][0].base_offset)
            room = max(self.options.segment_bytes - segment.size, 1)
            taken = fitting(batches, room)
            joined = join(taken, self.options.joined_bytes_max, compress=self.options.compress, keyring=self._keyring)
            size = sum([header.size for header, _ in joined])
            if size < _LARGE_BYTES_MIN:
                segment.append(joined)
            else:
                self._append_large(segment, joined, size)
            with self.lock:
                segment.extend(joined, segment.size + size)
                del self.batches[: len(taken)]
                # Records that came alone have another size as batches.
                written = min(sum([header.size for header, _ in taken]), self.tail_bytes) if self.has_tail else self.tail_bytes
                self.tail_bytes -= written
                self.spilled_bytes += written

    def _append_large(self, segment: Segment, batches: Sequence[BuiltInPlace], size: int) -> None:
        """Write batches of this total size after the last one of the segment: past the page cache, unless a reader follows the log."""
        if self._followed is None:
            self._followed = Followed()
        if self._followed.is_followed:
            segment.append(batches, start_sync=True)
        else:
            segment.append_direct(batches)
        self._followed.appended(size, batches[-1][0].next_offset)

    def _roll(self, base_offset: int) -> Segment:
        """Close the active segment and start the next one at `base_offset`."""
        if self.segments:
            closing = self.segments[-1]
            if closing.dirty:
                closing.sync()  # recovery searches the end of a log only in its last segment
            closing.cut_off()
            closing.load_index(self._keyring, self._damaged)
            closing.store_index()
        else:
            self._files.make_dir(log_directory(self.id))
        segment = Segment.create(self._files, self.id, base_offset)
        with self.lock:
            self.segments = [*self.segments, segment]
        return segment

    def start(self, segment: Segment) -> None:
        """Set the first segment. Requires `writing`."""
        assert not self.segments and not self.dropped
        with self.lock:
            self.segments = [segment]

    def roll(self) -> None:
        """Close the active segment. The new one preserves the next offset on disk, even if retention then removes all others."""
        with self.writing:
            if self.segments and self.segments[-1].size > HEADER_BYTES:
                self._roll(self.segments_end())

    def drop(self) -> int:
        """Discard everything after the log was deleted, and ignore later pushes. Returns the size of the tail in bytes."""
        with self.writing, self.lock:
            dropped, self.tail_bytes, self.batches, self.singles, self.segments = self.tail_bytes, 0, [], [], []
            self.dropped = True
            self.generation += 1
        return dropped

    def segments_end(self) -> int:
        """Return the offset after the last batch in segments."""
        with self.lock:
            return self.tail_offset

    # Called by readers.

    def read(self, offset: int, bytes_max: int, records_max: int, *, cached_only: bool = False) -> list[StoredBatch]:
        """Read as the engine contract defines. `bytes_max` counts keys and values."""
        if not self.first <= offset <= self.end:
            raise OffsetOutOfRange(wanted=offset, first=self.first, end=self.end)
        end, generation = self.end, self.generation
        if self._followed is not None:
            self._followed.read(offset)
        part = self._opened.part(self.id, generation, offset, bytes_max, records_max)
        if part is not None:
            return [part]
        taken = _Taken(offset, bytes_max, records_max, is_large=bytes_max > _KEPT_READ_BYTES_MAX)
        try:
            while not taken.full and taken.offset < end:
                opened = self._opened.find(self.id, generation, taken.offset)
                if opened is not None:
                    taken.take(opened, is_opened=True)
                else:
                    self._read_on(taken, cached_only)
        except (CorruptData, Unavailable):
            if not taken.batches:
                raise
        for batch in taken.fresh:
            if batch is taken.rest or (bytes_max <= _KEPT_READ_BYTES_MAX and batch.header.size >= _KEPT_BATCH_BYTES_MIN):
                self._opened.put(self.id, generation, batch)
        return taken.batches

    def _read_on(self, taken: _Taken, cached_only: bool) -> None:
        """Add batches from the tail or from the one segment that covers `taken.offset`. Skips missing offsets."""
        offset = taken.offset
        with self.lock:
            tail = self._tail_from(offset, taken.bytes_left)
            segments, generation = self.segments, self.generation
            spilled = self.tail_offset
        if tail:
            for built in tail:
                if not taken.take(StoredBatch.of_built(built, self._keyring)):
                    break
            return
        number = bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1
        stop = segments[number + 1].base_offset if number + 1 < len(segments) else spilled
        found = taken.onward()
        try:
            if number >= 0:
                found = self._read_segment(segments[number], stop, found, cached_only)
        except OSError as failure:
            if is_exhausted(failure):
                raise Unavailable(f"{segments[number].path}: cannot be read now: {failure.strerror or failure}; try again") from failure
            if generation == self.generation:
                raise CorruptData(f"{segments[number].path}: cannot be read: {failure.strerror or failure}") from failure
        if generation != self.generation:  # compaction or retention changed the segments: retry
            if offset < self.first and not taken.batches:
                raise OffsetOutOfRange(wanted=offset, first=self.first, end=self.end)
            taken.full = offset < self.first  # the next read reports it
            return
        if found.batches or found.full:
            taken.add(found)
            return
        if number >= 0 and not segments[number].covers_to:
            self._damaged(Damage(segments[number].path, segments[number].size, 0, f"offsets {offset} to {stop - 1} are missing"))
        taken.offset = max(stop, offset + 1)

    def _tail_from(self, offset: int, bytes_max: int) -> list[Built]:
        """Return batches of the tail from `offset` on, enough for `bytes_max`; none if `offset` is in a segment. Requires the lock."""
        if not self.has_tail or offset < self.tail_offset:
            return []
        if offset >= self.end - len(self.singles) // 2:
            self.settle()
        tail = self.batches
        start = stop = bisect_right(tail, offset, key=lambda item: item[0].base_offset) - 1
        size = 0
        while stop < len(tail) and size <= bytes_max:
            size += tail[stop][0].size
            stop += 1
        # The first batch may end before `offset` (a gap), so one more is always included.
        return tail[start : stop + 1]

    def _read_segment(self, segment: Segment, stop: int, taken: _Taken, cached_only: bool) -> _Taken:
        """Take batches of one segment from `taken.offset` on; none if it has none below `stop`."""
        offset = taken.offset
        hint = segment.hints.get(offset)
        if hint is None:
            if segment.index is None and cached_only:
                raise NotCached
            position = self._indexed_position(segment, offset, cached_only)
        else:
            position = hint
        size, want = segment.size, 0
        while position < size:
            if not cached_only and self._batch_bytes >= _ALONE_BYTES_MIN:
                batch = self._large_batch(segment, position, taken, stop)
                if batch is not None:
                    taken.take(batch)
                    position += 0 if taken.rest else batch.header.size
                if taken.full:
                    break
                if batch is not None:
                    continue
            want = want or max(taken.bytes_left + batch_format.HEADER_BYTES, self._batch_bytes, 4096)
            file, length = segment.file(), min(want, size - position)
            window = file.read_cached(position, length) if cached_only else file.read_at(position, length)
            consumed, want = self._take_window(segment, window, position, taken, stop)
            if want == _DAMAGED:
                if taken.batches:
                    break
                if cached_only:
                    raise NotCached
                return self._read_past_damage(segment, position, stop, taken, bool(hint))
            position += consumed
            if taken.full or want == 0:
                break
        if taken.batches:
            self._batch_bytes = taken.batches[-1].header.size
            if taken.rest is None:
                self._remember(segment, taken.offset, position)
        return taken

    def _large_batch(self, segment: Segment, position: int, taken: _Taken, stop: int) -> StoredBatch | None:
        """Return the batch at `position` if it is large and has records to take. It is read alone: a copy out of a window, and reading the
        beginning of the next batch twice, cost more than another system call. None also for a damaged batch, which the caller finds in a
        window, and for one that a large read leaves to the next one."""
        front = segment.file().read_at(position, batch_format.HEADER_BYTES)
        try:
            header = batch_format.parse_header(front, 0, segment.path)
            if header.size < _ALONE_BYTES_MIN or header.base_offset >= stop or header.next_offset <= taken.offset:
                return None
            if taken.leaves(header):
                taken.full = True
                return None
            return segment.read_batch(position, front, header, self._keyring)
        except CorruptData:
            return None

    def _indexed_position(self, segment: Segment, offset: int, cached_only: bool) -> int:
        """Return the position that the index gives, if the batch there matches. Otherwise the index is wrong and is rebuilt."""
        index = segment.load_index(self._keyring, self._damaged)
        position, base_offset = index.position_for_offset(offset)
        file = segment.file()
        head = (file.read_cached if cached_only else file.read_at)(position, batch_format.HEADER_BYTES)
        try:
            if not head or batch_format.parse_header(head, 0, segment.path).base_offset == base_offset:
                return position
        except CorruptData:
            pass
        if cached_only:
            raise NotCached
        return segment.rebuild_index(self._keyring, self._damaged).position_for_offset(offset)[0]

    def _take_window(self, segment: Segment, window: bytes | memoryview, position: int, taken: _Taken, stop: int) -> tuple[int, int]:
        """Return (bytes consumed, bytes wanted next). 0 wanted: the read is complete. `_DAMAGED`: there is no valid batch at `position`."""
        at = 0
        while len(window) - at >= batch_format.HEADER_BYTES:
            try:
                header = batch_format.parse_header(window, at, segment.path)
                if at + header.size > len(window):
                    if at + position + header.size <= segment.size:
                        return at, header.size
                    raise CorruptData(f"{segment.path}: a batch is truncated by the end of the file")
                if header.base_offset >= stop or header.next_offset <= taken.offset:
                    # A batch that is skipped because of its offsets must be verified: a flipped bit could hide all batches after it.
                    batch_format.check_crc(window, at, header, segment.path)
                    if header.base_offset >= stop:
                        return at, 0
                elif not taken.take(segment.parse(window, at, header, self._keyring)):
                    return (at if taken.rest else at + header.size), 0
            except CorruptData:
                return (at, batch_format.HEADER_BYTES) if at else (0, _DAMAGED)
            at += header.size
        if at == 0:  # fewer bytes than a header are left
            return 0, _DAMAGED
        return at, batch_format.HEADER_BYTES if at + position < segment.size else 0

    def _read_past_damage(self, segment: Segment, position: int, stop: int, taken: _Taken, hinted: bool) -> _Taken:
        """Read on after an invalid batch at `position`. A stale hint or index is dropped; damage is reported and skipped."""
        segment.hints.clear()
        if hinted:
            return self._read_segment(segment, stop, taken, False)
        index = segment.rebuild_index(self._keyring, self._damaged)
        for _, batch in segment.scan(index.position_for_offset(taken.offset)[0], segment.size, self._keyring, lambda damage: None):
            if batch.header.base_offset >= stop:
                break
            if batch.header.next_offset > taken.offset and not taken.take(batch):
                break
        return taken

    def _remember(self, segment: Segment, offset: int, position: int) -> None:
        if len(segment.hints) >= _HINTS_MAX:
            segment.hints.clear()
        segment.hints[offset] = position

    def locate(self, offset: int, stop: int) -> Located:
        """Return where batches from `offset` on lie in files. May read the disk."""
        if self._followed is not None:
            self._followed.read(offset)
        return locate(self, offset, stop, lambda segment: segment.load_index(self._keyring, self._damaged))

    def offset_for_time(self, timestamp: int) -> int:
        """Return the first offset at or after `timestamp`; `end` if there is none. May read the disk."""
        try:
            return self._offset_for_time(timestamp)
        except OSError as failure:
            if is_exhausted(failure):
                raise Unavailable(f"log {self.id} cannot be read now: {failure.strerror or failure}; try again") from failure
            raise CorruptData(f"log {self.id} cannot be read: {failure.strerror or failure}") from failure

    def _offset_for_time(self, timestamp: int) -> int:
        with self.lock:
            self.settle()
            segments, tail, end = self.segments, list(self.batches), self.end
        for segment in segments:
            position = segment.load_index(self._keyring, self._damaged).position_for_time(timestamp)
            if position is not None:
                for _, batch in segment.scan(position, segment.size, self._keyring, lambda damage: None):
                    if batch.header.max_timestamp >= timestamp:
                        return max(_first_at(batch, timestamp), self.first)
        for built in tail:
            if built[0].max_timestamp >= timestamp:
                return _first_at(StoredBatch.of_built(built, self._keyring), timestamp)
        return end


def _first_at(batch: StoredBatch, timestamp: int) -> int:
    return next(offset for offset, stamp in zip(batch.offsets(), batch.timestamps(), strict=True) if stamp >= timestamp)


class _Taken:
    """Collects batches from an offset on, up to a number of bytes, records or batches."""

    __slots__ = ("batches", "bytes_left", "fresh", "full", "is_large", "is_onward", "offset", "records_left", "rest")

    def __init__(self, offset: int, bytes_max: int, records_max: int, *, is_large: bool, is_onward: bool = False) -> None:
        self.offset = offset
        """Next offset to read."""
        self.bytes_left = bytes_max
        self.records_left = records_max
        self.batches: list[StoredBatch] = []
        self.fresh: list[StoredBatch] = []
        """Whole batches that the cache of opened batches did not have."""
        self.full = False
        self.rest: StoredBatch | None = None
        """Batch that was taken in part; `offset` lies in it."""
        self.is_large = is_large
        """Whether the read ends before a large batch that does not fit, instead of cutting it: the part of it that the next read returns
        would have to be kept meanwhile."""
        self.is_onward = is_onward
        """Whether earlier records were taken: then even the first one here has to fit."""

    def onward(self) -> _Taken:
        """Return a collection with the remaining limits, to be added with `add` or discarded."""
        is_onward = self.is_onward or bool(self.batches)
        return _Taken(self.offset, self.bytes_left, self.records_left, is_large=self.is_large, is_onward=is_onward)

    def leaves(self, header: BatchHeader) -> bool:
        """Return whether this batch is left to the next read. Its values have the size of its body without their offsets."""
        return self.is_large and (self.is_onward or bool(self.batches)) and header.raw_size - 4 * header.count > self.bytes_left

    def add(self, more: _Taken) -> None:
        self.batches += more.batches
        self.fresh += more.fresh
        self.offset, self.bytes_left, self.records_left = more.offset, more.bytes_left, more.records_left
        self.full, self.rest = more.full or len(self.batches) >= READ_BATCHES_MAX, more.rest

    def take(self, batch: StoredBatch, *, is_opened: bool = False) -> bool:
        """Take the records that fit. Returns False when a limit is reached. The first record is taken regardless of its size."""
        if not is_opened:
            self.fresh.append(batch)
        batch.open()
        below = batch.count_below(self.offset)
        count = len(batch) - below
        if not count:
            self.offset = max(self.offset, batch.next_offset)
            return True
        taken = batch if not below and count <= self.records_left else batch.window(below, below + min(count, max(self.records_left, 1)))
        size = taken.size_bytes
        if size > self.bytes_left or not self.records_left:
            fits = taken.fitting(self.bytes_left) if self.records_left else 0
            if not fits and (self.batches or self.is_onward):
                self.full, self.rest = True, batch
                return False
            taken = taken.window(0, max(fits, 1))
            size = taken.size_bytes
        self.batches.append(taken)
        self.bytes_left -= size
        self.records_left -= len(taken)
        self.offset = taken.next_offset
        self.rest = batch if len(taken) < count else None
        is_over = self.bytes_left <= 0 or self.records_left <= 0 or len(self.batches) >= READ_BATCHES_MAX
        self.full = self.rest is not None or is_over
        return not self.full
