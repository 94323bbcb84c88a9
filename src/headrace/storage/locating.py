"""Positions of stored batches in files, for readers on the same machine that read the files themselves.

A batch is located only if its columns can be used as they lie in the file: not compressed, not encrypted, without gaps between offsets,
and without expiries, because only the broker knows the time. Bodies are not read here, so nothing is verified: the reader compares the
checksum. It reads any other batch, and one that does not match, through the broker.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace.errors import CorruptData
from headrace.limits import LOCATED_BATCHES_MAX, LOCATED_BYTES_MAX
from headrace.located import BinaryColumn, FileBatch, Located
from headrace.storage import batch as batch_format
from headrace.storage.batch import BatchHeader

if TYPE_CHECKING:
    from headrace.storage.partition import Partition
    from headrace.storage.segment import Segment, SparseIndex

_NOT_PLAIN: Final = batch_format.COMPRESSED | batch_format.ENCRYPTED | batch_format.EXPIRIES | batch_format.OFFSETS
_UNCHECKED_BYTES: Final = 8
"""Bytes before those that the checksum of a batch covers."""
_U32 = struct.Struct("<I")


def locate(partition: Partition, offset: int, stop: int, index_of: Callable[[Segment], SparseIndex]) -> Located:
    """Locate batches with offsets in [offset, stop), from the first on, up to a limit. May read the disk."""
    options = partition.options
    if options.compact or options.compress or options.encrypt:
        return Located(stop)
    with partition.lock:
        segments, spilled = partition.segments, partition.tail_offset
    first = max(bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1, 0)
    walk = _Walk(index_of, offset, min(stop, spilled))
    try:
        for segment in segments[first:]:
            if segment.base_offset >= walk.stop or not walk.take(segment):
                break
    except (CorruptData, OSError):
        return Located(stop, walk.batches)  # a read through the broker reports it
    return Located(walk.offset if walk.is_full else stop, walk.batches)


class _Walk:
    """Reads the headers of the batches from an offset on."""

    def __init__(self, index_of: Callable[[Segment], SparseIndex], offset: int, stop: int) -> None:
        self._index_of = index_of
        self.offset, self.stop = offset, stop
        self.batches: list[FileBatch] = []
        self.is_full = False
        self._bytes_left, self._batches_left = LOCATED_BYTES_MAX, LOCATED_BATCHES_MAX

    def take(self, segment: Segment) -> bool:
        """Add the batches of a segment. Return False at a limit."""
        position, _ = self._index_of(segment).position_for_offset(self.offset)
        file, size = segment.file(), segment.size
        path = segment.files.absolute(segment.path)
        while path and position < size:
            header = batch_format.parse_header(file.read_at(position, batch_format.HEADER_BYTES), 0, segment.path)
            if header.base_offset >= self.stop:
                return False
            if header.next_offset > self.offset:
                if self._bytes_left <= 0 or not self._batches_left:
                    self.is_full = True
                    return False
                if not header.flags & _NOT_PLAIN:
                    self.batches.append(_file_batch(segment, path, position, header))
                self._bytes_left -= header.size
                self._batches_left -= 1
                self.offset = header.next_offset
            position += header.size
        return bool(path)


def _file_batch(segment: Segment, path: str, position: int, header: BatchHeader) -> FileBatch:
    file, body, flags = segment.file(), position + batch_format.HEADER_BYTES, header.flags

    sizes: dict[int, int] = {}
    """Size of the content of each binary column, by the position of its last offset."""

    def size_at(at: int) -> int:
        found = file.read_at(body + at, _U32.size)
        if len(found) < _U32.size:
            raise CorruptData(f"{segment.path}: a batch is truncated by the end of the file")
        (sizes[at],) = _U32.unpack(found)
        return sizes[at]

    if batch_format.HEADER_BYTES + header.raw_size > header.size:
        raise CorruptData(f"{segment.path}: the columns of the batch at offset {header.base_offset} exceed it")
    columns = batch_format.layout(header, size_at)
    shift = batch_format.HEADER_BYTES - _UNCHECKED_BYTES

    def start(flag: int) -> int | None:
        return shift + columns[flag][0] if flag in columns else None

    def binary(flag: int, validity: int) -> BinaryColumn:
        begin, end = columns[flag]
        return BinaryColumn(shift + begin, shift + end + -end % batch_format.ALIGN, sizes[end - _U32.size], start(validity))

    return FileBatch(
        path=path,
        position=position + _UNCHECKED_BYTES,
        size_bytes=header.size - _UNCHECKED_BYTES,
        checksum=header.crc,
        base_offset=header.base_offset,
        count=header.count,
        values=binary(0, batch_format.VALUE_NULLS),
        keys=binary(batch_format.KEYS, batch_format.KEY_NULLS) if flags & batch_format.KEYS else None,
        timestamps=start(batch_format.TIMESTAMPS),
        min_timestamp=header.min_timestamp,
        has_headers=bool(flags & batch_format.HEADERS),
    )
