"""Journal format and writer. The journal is synced before anything is acknowledged.

    0       4       8       12        14      16        24       32        36         40
    +-------+-------+-------+---------+-------+---------+--------+---------+------------+--------------+-----------+
    | magic | crc   | size  | version | flags | journal | number | batches | references | references … | batches … |
    | 4 B   | u32   | u32   | u16     | u16   | u64     | u64    | u32     | u32        | 48 B each    |           |
    +-------+-------+-------+---------+-------+---------+--------+---------+------------+--------------+-----------+
    reference:
    0     4     8              16         24     32            40           48
    +-----+-----+--------------+----------+------+-------------+------------+
    | log | crc | segment base | position | size | base offset | end offset |
    | u32 | u32 | u64          | u64      | u64  | u64         | u64        |
    +-----+-----+--------------+----------+------+-------------+------------+

A frame is the unit of atomicity. It holds the batches of all partitions that one flush writes, and is valid only as a whole.
`crc` is the CRC-32C of everything from byte 8 to `size`; `size` counts header, references and batches.
`number` counts frames over all journal files, `journal` is the number in the file's name.

A reference stands for batches that are too large to be written twice. They are in the segment `segment base` of the log, from `position`
on, and that segment was synced before the frame was written. So everything before their end is durable too: a reference is a checkpoint
of its log. Its `crc` is the CRC-32C of the headers of the batches, which contain the checksums of the rest.

A frame starts at a multiple of 4096, so that rewriting a torn frame never touches a sector of a synced one. Journal files are
preallocated. Once all their batches are in synced segments they are reused under a new name. Old frames in a reused file have a lower
journal number and mark the end of the file, as zeros do.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c

from headrace.errors import CorruptData
from headrace.limits import FRAME_BYTES_MAX, KIB, MIB
from headrace.storage.batch import BatchHeader, Built, StoredBatch
from headrace.storage.crypt import Keyring
from headrace.storage.files import DISK_FULL_ERRNOS, File, Files

MAGIC: Final = b"HRJ\x01"
VERSION: Final = 1
HEADER_BYTES: Final = 40
ALIGN: Final = 4096
DIRECTORY: Final = "journal"
SUFFIX: Final = ".hrj"

_HEADER = struct.Struct("<4sIIHHQQII")
assert _HEADER.size == HEADER_BYTES, "the drawing says 40"
_COVERED = struct.Struct("<IHHQQII")
assert _COVERED.size == HEADER_BYTES - 8, "the checksum covers the rest of the header"
_REFERENCE = struct.Struct("<IIQQQQQ")
assert _REFERENCE.size == 48, "the drawing says 48"
_CRC = struct.Struct("<I")
_JOIN_ABOVE: Final = 16
_JOIN_BELOW_BYTES: Final = 64 * KIB
"""From this many batches on, unless they are large, one copy of all is cheaper than a checksum call and a write vector entry for each."""
_WHOLE_BELOW_BYTES: Final = 16 * KIB
"""A smaller frame is written as one buffer: a copy costs less than a write vector."""
_SMALL_FILE_BYTES: Final = (1 * MIB, 64 * KIB, ALIGN)
"""Fallback sizes of a journal file on a full disk: deletes and commits need little space."""


def journal_path(journal: int) -> str:
    return f"{DIRECTORY}/{journal:010d}{SUFFIX}"


def journal_number(name: str) -> int | None:
    """Return the number in a file name; None if it is not a journal file."""
    stem = name.removesuffix(SUFFIX)
    return int(stem) if stem != name and len(stem) == 10 and stem.isascii() and stem.isdigit() else None


def aligned(position: int) -> int:
    return position + -position % ALIGN


@dataclass(frozen=True, slots=True)
class Reference:
    """Batches of one log that are in a segment instead of the frame."""

    log: int
    crc: int
    segment_base: int
    position: int
    size: int
    base_offset: int
    end_offset: int

    @property
    def stop(self) -> int:
        """Position after the last batch."""
        return self.position + self.size

    def encode(self) -> bytes:
        return _REFERENCE.pack(self.log, self.crc, self.segment_base, self.position, self.size, self.base_offset, self.end_offset)


def headers_crc(headers: Iterable[BatchHeader]) -> int:
    """Return the checksum of a reference to batches with these headers."""
    crc = 0
    for header in headers:
        crc = crc32c_extend(crc, header.encode())
    return crc


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame read from a journal file."""

    journal: int
    number: int
    position: int
    batches: list[StoredBatch]
    size: int
    references: list[Reference] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Damage:
    """An unreadable range of a file, followed by intact data."""

    path: str
    position: int
    size: int
    what: str

    def __str__(self) -> str:
        return f"{self.path} at byte {self.position} ({self.size} bytes): {self.what}"


@dataclass(frozen=True, slots=True)
class JournalStart:
    """Start position of the journal after recovery: numbers above all used ones, and old files to reuse."""

    journal: int
    frame: int
    spares: list[int]


class SyncFailed(Exception):
    """fdatasync failed. The content of the disk is unknown, and a second call would not report the failure again."""


class Journal:
    """Journal writer. Only the writer thread appends; the maintenance thread recycles files, and syncs frames written without `durable`."""

    def __init__(self, files: Files, file_bytes: int, start: JournalStart) -> None:
        self._files = files
        self._file_bytes = file_bytes
        self._file: File | None = None
        """None if the disk was full at the start, until an append can create a file."""
        self._capacity = 0
        """Size of `_file`: smaller than `_file_bytes` if the disk was full, larger for a large frame."""
        self._position = 0
        self._written = self._synced = 0
        """Frames written since the start, and how many of them are durable."""
        self._failed = ""
        """Reason of a failed sync. A second sync must not be tried, because it may report success."""
        self._syncing = threading.Lock()
        self._next_frame = start.frame
        self._spares = list(start.spares)
        self._lock = threading.Lock()
        """Guards `_spares`: the maintenance thread adds files, the writer takes them."""
        self.current = start.journal
        """Number of the file that is being written."""

    @property
    def next_frame(self) -> int:
        return self._next_frame

    def start(self) -> None:
        """Create the first file. Its name is durable when this returns, so its number was never used before.

        On a full disk there may be no file afterwards. Existing records can then be read and deleted, and each append tries again.
        """
        self._files.make_dir(DIRECTORY)
        self._spares = [number for number in self._spares if file_size(self._files, journal_path(number)) == self._file_bytes]
        try:
            self._open(self.current, 0)
        except OSError as failure:
            if failure.errno not in DISK_FULL_ERRNOS:
                raise

    def _open(self, journal: int, frame_bytes: int) -> None:
        """Continue in a new file with room for the frame. A failure leaves the journal unchanged and may be retried."""
        with self._lock:
            if self._spares and frame_bytes <= self._file_bytes:
                file, capacity = self._reuse(journal), self._file_bytes
            else:
                file, capacity = self._create(journal, frame_bytes)
        self._file, self._capacity, self._position, self.current = file, capacity, 0, journal

    def _reuse(self, journal: int) -> File:
        spare = self._spares[-1]
        self._files.rename(journal_path(spare), journal_path(journal))
        self._spares.pop()
        try:
            file = self._files.open(journal_path(journal))
            try:
                self._files.sync_dir(DIRECTORY)
            except BaseException:
                file.close()
                raise
        except BaseException:
            # The next attempt renames it again, so that the directory sync has a change to write.
            with contextlib.suppress(OSError):
                self._files.rename(journal_path(journal), journal_path(spare))
                self._spares.append(spare)
            raise
        return file

    def _create(self, journal: int, frame_bytes: int) -> tuple[File, int]:
        path = journal_path(journal)
        self._files.remove(path)  # a failed attempt may have left it; it has no frames
        file = self._files.open(path, create=True)
        try:
            capacity = self._allocate(file, frame_bytes)
            self._files.sync_dir(DIRECTORY)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                self._files.remove(path)
            raise
        return file, capacity

    def _allocate(self, file: File, frame_bytes: int) -> int:
        """Reserve the usual size or, on a full disk, a smaller one. Returns the size."""
        wanted = (self._file_bytes, *(size for size in _SMALL_FILE_BYTES if size < self._file_bytes))
        *sizes, least = dict.fromkeys(max(size, aligned(frame_bytes)) for size in wanted)
        for size in sizes:
            try:
                file.allocate(size)
            except OSError as failure:
                if failure.errno not in DISK_FULL_ERRNOS:
                    raise
                file.truncate(0)  # free what was reserved
            else:
                return size
        file.allocate(least)
        return least

    def append(self, batches: list[Built], references: Sequence[Reference] = (), encoded: tuple[int, bytes] = (0, b"")) -> None:
        """Write one frame; `sync` makes it durable. A failed write leaves no valid frame and may be retried.

        `encoded`: number and bytes of further batches, end to end. They come first.
        """
        number, front_batches = encoded
        size = HEADER_BYTES + _REFERENCE.size * len(references) + len(front_batches)
        for built in batches:
            size += built[0].size
        assert size <= FRAME_BYTES_MAX
        if self._file is None:
            self._open(self.current, size)
        elif self._position + size > self._capacity:
            self.sync()  # frames of the next file must not be durable before those of this one
            self._open(self.current + 1, size)
        parts = [_COVERED.pack(size, VERSION, 0, self.current, self._next_frame, number + len(batches), len(references))]
        parts += [reference.encode() for reference in references]
        if number:
            parts.append(front_batches)
        for built in batches:
            parts += built[1]
        if size < _WHOLE_BELOW_BYTES or (len(batches) > _JOIN_ABOVE and size < _JOIN_BELOW_BYTES * len(batches)):
            parts = [b"".join(parts)]
        crc = crc32c(parts[0])
        for part in parts[1:]:
            crc = crc32c_extend(crc, part)
        front = MAGIC + _CRC.pack(crc)
        assert self._file is not None
        self._file.write_at(self._position, [front + parts[0]] if size < _WHOLE_BELOW_BYTES else [front, *parts])
        self._position = aligned(self._position + size)
        self._next_frame += 1
        self._written += 1

    def sync(self) -> None:
        """Make all frames written so far durable. Raises `SyncFailed`, after which the journal must not be used again.

        The writer and the maintenance thread call this. Each waits for a sync of the other, and returns if that covered its own frames.
        """
        with self._syncing:
            if self._failed:
                raise SyncFailed(self._failed)
            written = self._written
            if self._synced == written:
                return
            assert self._file is not None
            try:
                self._file.sync()
            except OSError as failure:
                self._failed = str(failure)
                raise SyncFailed(self._failed) from failure
            self._synced = written

    def recycle(self, below: int, keep: int) -> None:
        """Keep up to `keep` of the files numbered below `below` for reuse and remove the rest. Their batches are in synced segments."""
        with self._lock:
            numbers = [number for name in self._files.list(DIRECTORY) if (number := journal_number(name)) is not None]
            for number in numbers:
                if number >= below or number in self._spares:
                    continue
                if len(self._spares) < keep and file_size(self._files, journal_path(number)) == self._file_bytes:
                    self._spares.insert(0, number)
                else:
                    self._files.remove(journal_path(number))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def file_size(files: Files, path: str) -> int:
    file = files.open_readonly(path)
    try:
        return file.size()
    finally:
        file.close()


def sync_file(files: Files, path: str) -> None:
    file = files.open_readonly(path)
    try:
        file.sync()
    finally:
        file.close()


def _frame_at(content: bytes, position: int, journal: int, number_min: int, path: str, keyring: Keyring | None) -> Frame | None:
    """Return the intact frame of this journal at `position`, or None. Frame numbers ascend, so a lower one is a stale copy."""
    if len(content) - position < HEADER_BYTES:
        return None
    magic, crc, size, version, flags, number_of_journal, number, count, references = _HEADER.unpack_from(content, position)
    if magic != MAGIC or number_of_journal != journal or number < number_min or version != VERSION or flags:
        return None
    if not HEADER_BYTES + _REFERENCE.size * references <= size <= min(FRAME_BYTES_MAX, len(content) - position):
        return None
    if crc32c(content[position + 8 : position + size]) != crc:
        return None
    batches = []
    first = position + HEADER_BYTES
    at = first + _REFERENCE.size * references
    for _ in range(count):
        batch = StoredBatch.parse(content, at, where=f"{path} at byte {at}", keyring=keyring)
        batches.append(batch)
        at += batch.header.size
    if at != position + size:
        raise CorruptData(f"{path} at byte {position}: a frame with a valid checksum has {position + size - at} excess bytes")
    entries = content[first : first + _REFERENCE.size * references]
    return Frame(journal, number, position, batches, size, [Reference(*entry) for entry in _REFERENCE.iter_unpack(entries)])


def read_journal(files: Files, journal: int, keyring: Keyring | None, damaged: Callable[[Damage], None]) -> Iterator[Frame]:
    """Yield all intact frames in order. The torn tail after the last one is ignored. Unreadable bytes between two intact frames were
    acknowledged once: they are reported to `damaged` and skipped."""
    path = journal_path(journal)
    file = files.open_readonly(path)
    try:
        content = file.read_at(0, file.size())
    finally:
        file.close()
    position = number_min = 0
    while position < len(content):
        frame = _frame_at(content, position, journal, number_min, path, keyring)
        if frame is None:
            found = _next_frame(content, position, journal, number_min, path, keyring)
            if found is None:
                return
            damaged(Damage(path, position, found.position - position, f"unreadable before frame {found.number}"))
            frame = found
        yield frame
        position, number_min = aligned(frame.position + frame.size), frame.number + 1


def _next_frame(content: bytes, position: int, journal: int, number_min: int, path: str, keyring: Keyring | None) -> Frame | None:
    while (position := content.find(MAGIC, position + 1)) >= 0:
        if position % ALIGN == 0 and (frame := _frame_at(content, position, journal, number_min, path, keyring)) is not None:
            return frame
    return None
