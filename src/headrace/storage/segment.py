"""Segment files and their sparse index.

    0       4       8         10      12      16            24          32         40
    +-------+-------+---------+-------+-------+-------------+-----------+----------+-----------+
    | magic | crc   | version | flags | log   | base offset | covers to | reserved | batches … |
    | 4 B   | u32   | u16     | u16   | u32   | u64         | u64       | u64      |           |
    +-------+-------+---------+-------+-------+-------------+-----------+----------+-----------+

The file `logs/<log>/<base offset>.seg` starts with this header; `crc` is the CRC-32C of bytes 8 to 40. Batches follow without gaps.
`covers to` is zero in a segment that was filled by appends. In a segment that compaction wrote it is the offset up to which the segment
replaces older ones: any other segment that starts below it is a left-over and is removed.

The index `<base offset>.idx` is derived data. It is written when a segment is closed, protected by its CRC, compared at each use with
the batch it points to, and rebuilt from the segment if it does not match.

    0       4       8         10      12      16            24             32           40              48
    +-------+-------+---------+-------+-------+-------------+--------------+------------+---------------+
    | magic | crc   | version | flags | log   | base offset | segment size | end offset | max timestamp |
    | 4 B   | u32   | u16     | u16   | u32   | u64         | u64          | u64        | i64           |
    +-------+-------+---------+-------+-------+-------------+--------------+------------+---------------+
    48: entries u64, then base offsets u64 × entries, positions u64 × entries, running max timestamps i64 × entries
"""

from __future__ import annotations

import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from google_crc32c import value as crc32c

from headrace.errors import CorruptData
from headrace.records import NEVER
from headrace.storage import batch as batch_format
from headrace.storage.batch import BatchHeader, BuiltInPlace, StoredBatch
from headrace.storage.crypt import Keyring
from headrace.storage.files import File, Files
from headrace.storage.journal import Damage, SyncFailed

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

MAGIC: Final = b"HRS\x01"
INDEX_MAGIC: Final = b"HRI\x01"
VERSION: Final = 1
HEADER_BYTES: Final = 40
LOGS: Final = "logs"
SUFFIX: Final = ".seg"
INDEX_SUFFIX: Final = ".idx"
TEMPORARY_SUFFIX: Final = ".tmp"
INDEX_INTERVAL_BYTES: Final = 64 * 1024
_SCAN_BYTES: Final = 1024 * 1024
_START_SYNC_BYTES: Final = 1024 * 1024
"""In chunks of this size, write + fdatasync of 8 MiB takes 0.7 of the time that it takes at once."""
_NO_TIME: Final = -(1 << 63)

_HEADER = struct.Struct("<4sIHHIQQQ")
assert _HEADER.size == HEADER_BYTES, "the drawing says 40"
_INDEX_HEADER = struct.Struct("<4sIHHIQQQqQ")
assert _INDEX_HEADER.size == 56, "the drawing says 48 and a count"
_CRC = struct.Struct("<I")

Damaged = Callable[[Damage], None]


def log_directory(log: int) -> str:
    return f"{LOGS}/{log:08d}"


def remove_logs(files: Files, logs: Sequence[int]) -> None:
    """Remove all files of deleted logs. The removal is durable when this returns: the manifest will not list the logs much longer."""
    there = {f"{LOGS}/{name}" for name in files.list(LOGS)}
    directories = [directory for log in logs if (directory := log_directory(log)) in there]
    for directory in directories:
        for name in files.list(directory):
            files.remove(f"{directory}/{name}")
        files.remove_dir(directory)
    if directories:
        files.sync_dir(LOGS)


def segment_path(log: int, base_offset: int) -> str:
    return f"{log_directory(log)}/{base_offset:020d}{SUFFIX}"


def index_path(log: int, base_offset: int) -> str:
    return f"{log_directory(log)}/{base_offset:020d}{INDEX_SUFFIX}"


def segment_base(name: str) -> int | None:
    """Return the base offset in a file name; None if it is not a segment."""
    stem = name.removesuffix(SUFFIX)
    return int(stem) if stem != name and len(stem) == 20 and stem.isascii() and stem.isdigit() else None


def encode_segment_header(log: int, base_offset: int, covers_to: int = 0) -> bytes:
    header = _HEADER.pack(MAGIC, 0, VERSION, 0, log, base_offset, covers_to, 0)
    return MAGIC + _CRC.pack(crc32c(header[8:])) + header[8:]


def parse_segment_header(content: bytes, *, log: int, base_offset: int, where: str) -> int:
    """Return `covers to` of a header after checking it against the file name."""
    if len(content) < HEADER_BYTES:
        raise CorruptData(f"{where}: truncated inside the segment header")
    magic, crc, version, _flags, found_log, found_base, covers_to, _reserved = _HEADER.unpack_from(content)
    if magic != MAGIC or crc != crc32c(content[8:HEADER_BYTES]):
        raise CorruptData(f"{where}: the segment header is damaged")
    if version != VERSION:
        raise CorruptData(f"{where}: segment version {version} is not supported by this release")
    if (found_log, found_base) != (log, base_offset):
        raise CorruptData(f"{where}: segment header: expected log {log}, offset {base_offset}, got log {found_log}, offset {found_base}")
    return int(covers_to)


class SparseIndex:
    """Start positions for offsets and times: one entry per 64 KiB of batches."""

    __slots__ = ("_last_position", "end_offset", "max_timestamp", "offsets", "positions", "times")

    def __init__(self, base_offset: int) -> None:
        self.offsets = array("Q")
        self.positions = array("Q")
        self.times = array("q")
        """Running maximum of timestamps up to the end of each entry's range; ascending, so it can be bisected."""
        self.end_offset = base_offset
        self.max_timestamp = _NO_TIME
        self._last_position = -INDEX_INTERVAL_BYTES

    def add(self, header: BatchHeader, position: int) -> None:
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
        if position - self._last_position >= INDEX_INTERVAL_BYTES:
            # Readers bisect offsets and times without a lock, so the values that they then look up must be appended first.
            self.positions.append(position)
            self.times.append(self.max_timestamp)
            self.offsets.append(header.base_offset)
            self._last_position = position
        self.times[-1] = self.max_timestamp
        self.end_offset = header.next_offset

    def position_for_offset(self, offset: int) -> tuple[int, int]:
        """Return (the position to start at for `offset`, the base offset of the batch expected there)."""
        entry = max(bisect_right(self.offsets, offset) - 1, 0)
        return (self.positions[entry], self.offsets[entry]) if self.offsets else (HEADER_BYTES, offset)

    def position_for_time(self, timestamp: int) -> int | None:
        """Return the position from which to search the first record at or after `timestamp`; None if there is none."""
        entry = bisect_left(self.times, timestamp)
        return self.positions[entry] if entry < len(self.positions) else None

    def encode(self, *, log: int, base_offset: int, segment_size: int) -> bytes:
        header = _INDEX_HEADER.pack(
            INDEX_MAGIC, 0, VERSION, 0, log, base_offset, segment_size, self.end_offset, self.max_timestamp, len(self.offsets)
        )
        tail = b"".join((header[8:], self.offsets.tobytes(), self.positions.tobytes(), self.times.tobytes()))
        return b"".join((INDEX_MAGIC, _CRC.pack(crc32c(tail)), tail))

    @classmethod
    def decode(cls, content: bytes, *, log: int, base_offset: int, segment_size: int) -> SparseIndex | None:
        """Decode an index; None if it is damaged or belongs to another segment or size."""
        if len(content) < _INDEX_HEADER.size:
            return None
        magic, crc, version, _, found_log, found_base, found_size, end, high, count = _INDEX_HEADER.unpack_from(content)
        size = _INDEX_HEADER.size
        if magic != INDEX_MAGIC or version != VERSION or len(content) != size + 24 * count or crc != crc32c(content[8:]):
            return None
        if (found_log, found_base, found_size) != (log, base_offset, segment_size):
            return None
        index = cls(base_offset)
        index.offsets.frombytes(content[size : size + 8 * count])
        index.positions.frombytes(content[size + 8 * count : size + 16 * count])
        index.times.frombytes(content[size + 16 * count :])
        index.end_offset, index.max_timestamp = end, high
        index._last_position = index.positions[-1] if count else -INDEX_INTERVAL_BYTES
        return index


class Segment:
    """One segment file. `size` and `index` grow with appends. Readers ignore bytes beyond `size`."""

    __slots__ = (
        "_expiry",
        "_file",
        "_growing",
        "base_offset",
        "changes",
        "covers_to",
        "dirty",
        "files",
        "hints",
        "index",
        "log",
        "path",
        "size",
    )

    def __init__(self, files: Files, log: int, base_offset: int, *, size: int, covers_to: int = 0) -> None:
        self.files = files
        self.log = log
        self.base_offset = base_offset
        self.path = segment_path(log, base_offset)
        self.covers_to = covers_to
        self.size = size
        self.index: SparseIndex | None = None
        """None until first used."""
        self.dirty = False
        """Whether unsynced data exists. Cleared only after the sync has returned."""
        self.changes = 0
        """Number of writes and truncations. A sync covers those before its start."""
        self.hints: dict[int, int] = {}
        """Positions where recent reads ended, by offset. Verified like the index."""
        self._file: File | None = None
        self._expiry = HEADER_BYTES, NEVER
        """Result of `expires_at`, and the segment size it is valid for."""
        self._growing = threading.Lock()
        """Held while `size` and `index` change together."""

    @classmethod
    def create(
        cls, files: Files, log: int, base_offset: int, *, name: str | None = None, covers_to: int = 0, durable: bool = True
    ) -> Segment:
        """Create an empty segment. Its name is durable when this returns, unless the caller syncs the directory (`durable=False`). Its
        header is durable after the next `sync`."""
        path = segment_path(log, base_offset) if name is None else name
        files.remove(path)
        segment = cls(files, log, base_offset, size=HEADER_BYTES, covers_to=covers_to)
        segment._file = files.open(path, create=True)
        try:
            segment._file.write_at(0, [encode_segment_header(log, base_offset, covers_to)])
            if durable:
                files.sync_dir(log_directory(log))
        except BaseException:
            files.remove(path)  # otherwise it would overlap the previous segment, which continues
            raise
        segment.index = SparseIndex(base_offset)
        segment.dirty = True
        return segment

    def file(self) -> File:
        file = self._file
        if file is None:
            file = self._file = self.files.open(self.path)
        return file

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._file is not None

    def release(self) -> None:
        """Drop the file. It is closed when its last reader is done."""
        self._file = None

    def append(self, batches: Sequence[BuiltInPlace], *, start_sync: bool = False) -> int:
        """Write batches after the last one. Returns the new size, which the caller then publishes with `extend`.

        `start_sync`: the disk writes the first batches while the others are copied. A later sync has less to do.
        """
        file = self.file()
        self._change()
        position, waiting_bytes = self.size, 0
        parts: list[SizedBuffer] = []
        for header, more in batches:
            parts += more
            waiting_bytes += header.size
            if start_sync and waiting_bytes >= _START_SYNC_BYTES:
                file.write_at(position, parts)
                file.start_sync(position, waiting_bytes)
                position, waiting_bytes, parts = position + waiting_bytes, 0, []
        if parts:
            file.write_at(position, parts)
        return position + waiting_bytes

    def append_direct(self, batches: Sequence[BuiltInPlace]) -> int:
        """Do the same past the page cache, where that is possible."""
        self._change()
        if not self.file().write_direct(self.size, [part for _, parts in batches for part in parts]):
            return self.append(batches, start_sync=True)
        return self.size + sum(header.size for header, _ in batches)

    def extend(self, batches: Sequence[BuiltInPlace], size: int) -> None:
        with self._growing:
            position = self.size
            if self.index is not None:
                for header, _ in batches:
                    self.index.add(header, position)
                    position += header.size
            self.size = size

    def _change(self) -> None:
        """Record that the file changes. This comes first, so that no other thread closes the file before the change is synced."""
        self.changes += 1
        self.dirty = True

    def cut_off(self) -> None:
        """Truncate the bytes after the last batch. A crash may leave some that the batches written since do not cover."""
        file = self.file()
        if file.size() > self.size:
            self._change()
            file.truncate(self.size)

    def sync(self) -> None:
        """Sync the file. Raises `SyncFailed`, after which the store must not write, or `OSError` if the file cannot be opened."""
        file = self.file()
        try:
            file.sync()
        except OSError as failure:
            raise SyncFailed(str(failure)) from failure
        self.dirty = False

    # Reading.

    def expires_at(self, keyring: Keyring | None, damaged: Damaged) -> int:
        """Return when the last record expires; `NEVER` if a record does not expire. Each record is read at most once."""
        (looked_to, latest), size = self._expiry, self.size
        if latest == NEVER and looked_to > HEADER_BYTES:
            return NEVER
        for position, batch in self.scan(looked_to, size, keyring, damaged):
            expiries = batch.expiries()
            if expiries is None or NEVER in expiries:
                self._expiry = position + batch.header.size, NEVER
                return NEVER
            latest = max(latest, *expiries)
        self._expiry = size, latest
        return latest

    def load_index(self, keyring: Keyring | None, damaged: Damaged) -> SparseIndex:
        """Return the index, read from its file if that is valid, otherwise rebuilt."""
        return self.index or self._install(self._stored_index, keyring, damaged)

    def rebuild_index(self, keyring: Keyring | None, damaged: Damaged) -> SparseIndex:
        """Rebuild the index after it was found wrong."""
        self.index = None
        return self._install(lambda size: None, keyring, damaged)

    def _install(self, stored: Callable[[int], SparseIndex | None], keyring: Keyring | None, damaged: Damaged) -> SparseIndex:
        """Install an index that covers the whole segment, including concurrent appends."""
        covered = self.size
        index = stored(covered)
        if index is None:
            index, covered = SparseIndex(self.base_offset), HEADER_BYTES
        while True:
            with self._growing:
                if self.index is not None or covered == self.size:
                    self.index = self.index or index
                    return self.index
                stop = self.size
            for position, batch in self.scan(covered, stop, keyring, damaged):
                index.add(batch.header, position)
            covered = stop

    def _stored_index(self, size: int) -> SparseIndex | None:
        try:
            file = self.files.open_readonly(index_path(self.log, self.base_offset))
        except FileNotFoundError:
            return None
        try:
            return SparseIndex.decode(file.read_at(0, file.size()), log=self.log, base_offset=self.base_offset, segment_size=size)
        finally:
            file.close()

    def store_index(self) -> None:
        """Write the index file. It needs no sync, because a damaged one is rebuilt."""
        if self.index is None:
            return
        path = index_path(self.log, self.base_offset)
        self.files.remove(path)
        file = self.files.open(path, create=True)
        file.write_at(0, [self.index.encode(log=self.log, base_offset=self.base_offset, segment_size=self.size)])
        file.close()

    def scan(self, position: int, stop: int, keyring: Keyring | None, damaged: Damaged) -> Iterator[tuple[int, StoredBatch]]:
        """Yield all intact batches in [position, stop) with their positions. Damage between them is reported and skipped."""
        hole = -1
        window, window_at = b"", position
        while position < stop:
            if position - window_at + batch_format.HEADER_BYTES > len(window):
                window, window_at = self._window(position, stop, _SCAN_BYTES), position
            try:
                header = batch_format.parse_header(window, position - window_at, self.path)
                if header.size > stop - position:
                    raise CorruptData(f"{self.path}: a batch of {header.size} bytes is truncated by the end of the file")
                if position - window_at + header.size > len(window):
                    window, window_at = self._window(position, stop, max(_SCAN_BYTES, header.size)), position
                batch = self.parse(window, position - window_at, header, keyring)
            except CorruptData:
                hole = position if hole < 0 else hole
                position, window, window_at = self._next_magic(position, stop, window, window_at)
                continue
            if hole >= 0:
                damaged(Damage(self.path, hole, position - hole, f"unreadable before offset {header.base_offset}"))
                hole = -1
            yield position, batch
            position += header.size
        if hole >= 0:
            damaged(Damage(self.path, hole, stop - hole, "unreadable up to the end"))

    def _window(self, position: int, stop: int, size: int) -> bytes:
        return self.file().read_at(position, min(size, stop - position))

    def _next_magic(self, position: int, stop: int, window: bytes, window_at: int) -> tuple[int, bytes, int]:
        """Return the next position where a batch may start."""
        position += batch_format.ALIGN
        while position < stop:
            if not window_at <= position < window_at + len(window) - 4:
                window, window_at = self._window(position, stop, _SCAN_BYTES), position
                if len(window) < batch_format.HEADER_BYTES:
                    break
            found = window.find(batch_format.MAGIC, position - window_at)
            if found < 0:
                position = window_at + len(window) - 3
                position += -(position - HEADER_BYTES) % batch_format.ALIGN
            elif (window_at + found - HEADER_BYTES) % batch_format.ALIGN:
                position = window_at + found + 1
            else:
                return window_at + found, window, window_at
        return stop, window, window_at

    def parse(self, window: bytes | memoryview, at: int, header: BatchHeader, keyring: Keyring | None) -> StoredBatch:
        """Return the verified batch at `at`. A batch of another log is damage, even with a valid checksum."""
        return self._own(StoredBatch.parse(window, at, header, where=self.path, keyring=keyring))

    def read_batch(self, position: int, front: bytes, header: BatchHeader, keyring: Keyring | None) -> StoredBatch:
        """Read and verify the batch at `position`, whose header has been read. Its bytes are not copied once they are in memory."""
        stored = self.file().read_at(position + len(front), header.size - len(front))
        return self._own(StoredBatch.of_parts(header, front, stored, where=self.path, keyring=keyring))

    def _own(self, batch: StoredBatch) -> StoredBatch:
        if batch.header.log != self.log:
            raise CorruptData(f"{self.path}: batch of log {batch.header.log}, expected log {self.log}")
        return batch
