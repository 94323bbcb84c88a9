"""Kafka record batches whose records have equal sizes: found and decoded a column at a time.

    +--------+------------+-----------+--------+------------+-----+--------------+-------+---------+
    | length | attributes | timestamp | offset | key length | key | value length | value | headers |
    | varint | 1 byte     | varint    | varint | varint     |     | varint       |       | varint  |
    +--------+------------+-----------+--------+------------+-----+--------------+-------+---------+

`length` counts what follows it, `headers` is a number of headers, timestamp and offset are relative to the batch, all varints are zigzag. A
varint grows with its number, so that the records of a batch have few sizes even where their keys and values have one. A *stretch* is a
sequence of records of one size. If the byte at some place of its first record is in all others too, at the same distance, one comparison
shows it, and so it is with the lengths of all of them. The offsets are compared with those of a batch without gaps.

The values stay in the batch until somebody reads them, and a reader that takes a part of them has only these cut out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final, overload

_RECORDS_MIN: Final = 16
_RECORDS_MAX: Final = 1 << 17
_STRETCH_MIN: Final = 16
"""Records of a stretch on average. Below it, parsing each record is not slower."""
_SHORT_MAX: Final = 4
_SHORT_PER_RECORDS: Final = 256
"""A batch may begin with some shorter stretches, one for so many records: the first timestamps soon need a longer varint."""
_BLOCK: Final = 128
_OFFSET_ENDS: Final = (1 << 6, 1 << 13, 1 << 20)
"""The first offsets that need a longer varint."""
_MORE: Final = 0x80


@dataclass(slots=True)
class _Stretch:
    start: int
    """Position of its first record."""
    count: int
    record_bytes: int
    key_start: int
    """Position of the key in a record."""
    value_start: int
    timestamp: int | None
    """Delta of all records; None if they differ."""


class EqualColumn(Sequence[bytes]):
    """Keys or values of one size, `size_bytes` above 0. A slice is a list."""

    __slots__ = ("_content", "_count", "_places", "size_bytes")

    def __init__(self, content: bytes, places: Sequence[tuple[int, int, int, int]], size_bytes: int) -> None:
        """`places` are count, position of the first record, size of a record and position of the item in it."""
        self._content, self._places, self.size_bytes = content, places, size_bytes
        self._count = sum(count for count, *_ in places)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])

    @overload
    def __getitem__(self, picked: int) -> bytes: ...
    @overload
    def __getitem__(self, picked: slice) -> list[bytes]: ...
    def __getitem__(self, picked: int | slice) -> bytes | list[bytes]:
        if not isinstance(picked, slice):
            index = range(self._count)[picked]
            return self._cut(index, index + 1)[0]
        start, stop, step = picked.indices(self._count)
        assert step == 1
        return self._cut(start, stop)

    def _cut(self, start: int, stop: int) -> list[bytes]:
        found: list[bytes] = []
        before = 0
        for count, first, record_bytes, at in self._places:
            begin, end = max(start - before, 0), min(stop - before, count)
            if begin < end:
                # Unpacking blocks is four times as fast as slicing.
                in_blocks = begin + (end - begin) // _BLOCK * _BLOCK
                whole = memoryview(self._content)[first + begin * record_bytes : first + in_blocks * record_bytes]
                found += chain.from_iterable(_block(at, self.size_bytes, record_bytes).iter_unpack(whole))
                rest = range(first + at + in_blocks * record_bytes, first + at + end * record_bytes, record_bytes)
                found += [self._content[place : place + self.size_bytes] for place in rest]
            before += count
        return found


@lru_cache(256)
def _block(at: int, size_bytes: int, record_bytes: int) -> struct.Struct:
    return struct.Struct(f"{at}x{size_bytes}s{record_bytes - at - size_bytes}x" * _BLOCK)


class EqualRecords:
    """Columns of a record batch whose records have keys of one size or none, values of one size, no headers, and dense offsets."""

    __slots__ = ("_stretches", "keys", "values")

    def __init__(self, content: bytes, stretches: Sequence[_Stretch], key_bytes: int, value_bytes: int) -> None:
        self._stretches = stretches
        places = [(each.count, each.start, each.record_bytes, each.value_start) for each in stretches]
        self.values = EqualColumn(content, places, value_bytes)
        places = [(each.count, each.start, each.record_bytes, each.key_start) for each in stretches]
        self.keys = EqualColumn(content, places, key_bytes) if key_bytes else None

    @property
    def record_bytes(self) -> int:
        """Size of key and value of a record."""
        return self.values.size_bytes + (0 if self.keys is None else self.keys.size_bytes)

    def timestamps(self, base: int) -> list[int] | None:
        """Return the timestamps, relative to that of the batch; None if they differ within a stretch."""
        found: list[int] = []
        for each in self._stretches:
            if each.timestamp is None:
                return None
            found += [base + each.timestamp] * each.count
        return found


def equal_records(content: bytes, start: int, count: int) -> EqualRecords | None:
    """Return the columns of `count` records from position `start` to the end of `content`; None if they are not of equal sizes."""
    if not _RECORDS_MIN <= count <= _RECORDS_MAX:
        return None
    stretches: list[_Stretch] = []
    short_max = min(_SHORT_MAX, count // _SHORT_PER_RECORDS)
    sizes: tuple[int, int] | None = None
    index, position = 0, start
    while index < count:
        if len(stretches) > short_max + index // _STRETCH_MIN:
            return None
        found = _stretch(content, position, index, count)
        if found is None or (sizes is not None and found[1] != sizes):
            return None
        stretch, sizes = found
        stretches.append(stretch)
        index += stretch.count
        position += stretch.count * stretch.record_bytes
    return None if sizes is None or position != len(content) else EqualRecords(content, stretches, *sizes)


def _stretch(content: bytes, start: int, index: int, count: int) -> tuple[_Stretch, tuple[int, int]] | None:
    """Return the stretch that begins at `start` with the record number `index` of `count`, and the sizes of its keys, 0 for none, and
    values. None if its first record has headers, an empty key, or a value that is empty or missing."""
    try:
        length, attributes_at = _varint(content, start)
        timestamp, offset_at = _varint(content, attributes_at + 1)
        _, key_length_at = _varint(content, offset_at)
        key_bytes, key_at = _varint(content, key_length_at)
        value_length_at = key_at + max(key_bytes, 0)
        value_bytes, value_at = _varint(content, value_length_at)
    except IndexError:
        return None
    end = attributes_at + length
    if key_bytes < -1 or key_bytes == 0 or value_bytes < 1 or value_at + value_bytes + 1 != end or end > len(content) or content[end - 1]:
        return None
    record_bytes, width = end - start, key_length_at - offset_at
    if width > len(_OFFSET_ENDS):
        return None
    rows = min(min(count, _OFFSET_ENDS[width - 1]) - index, (len(content) - start) // record_bytes)
    for places in (range(start, attributes_at), range(key_length_at, key_at), range(value_length_at, value_at), (end - 1,)):
        for place in places:
            rows = _equal(content, place, record_bytes, rows)
    for expected, place in zip(_offset_columns(width), range(offset_at, key_length_at), strict=True):
        if content[place : place + (rows - 1) * record_bytes + 1 : record_bytes] != expected[index : index + rows]:
            return None
    is_one_time = all(_equal(content, place, record_bytes, rows) == rows for place in range(attributes_at + 1, offset_at))
    if not is_one_time:
        rows = _varints(content, range(attributes_at + 1, offset_at), record_bytes, rows)
    stretch = _Stretch(start, rows, record_bytes, key_at - start, value_at - start, timestamp if is_one_time else None)
    return stretch, (max(key_bytes, 0), value_bytes)


def _equal(content: bytes, place: int, record_bytes: int, rows: int) -> int:
    """Return how many of the records, from the first on, have the byte of the first one at this place."""
    first, column = content[place : place + 1], content[place : place + (rows - 1) * record_bytes + 1 : record_bytes]
    return rows if column == first * rows else rows - len(column.lstrip(first))


def _varints(content: bytes, places: range, record_bytes: int, rows: int) -> int:
    """Return how many of the records, from the first on, have a varint at exactly these places."""
    for place in places:
        column = content[place : place + (rows - 1) * record_bytes + 1 : record_bytes]
        rows -= len(column.lstrip(_LAST_BYTES if place == places[-1] else _EARLIER_BYTES))
    return rows


_LAST_BYTES: Final = bytes(range(_MORE))
_EARLIER_BYTES: Final = bytes(range(_MORE, 256))


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a number and the position behind it. Raises `IndexError` for one that does not end."""
    number = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        number |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return number >> 1 ^ -(number & 1), at
    raise IndexError(at)


@lru_cache(len(_OFFSET_ENDS))
def _offset_columns(width: int) -> list[bytes]:
    """Return the bytes of the offsets 0, 1, 2 …, up to the last one that fits, as varints of `width` bytes: a column for each byte."""
    offsets = range(min(_OFFSET_ENDS[width - 1], _RECORDS_MAX))
    return [
        bytes([2 * offset >> 7 * number & 0x7F | (_MORE if number < width - 1 else 0) for offset in offsets]) for number in range(width)
    ]
