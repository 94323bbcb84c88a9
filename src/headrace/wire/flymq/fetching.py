"""CONSUME and FETCH, which are encoded and decoded with few calls because clients send them one by one.

FETCH replies are columns, in two layouts that a decoder cannot tell apart.

    specification    count u32, count × (key b32, value b32, offset u64), next offset u64
    original         count u32, next offset u64, count × (offset u64, key b32, value b32)

Without records the two have the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, Generic, TypeVar

from headrace.columns import equal_rows, equal_size
from headrace.errors import WireError
from headrace.wire.flymq.fields import B32, U32, U64, Field, Layout
from headrace.wire.flymq.messages import Consumed, Fetched
from headrace.wire.flymq.reader import Reader

M = TypeVar("M")

FRONT_BYTES: Final = 12
"""Count and next offset, in any layout."""
RECORD_OVERHEAD_BYTES: Final = 16
"""Bytes that a record adds to its key and value, in both layouts."""

_ROW = struct.Struct(">QII")
_LENGTH = struct.Struct(">I")
_OFFSET_KEY = struct.Struct(">QI")
_LAST = struct.Struct(">QQ")
_NEXT = struct.Struct(">Q")
assert U32.write(0) + U64.write(0) == bytes(FRONT_BYTES) and _ROW.size == RECORD_OVERHEAD_BYTES

_PAGE_ROWS_MAX: Final = 16
_PAGE_VALUE_BYTES_MAX: Final = 1_024
"""Largest page that is encoded in one call, if its records have equal sizes."""
_STRETCH_MIN: Final = 16
"""Minimum number of equal rows for the fast path."""


class PlaceLayout(Generic[M]):
    """A request that begins with topic, partition, offset and further numbers. If something else follows, or the payload is too short,
    its fields are decoded one by one."""

    def __init__(self, message: type[M], letters: str, /, **fields: Field[Any]) -> None:
        """`letters` are the `struct` letters of the fields after the topic, up to the first one that may be missing."""
        self.message = message
        self._build: Callable[..., M] = message
        self._numbers = struct.Struct(">" + letters)
        self._fields = Layout(message, **fields)
        self.write = self._fields.write

    def read(self, reader: Reader, /) -> M:
        payload, at, end = reader.payload, reader.at + 2, reader.end
        if end >= at:
            stop = at + (payload[at - 2] << 8) + payload[at - 1]
            if stop + self._numbers.size == end:
                try:
                    topic = payload[at:stop].decode()
                except UnicodeDecodeError:
                    return self._fields.read(reader)
                reader.at = end
                return self._build(topic, *self._numbers.unpack_from(payload, stop))
        return self._fields.read(reader)


class ConsumedLayout:
    """key b32, value b32"""

    def write(self, value: Consumed, /) -> bytes:
        return b"".join((_LENGTH.pack(len(value.key)), value.key, _LENGTH.pack(len(value.value)), value.value))

    def read(self, reader: Reader, /) -> Consumed:
        return Consumed(B32.read(reader), B32.read(reader))


class SdkLayout:
    """The original's layout: the offset comes before its record."""

    def write(self, value: Fetched, /) -> bytes:
        front = U32.write(len(value.offsets)) + U64.write(value.next_offset)
        if value.keys is None and (size := equal_size(value.values)) is not None:
            return front + equal_rows(value.values, size, bytes(12) + _LENGTH.pack(size), numbers=value.offsets)
        return front + _rows(value.offsets, value)

    def read(self, reader: Reader, /) -> Fetched:
        count, next_offset = U32.read(reader), U64.read(reader)
        return _read_rows(reader, count, next_offset)


class SpecLayout:
    """The specification's layout: the offset comes after its record.

    Shifted by one offset, the rows are those of the original (offset i−1, key i, value i), so one routine serves both: a zero is the
    offset before the first row and is removed, and the last offset is appended.
    """

    def write(self, value: Fetched, /) -> bytes:
        count = len(value.offsets)
        if not count:
            return U32.write(0) + U64.write(value.next_offset)
        if count <= _PAGE_ROWS_MAX and value.keys is None and (page := _equal_page(value, count)) is not None:
            return page
        if value.keys is None and (size := equal_size(value.values)) is not None:
            head = bytes(4) + _LENGTH.pack(size)
            rows = equal_rows(value.values, size, head, bytes(8), numbers=value.offsets, numbers_at=len(head) + size)
            return b"".join((_LENGTH.pack(count), rows, _NEXT.pack(value.next_offset)))
        shifted = [0, *value.offsets[:-1]]
        return b"".join((_LENGTH.pack(count), memoryview(_rows(shifted, value))[8:], _LAST.pack(value.offsets[-1], value.next_offset)))

    def read(self, reader: Reader, /) -> Fetched:
        count = U32.read(reader)
        if not count:
            return Fetched([], [], U64.read(reader))
        padded = Reader(bytes(8) + reader.payload[reader.at : reader.end])
        rows = _read_rows(padded, count, 0)
        last, next_offset = U64.read(padded), U64.read(padded)
        return Fetched([*rows.offsets[1:], last], rows.values, next_offset, rows.keys)


def _equal_page(fetched: Fetched, count: int) -> bytes | None:
    """Encode a few records without keys in one call if all values have one size."""
    values, size = fetched.values, fetched.value_size
    if size is None:
        size = len(values[0])
        if [*map(len, values)].count(size) != count:
            return None
    if size > _PAGE_VALUE_BYTES_MAX:
        return None
    cells: list[Any] = [size] * (3 * count)  # the empty key and the value have their lengths in one number
    cells[1::3] = values
    cells[2::3] = fetched.offsets
    return _page(count, size).pack(count, *cells, fetched.next_offset)


@lru_cache(256)
def _page(count: int, size: int) -> struct.Struct:
    return struct.Struct(">I" + f"Q{size}sQ" * count + "Q")


def _rows(offsets: Sequence[int], fetched: Fetched) -> bytes:
    """Encode (offset u64, key b32, value b32) for each record, with a few C-level passes and one join."""
    values = fetched.values
    count = len(values)
    if fetched.keys is None:
        parts: list[bytes] = [b""] * (2 * count)
        parts[0::2] = map(_ROW.pack, offsets, repeat(0), map(len, values))
        parts[1::2] = values
        return b"".join(parts)
    keys = [key or b"" for key in fetched.keys]
    parts = [b""] * (4 * count)
    parts[0::4] = map(_OFFSET_KEY.pack, offsets, map(len, keys))
    parts[1::4] = keys
    parts[2::4] = map(_LENGTH.pack, map(len, values))
    parts[3::4] = values
    return b"".join(parts)


def _read_rows(reader: Reader, count: int, next_offset: int) -> Fetched:
    if count * RECORD_OVERHEAD_BYTES > reader.left:
        raise WireError(f"{count} records announced, {reader.left} bytes left")
    offsets: list[int] = []
    values: list[bytes] = []
    keys: list[bytes | None] = []
    stretch = _STRETCH_MIN
    while len(offsets) < count:
        begun = len(offsets)
        if count - begun >= _STRETCH_MIN and _read_equal_rows(reader, min(stretch, count - begun), offsets, keys, values):
            stretch *= 4
            continue
        stretch = _STRETCH_MIN
        _read_some_rows(reader, min(_STRETCH_MIN, count - begun), offsets, keys, values)
    return Fetched(offsets, values, next_offset, keys if any(key is not None for key in keys) else None)


def _read_equal_rows(reader: Reader, count: int, offsets: list[int], keys: list[bytes | None], values: list[bytes]) -> bool:
    """Decode `count` rows at once if none has a key and all values have one size."""
    payload, at = reader.payload, reader.at
    if reader.left < _ROW.size:
        return False
    _, key_size, value_size = _ROW.unpack_from(payload, at)
    size = (_ROW.size + value_size) * count
    if key_size or size > reader.left or value_size == 0:
        return False
    rows = struct.iter_unpack(f">QII{value_size}s", memoryview(payload)[at : at + size])
    row_offsets, key_sizes, value_sizes, row_values = zip(*rows, strict=True)
    if any(key_sizes) or value_sizes.count(value_size) != count:
        return False
    offsets += row_offsets
    values += row_values
    keys += repeat(None, count)
    reader.at = at + size
    return True


def _read_some_rows(reader: Reader, count: int, offsets: list[int], keys: list[bytes | None], values: list[bytes]) -> None:
    payload, at, end = reader.payload, reader.at, reader.end
    for _ in range(count):
        if end - at < _ROW.size:
            raise WireError("records are cut short")
        offset, key_size, value_size = _ROW.unpack_from(payload, at)
        at += 12
        key = None
        if key_size:
            if end - at < key_size + 4:
                raise WireError(f"key of {key_size} bytes announced, {end - at} left")
            key = payload[at : at + key_size]
            at += key_size
            (value_size,) = _LENGTH.unpack_from(payload, at)
        at += 4
        if end - at < value_size:
            raise WireError(f"value of {value_size} bytes announced, {end - at} left")
        offsets.append(offset)
        keys.append(key)
        values.append(payload[at : at + value_size])
        at += value_size
    reader.at = at
