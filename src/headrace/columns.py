"""Binary columns, as they lie in a batch and in Arrow's arrays: an offsets array, one block of bytes, and bits for what is null.

    offsets   u32 × (count + 1), little-endian, from 0, never falling: item i is data[offsets[i] : offsets[i + 1]]
    data      the items end to end
    validity  one bit an item, least significant first, 0 = null; spare bits are 0; absent where nothing is null

The headers of one record are an item too: u16 count, then for each u16 + name in UTF-8, u32 + value; a record without headers has none
of these bytes.

Whoever hands over such buffers may be wrong about them, and a log must never hold what its readers cannot take apart. A `Column` is
therefore checked when it is made, whole arrays at a time: a few nanoseconds an item.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Final, TypeAlias

from headrace.errors import InvalidRequest

Headers: TypeAlias = tuple[tuple[str, bytes], ...]
"""Ordered; a name may repeat."""
Buffer: TypeAlias = bytes | bytearray | memoryview

_HEADER_COUNT, _NAME_LENGTH, _VALUE_LENGTH = struct.Struct("<H"), struct.Struct("<H"), struct.Struct("<I")
_BLOCK: Final = 256
_EQUAL_SIZE_MAX: Final = 4096
assert sys.byteorder == "little", "columns are little-endian and used in place"
assert array("I").itemsize == 4 and array("q").itemsize == 8


class Column:
    """A binary column that has been checked. Its buffers are its own: whoever gave them may use theirs again."""

    __slots__ = ("data", "offsets", "validity")

    offsets: bytes
    data: bytes
    validity: bytes | None

    def __init__(self, offsets: Buffer, data: Buffer, validity: Buffer | None = None) -> None:
        """`offsets` says how many items there are; `data` and `validity` may be longer than that takes. Raises `InvalidRequest`."""
        self.offsets = bytes(offsets)
        if len(self.offsets) % 4 or len(self.offsets) < 8:
            raise InvalidRequest(f"{len(self.offsets)} bytes are no offsets array of a column")
        ends = memoryview(self.offsets).cast("I")
        if ends[0] != 0 or not never_falls(self.offsets, 4):
            raise InvalidRequest("the offsets of a column must start at 0 and never fall")
        size = ends[-1]
        content = memoryview(data).cast("B")
        if len(content) < size:
            raise InvalidRequest(f"a column claims {size} bytes and has {len(content)}")
        self.data = data if isinstance(data, bytes) and len(data) == size else bytes(content[:size])
        self.validity = None if validity is None else _valid_bits(memoryview(validity).cast("B"), len(ends) - 1)

    @classmethod
    def of(cls, items: Sequence[bytes | None]) -> Column:
        return cls(*packed(items))

    def __len__(self) -> int:
        return len(self.offsets) // 4 - 1

    def items(self) -> list[bytes | None]:
        found = slices(memoryview(self.offsets).cast("I"), self.data)
        if self.validity is not None:
            blank_nulls(found, self.validity, 0)
        return found

    @property
    def largest(self) -> int:
        """The size of the largest item."""
        return max(end - begin for begin, end in pairwise(memoryview(self.offsets).cast("I").tolist()))


def never_falls(lanes: bytes, lane_bytes: int) -> bool:
    """Whether these integers, taken as unsigned and none with its top bit set, are in ascending order.

    All of them sit side by side in one large integer. One subtraction takes from each its neighbour: with the top bit lent to it, a
    lane never borrows from the next one, and has the bit still exactly if it was not the smaller of the two.
    """
    count, bits = len(lanes) // lane_bytes - 1, 8 * lane_bytes
    whole = int.from_bytes(lanes, "little")
    if whole & _top_bits(count + 1, lane_bytes):
        return False
    if not count:
        return True
    top = _top_bits(count, lane_bytes)
    earlier = whole & ((1 << bits * count) - 1)
    return ((whole >> bits | top) - earlier) & top == top


def is_natural(times: bytes) -> bool:
    """Whether none of these 64-bit integers is negative."""
    return not int.from_bytes(times, "little") & _top_bits(len(times) // 8, 8)


@lru_cache(4)
def _top_bits(count: int, lane_bytes: int) -> int:
    return int.from_bytes((bytes(lane_bytes - 1) + b"\x80") * count, "little")


def _valid_bits(bits: memoryview, count: int) -> bytes | None:
    """The bits of `count` items with the spare ones cleared; None if all are set."""
    whole, spare = divmod(count, 8)
    if len(bits) < whole + bool(spare):
        raise InvalidRequest(f"{len(bits)} bytes of validity do not cover {count} items")
    full = b"\xff" * whole
    taken = bytes(bits[:whole])
    if spare:
        last = (1 << spare) - 1
        full += bytes((last,))
        taken += bytes((bits[whole] & last,))
    return None if taken == full else taken


def packed(items: Sequence[bytes | None]) -> tuple[bytes, bytes, bytes | None]:
    """Offsets, data and validity of these items."""
    try:
        data = b"".join(items)  # type: ignore[arg-type]  # None is found by the TypeError: cheaper than looking
        return array("I", accumulate(map(len, items), initial=0)).tobytes(), data, None  # type: ignore[arg-type]  # here too
    except TypeError:
        filled = [b"" if item is None else item for item in items]
    bits = bytearray((len(items) + 7) // 8)
    for index, item in enumerate(items):
        if item is not None:
            bits[index >> 3] |= 1 << (index & 7)
    return array("I", accumulate(map(len, filled), initial=0)).tobytes(), b"".join(filled), bytes(bits)


def slices(ends: memoryview, content: bytes) -> list[bytes | None]:
    """The items of a binary column; `content` starts where the first one does."""
    count, first = len(ends) - 1, ends[0]
    size = len(content) // count if count else 0
    if 0 < size <= _EQUAL_SIZE_MAX and ends == array("I", range(first, first + size * count + 1, size)):
        # All of one size, as many topics are: unpacking blocks is four times as fast as slicing.
        block = _block(size)
        in_blocks = count // _BLOCK * block.size
        items = list(chain.from_iterable(block.iter_unpack(content[:in_blocks])))
        items += [content[at : at + size] for at in range(in_blocks, size * count, size)]
        return items
    places = ends.tolist()
    if first:
        places = [end - first for end in places]
    return [content[begin:end] for begin, end in pairwise(places)]


@lru_cache(64)
def _block(size: int) -> struct.Struct:
    return struct.Struct(f"{size}s" * _BLOCK)


def blank_nulls(items: list[bytes | None], validity: bytes | memoryview, start: int) -> None:
    """Put None where the bits, from bit `start` on, say null."""
    for index in range(len(items)):
        at = index + start
        if not validity[at >> 3] >> (at & 7) & 1:
            items[index] = None


def encode_headers(pairs: Headers) -> bytes:
    parts = [_HEADER_COUNT.pack(len(pairs))]
    for name, value in pairs:
        raw = name.encode()
        parts += (_NAME_LENGTH.pack(len(raw)), raw, _VALUE_LENGTH.pack(len(value)), value)
    return b"".join(parts)


def decode_headers(blob: bytes) -> Headers:
    """Of a blob that `encode_headers` has made, or `checked_headers` has passed."""
    return _decode_headers(blob)[0]


def _decode_headers(blob: bytes) -> tuple[Headers, int]:
    """The headers, and where they end."""
    (count,) = _HEADER_COUNT.unpack_from(blob, 0)
    position, pairs = 2, []
    for _ in range(count):
        (size,) = _NAME_LENGTH.unpack_from(blob, position)
        name = blob[position + 2 : position + 2 + size].decode()
        position += 2 + size
        (size,) = _VALUE_LENGTH.unpack_from(blob, position)
        pairs.append((name, blob[position + 4 : position + 4 + size]))
        position += 4 + size
    return tuple(pairs), position


def checked_headers(blob: bytes) -> Headers:
    """The headers in a blob that anybody may have made. Raises `InvalidRequest`."""
    try:
        pairs, end = _decode_headers(blob)
    except (struct.error, UnicodeDecodeError) as fault:
        raise InvalidRequest(f"the headers of a record cannot be read: {fault}") from None
    if end != len(blob):
        raise InvalidRequest(f"the headers of a record take {end} bytes and have {len(blob)}")
    return pairs


def headers_bytes(pairs: Headers) -> int:
    """Names and values together: what `limits.HEADERS_BYTES_MAX` counts."""
    return sum(len(name.encode()) + len(value) for name, value in pairs)
