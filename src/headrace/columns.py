"""Binary columns, in the layout of stored batches and of Arrow's binary arrays: an offsets array, one data block and a validity bitmap.

    offsets   u32 × (count + 1), little-endian, from 0, ascending: item i is data[offsets[i] : offsets[i + 1]]
    data      the items end to end
    validity  one bit per item, least significant first, 0 = null; spare bits are 0; absent if no item is null

The headers of one record are one item: u16 count, then for each header u16 + name in UTF-8, u32 + value. A record without headers has an
empty item.

A caller may pass invalid buffers, and the log must never store data that its readers cannot decode. The constructor of `Column` therefore
checks whole arrays at a time, which takes a few nanoseconds per item.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

Headers: TypeAlias = tuple[tuple[str, bytes], ...]
"""Ordered pairs of name and value. A name may repeat."""
Buffer: TypeAlias = bytes | bytearray | memoryview

_HEADER_COUNT, _NAME_LENGTH, _VALUE_LENGTH = struct.Struct("<H"), struct.Struct("<H"), struct.Struct("<I")
_BLOCK: Final = 256
EQUAL_ROWS_MIN: Final = 16
"""Fewer rows are encoded faster one by one than by `equal_rows`."""
_ALL_BYTES: Final = bytes(range(256))
_SMALL_COUNT_MAX: Final = 32
EQUAL_SIZE_MAX: Final = 4096
"""Larger items are copied faster one by one than by `equal_items`."""
assert sys.byteorder == "little", "columns are little-endian and used in place"
assert array("I").itemsize == 4 and array("q").itemsize == 8


class Column:
    """A checked binary column. It owns its buffers, so the caller may reuse the ones it passed, unless they are `is_checked`."""

    __slots__ = ("checksum", "content", "offsets", "validity")

    checksum: int | None
    """CRC-32C of `content`, if the caller has computed it: the log then does not."""
    offsets: bytes
    content: SizedBuffer
    """The items end to end, as `data` returns them, or a read-only buffer of another library with the same bytes."""
    validity: bytes | None

    def __init__(
        self, offsets: Buffer, data: SizedBuffer, validity: Buffer | None = None, *, is_checked: bool = False, checksum: int | None = None
    ) -> None:
        """`offsets` defines the number of items. `data` and `validity` may be longer than needed. Raises `InvalidRequest`.

        `is_checked`: the same rules were checked before, and `data` never changes; it is then not copied, and may have a
        `checksum`.
        """
        assert checksum is None or is_checked, "a checksum belongs to data that never changes"
        self.checksum = checksum
        self.offsets = bytes(offsets)
        if is_checked:
            ends = memoryview(self.offsets).cast("I")
            assert ends[0] == 0 and ends[-1] == len(data), "the items are the whole of the data"
            self.content, self.validity = data, None if validity is None else bytes(validity)
            return
        if len(self.offsets) % 4 or len(self.offsets) < 8:
            raise InvalidRequest(f"column offsets: expected a multiple of 4 bytes and at least 8, got {len(self.offsets)}")
        ends = memoryview(self.offsets).cast("I")
        if ends[0] != 0 or not is_ascending(self.offsets, 4):
            raise InvalidRequest("column offsets: expected ascending values from 0")
        size = ends[-1]
        content = memoryview(data).cast("B")
        if len(content) < size:
            raise InvalidRequest(f"column data: expected {size} bytes, got {len(content)}")
        self.content = data if isinstance(data, bytes) and len(data) == size else bytes(content[:size])
        self.validity = None if validity is None else _valid_bits(memoryview(validity).cast("B"), len(ends) - 1)

    @classmethod
    def of(cls, items: Sequence[bytes | None]) -> Column:
        return cls(*packed(items))

    def __len__(self) -> int:
        return len(self.offsets) // 4 - 1

    @property
    def data(self) -> bytes:
        """The items end to end. A buffer of another library is copied at the first use."""
        content = self.content
        if not isinstance(content, bytes):
            content = self.content = bytes(content)
        return content

    def items(self) -> list[bytes | None]:
        found = slices(memoryview(self.offsets).cast("I"), self.data)
        if self.validity is not None:
            blank_nulls(found, self.validity, 0)
        return found

    @property
    def largest(self) -> int:
        """Size of the largest item in bytes."""
        return max(end - begin for begin, end in pairwise(memoryview(self.offsets).cast("I").tolist()))


def is_ascending(integers: bytes, width: int) -> bool:
    """Return whether unsigned integers of `width` bytes, none with its top bit set, are in ascending order.

    All of them form one large integer, and one subtraction compares each with its neighbour. The top bit of each minuend is set first, so
    that no subtraction borrows from the next integer; the bit is still set afterwards exactly if the minuend was not the smaller one.
    """
    count, bits = len(integers) // width - 1, 8 * width
    whole = int.from_bytes(integers, "little")
    if whole & _top_bits(count + 1, width):
        return False
    if not count:
        return True
    top = _top_bits(count, width)
    earlier = whole & ((1 << bits * count) - 1)
    return ((whole >> bits | top) - earlier) & top == top


def is_non_negative(times: bytes) -> bool:
    """Return whether none of these 64-bit integers is negative."""
    return not int.from_bytes(times, "little") & _top_bits(len(times) // 8, 8)


@lru_cache(4)
def _top_bits(count: int, width: int) -> int:
    return int.from_bytes((bytes(width - 1) + b"\x80") * count, "little")


def common_size(offsets: bytes) -> int:
    """Return the size of the items of a column if all have the same, else 0. All differences come from one subtraction."""
    count = len(offsets) // 4 - 1
    if count < 1:
        return 0
    whole = int.from_bytes(offsets, "little")
    sizes = (whole >> 32) - (whole & ((1 << 32 * count) - 1))
    size = sizes & 0xFFFF_FFFF
    return size if sizes == size * _ones(count) else 0


@lru_cache(4)
def _ones(count: int) -> int:
    return int.from_bytes(b"\x01\x00\x00\x00" * count, "little")


def _valid_bits(bits: memoryview, count: int) -> bytes | None:
    """Return the bits of `count` items with the spare bits cleared; None if all are set."""
    whole, spare = divmod(count, 8)
    if len(bits) < whole + bool(spare):
        raise InvalidRequest(f"column validity: expected at least {(count + 7) // 8} bytes for {count} items, got {len(bits)}")
    full = b"\xff" * whole
    taken = bytes(bits[:whole])
    if spare:
        last = (1 << spare) - 1
        full += bytes((last,))
        taken += bytes((bits[whole] & last,))
    return None if taken == full else taken


def packed(items: Sequence[bytes | None]) -> tuple[bytes, bytes, bytes | None]:
    """Return offsets, data and validity of these items."""
    try:
        data = b"".join(items)  # type: ignore[arg-type]  # None raises TypeError: cheaper than a test of each
        return array("I", accumulate(map(len, items), initial=0)).tobytes(), data, None  # type: ignore[arg-type]  # here too
    except TypeError:
        filled = [b"" if item is None else item for item in items]
    bits = bytearray((len(items) + 7) // 8)
    for index, item in enumerate(items):
        if item is not None:
            bits[index >> 3] |= 1 << (index & 7)
    return array("I", accumulate(map(len, filled), initial=0)).tobytes(), b"".join(filled), bytes(bits)


def slices(ends: memoryview, content: bytes) -> list[bytes | None]:
    """Return the items of a binary column. `content` begins with the first of them."""
    count, first = len(ends) - 1, ends[0]
    size = len(content) // count if count else 0
    if 0 < size <= EQUAL_SIZE_MAX and ends == array("I", range(first, first + size * count + 1, size)):
        # Items of one size are common, and unpacking blocks is four times as fast as slicing.
        return equal_items(content, size, count)
    places = ends.tolist()
    if first:
        places = [end - first for end in places]
    return [content[begin:end] for begin, end in pairwise(places)]


def equal_items(content: bytes, size: int, count: int) -> list[bytes | None]:
    """Return `count` items of one size, one after the other in `content`."""
    if count <= _SMALL_COUNT_MAX:
        return list(_block(size, count).unpack(content))
    block = _block(size)
    in_blocks = count // _BLOCK * block.size
    items: list[bytes | None] = list(chain.from_iterable(block.iter_unpack(content[:in_blocks])))
    items += [content[at : at + size] for at in range(in_blocks, size * count, size)]
    return items


@lru_cache(256)
def _block(size: int, count: int = _BLOCK) -> struct.Struct:
    return struct.Struct(f"{size}s" * count)


def blank_nulls(items: list[bytes | None], validity: bytes | memoryview, start: int) -> None:
    """Replace each item whose bit is 0 with None; the bit of the first item is `start`."""
    for index in range(len(items)):
        at = index + start
        if not validity[at >> 3] >> (at & 7) & 1:
            items[index] = None


def equal_size(values: Sequence[bytes]) -> int | None:
    """Return the size of the values if they have one and `equal_rows` is the fastest way to encode them."""
    if len(values) < EQUAL_ROWS_MIN:
        return None
    sizes = list(map(len, values))
    return sizes[0] if sizes.count(sizes[0]) == len(sizes) else None


def equal_rows(
    values: Sequence[bytes], size: int, head: bytes, tail: bytes = b"", *, numbers: Sequence[int] | None = None, numbers_at: int = 0
) -> bytearray:
    """Return head, value and tail of each of these values, all of which have `size` bytes. `numbers` replace eight zero bytes at
    `numbers_at` of each row, big-endian.

    Tail and head are the separator of a join, and numbers are written a column of bytes at a time, so that no row costs a call.
    """
    rows = bytearray(tail + head).join([b"", *values, b""])
    del rows[len(rows) - len(head) :]
    del rows[: len(tail)]
    if numbers:
        assert len(numbers) == len(values)
        _write_numbers(rows, len(head) + size + len(tail), numbers, numbers_at)
    return rows


def numbered_rows(row: bytes, numbers: Sequence[int], numbers_at: int) -> bytearray:
    """Return the row once for each of at least one number, which replaces eight zero bytes at `numbers_at`, big-endian."""
    rows = bytearray(row) * len(numbers)
    _write_numbers(rows, len(row), numbers, numbers_at)
    return rows


def _write_numbers(rows: bytearray, row_bytes: int, numbers: Sequence[int], numbers_at: int) -> None:
    columns = _number_columns(numbers)
    for at, column in enumerate(columns, numbers_at + 8 - len(columns)):
        rows[at::row_bytes] = column


def _number_columns(numbers: Sequence[int]) -> list[bytes]:
    """Return the bytes of the numbers, a column for each, the highest first. Columns of zeros at the front are left out."""
    if not isinstance(numbers, range) or numbers.step != 1:
        each = array("Q", numbers)
        each.byteswap()
        whole = each.tobytes()
        return [whole[at::8] for at in range(8 - (max(numbers).bit_length() + 7) // 8, 8)]
    first, end = numbers.start, numbers.stop
    columns: list[bytes] = []
    for bits in range(8 * (((end - 1).bit_length() - 1) // 8), 0, -8):
        stretches = [
            bytes((number & 0xFF,)) * (min(end, (number + 1) << bits) - max(first, number << bits))
            for number in range(first >> bits, ((end - 1) >> bits) + 1)
        ]
        columns.append(b"".join(stretches))
    start = first & 0xFF
    columns.append((_ALL_BYTES * ((start + len(numbers)) // 256 + 1))[start : start + len(numbers)])
    return columns


def encode_headers(pairs: Headers) -> bytes:
    parts = [_HEADER_COUNT.pack(len(pairs))]
    for name, value in pairs:
        raw = name.encode()
        parts += (_NAME_LENGTH.pack(len(raw)), raw, _VALUE_LENGTH.pack(len(value)), value)
    return b"".join(parts)


def decode_headers(blob: bytes) -> Headers:
    """Decode a blob that `encode_headers` returned or `checked_headers` accepted."""
    return _decode_headers(blob)[0]


def _decode_headers(blob: bytes) -> tuple[Headers, int]:
    """Return the headers and the position after them."""
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
    """Decode a blob from an untrusted source. Raises `InvalidRequest`."""
    try:
        pairs, end = _decode_headers(blob)
    except (struct.error, UnicodeDecodeError) as fault:
        raise InvalidRequest(f"invalid record headers: {fault}") from None
    if end != len(blob):
        raise InvalidRequest(f"invalid record headers: expected {end} bytes, got {len(blob)}")
    return pairs


def headers_bytes(pairs: Headers) -> int:
    """Return the size of names and values, which `limits.HEADERS_BYTES_MAX` limits."""
    return sum(len(name.encode()) + len(value) for name, value in pairs)
