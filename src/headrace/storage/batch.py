"""Columnar batch format, used in the journal, in segments and by every read. `encoding.py` writes it.

    0       4       8       12        14      16      20      24            32      36         40
    +-------+-------+-------+---------+-------+-------+-------+-------------+-------+----------+
    | magic | crc   | size  | version | flags | log   | count | base offset | span  | raw size |
    | 4 B   | u32   | u32   | u16     | u16   | u32   | u32   | u64         | u32   | u32      |
    +-------+-------+-------+---------+-------+-------+-------+-------------+-------+----------+
    40                48              56       68         72
    +-----------------+---------------+--------+----------+------+
    | min timestamp   | max timestamp | nonce  | reserved | body |     all integers little-endian
    | i64             | i64           | 12 B   | u32      |      |
    +-----------------+---------------+--------+----------+------+

`crc` is the CRC-32C of everything from byte 8 to `size`. `size` counts the header, the body and its padding, and is a multiple of 8.
`span` is the number of offsets that the batch covers: `count`, unless compaction removed records. `raw size` is the body's size before
compression and encryption. `nonce` is zero unless the body is encrypted.

The body holds columns in this order, each starting at a multiple of 8. Columns in brackets are present only if their flag is set:

    value offsets u32 × (count + 1), value data
    [value validity: one bit per record, least significant first, 0 = tombstone]
    [key offsets u32 × (count + 1), key data] [key validity]
    [header offsets u32 × (count + 1), header data]
    [timestamps i64 × count]          without it, every record has the batch's min timestamp
    [expiries i64 × count]            0 = never
    [offset deltas u32 × count]       without it, offsets are dense from the base offset

Offsets arrays and data blocks have the layout of Arrow's binary arrays, so that Arrow can wrap them without a copy. `headrace.columns`
defines the encoding of record headers.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from google_crc32c import extend as crc32c_extend
from google_crc32c import implementation as crc32c_implementation
from google_crc32c import value as crc32c

from headrace.columns import EQUAL_SIZE_MAX, Column, blank_nulls, common_size, decode_headers, equal_items, slices
from headrace.errors import CorruptData
from headrace.limits import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from headrace.records import NEVER, ColumnBatch, Headers, Record, RecordBatch
from headrace.storage import zstd
from headrace.storage.crypt import Keyring

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

CHECKSUMS_IN_C: Final = crc32c_implementation == "c"
"""False if the extension module of the library is missing; a checksum of one megabyte then takes a second."""

MAGIC: Final = b"HRB\x01"
VERSION: Final = 1
HEADER_BYTES: Final = 72
ALIGN: Final = 8

VALUE_NULLS: Final = 1 << 0
KEYS: Final = 1 << 1
KEY_NULLS: Final = 1 << 2
HEADERS: Final = 1 << 3
TIMESTAMPS: Final = 1 << 4
EXPIRIES: Final = 1 << 5
OFFSETS: Final = 1 << 6
COMPRESSED: Final = 1 << 7
ENCRYPTED: Final = 1 << 8
REFERENCED: Final = 1 << 9
"""Written to its segment before the journal. Valid only if a journal frame refers to it."""
_KNOWN_FLAGS: Final = (1 << 10) - 1
_BINARY: Final = -1
_BITS: Final = 0
_UNKNOWN: Final = -1

_HEADER = struct.Struct("<4sIIHHIIQIIqq12sI")
assert _HEADER.size == HEADER_BYTES, "the drawing says 72"
_U32 = struct.Struct("<I")


@dataclass(slots=True, init=False)
class BatchHeader:
    """Parsed batch header. Not frozen: a frozen instance takes three times as long to create."""

    crc: int
    size: int
    flags: int
    log: int
    count: int
    base_offset: int
    span: int
    raw_size: int
    min_timestamp: int
    max_timestamp: int
    nonce: bytes

    # Written out, because mypyc does not compile a generated constructor, and a flush to thousands of logs creates thousands of headers.
    def __init__(
        self,
        crc: int,
        size: int,
        flags: int,
        log: int,
        count: int,
        base_offset: int,
        span: int,
        raw_size: int,
        min_timestamp: int,
        max_timestamp: int,
        nonce: bytes,
    ) -> None:
        self.crc, self.size, self.flags, self.log, self.count = crc, size, flags, log, count
        self.base_offset, self.span, self.raw_size = base_offset, span, raw_size
        self.min_timestamp, self.max_timestamp, self.nonce = min_timestamp, max_timestamp, nonce

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.span

    def encode(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            self.crc,
            self.size,
            VERSION,
            self.flags,
            self.log,
            self.count,
            self.base_offset,
            self.span,
            self.raw_size,
            self.min_timestamp,
            self.max_timestamp,
            self.nonce,
            0,
        )


Built: TypeAlias = tuple[BatchHeader, tuple[bytes, ...]]
"""Encoded batch: its header, and the parts of the whole batch to be written one after the other."""
BuiltInPlace: TypeAlias = "tuple[BatchHeader, tuple[SizedBuffer, ...]]"
"""The same of a batch that is only written: its parts may be buffers of other libraries. Every `Built` is one."""


def _damage(where: str, what: str) -> CorruptData:
    return CorruptData(f"{where}: {what}")


def parse_header(buffer: bytes | memoryview, position: int, where: str) -> BatchHeader:
    """Parse the header at `position` and check every length in it, without verifying the checksum."""
    if len(buffer) - position < HEADER_BYTES:
        raise _damage(where, "truncated inside a batch header")
    (magic, crc, size, version, flags, log, count, base, span, raw, low, high, nonce, reserved) = _HEADER.unpack_from(buffer, position)
    if magic != MAGIC:
        raise _damage(where, "not a batch: the magic number is missing")
    if version != VERSION or flags & ~_KNOWN_FLAGS or reserved:
        raise _damage(where, f"batch version {version}, flags {flags:#x} is not supported by this release")
    if not (HEADER_BYTES <= size <= BATCH_BYTES_MAX and size % ALIGN == 0):
        raise _damage(where, f"invalid batch size of {size} bytes")
    if not (0 < count <= span and count <= BATCH_RECORDS_MAX and raw <= BATCH_BYTES_MAX):
        raise _damage(where, f"invalid batch header: {count} records over {span} offsets in {raw} bytes")
    return BatchHeader(crc, size, flags, log, count, base, span, raw, low, high, nonce)


def check_crc(buffer: bytes | memoryview, position: int, header: BatchHeader, where: str) -> None:
    """Verify the checksum of a batch that is not decoded. Raises `CorruptData`."""
    if crc32c(bytes(buffer[position + 8 : position + header.size])) != header.crc:
        raise _damage(where, f"checksum of the batch at offset {header.base_offset} does not match")


class StoredBatch:
    """A window on an encoded batch. Implements `headrace.records.Batch`; columns are decoded on demand."""

    __slots__ = ("_body", "_ends", "_front", "_keyring", "_layout", "_plain", "_stored", "_value_size", "header", "start", "stop")

    def __init__(self, header: BatchHeader, front: bytes, stored: bytes, keyring: Keyring | None, start: int = 0, stop: int = -1) -> None:
        self.header = header
        self._front = front
        self._stored = stored
        self._keyring = keyring
        self._body: memoryview | None = None
        self._plain = b""
        """The bytes of `_body`, and perhaps some after them."""
        self._ends: memoryview | None = None
        self._layout: dict[int, tuple[int, int]] = {}
        self._value_size = _UNKNOWN
        """Size of each value of the whole batch, 0 if they differ."""
        self.start = start
        self.stop = header.count if stop < 0 else stop

    @classmethod
    def parse(
        cls,
        buffer: bytes | memoryview,
        position: int = 0,
        header: BatchHeader | None = None,
        *,
        where: str = "batch",
        keyring: Keyring | None = None,
        verify: bool = True,
    ) -> StoredBatch:
        """Parse the batch at `position` and verify its checksum. `header` is its header, if already parsed. `where` names it in errors."""
        if header is None:
            header = parse_header(buffer, position, where)
        if len(buffer) - position < header.size:
            raise _damage(where, f"batch of {header.size} bytes is truncated after {len(buffer) - position}")
        front = bytes(buffer[position : position + HEADER_BYTES])
        stored = bytes(buffer[position + HEADER_BYTES : position + header.size])
        return cls.of_parts(header, front, stored, where=where, keyring=keyring, verify=verify)

    @classmethod
    def of_parts(
        cls, header: BatchHeader, front: bytes, stored: bytes, *, where: str = "batch", keyring: Keyring | None = None, verify: bool = True
    ) -> StoredBatch:
        """Return the batch of these encoded parts, the header and what follows it, without a copy, and verify its checksum."""
        if HEADER_BYTES + len(stored) != header.size:
            raise _damage(where, f"batch of {header.size} bytes is truncated after {HEADER_BYTES + len(stored)}")
        if verify and crc32c_extend(crc32c(front[8:]), stored) != header.crc:
            raise _damage(where, f"checksum of the batch at offset {header.base_offset} does not match")
        return cls(header, front, stored, keyring)

    @classmethod
    def of_built(cls, built: Built, keyring: Keyring | None) -> StoredBatch:
        """Return the batch that `build` returned."""
        header, (first, *others) = built
        return cls(header, first[:HEADER_BYTES], b"".join((memoryview(first)[HEADER_BYTES:], *others)), keyring)

    @property
    def built(self) -> Built:
        """The whole stored batch, regardless of the window."""
        return self.header, (self._front, self._stored)

    def open(self) -> None:
        """Decrypt and decompress the body, unless that is done. Windows that are taken afterwards share it."""
        if self._body is None:
            self._decode()
            self._bytes_before(0)

    # Window.

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def encoded(self) -> bytes:
        """The whole stored batch, regardless of the window."""
        return self._front + self._stored

    @property
    def base_offset(self) -> int:
        return self.header.base_offset

    @property
    def min_timestamp(self) -> int:
        return self.header.min_timestamp

    @property
    def first_offset(self) -> int:
        if self.start == 0 and not self.header.flags & OFFSETS:
            return self.header.base_offset
        return self._offset_at(self.start)

    @property
    def next_offset(self) -> int:
        return self.header.next_offset if self.stop == self.header.count else self._offset_at(self.stop)

    def _offset_at(self, index: int) -> int:
        if not self.header.flags & OFFSETS:
            return self.header.base_offset + index
        deltas = self._column(OFFSETS).cast("I")
        return self.header.base_offset + deltas[index]

    def window(self, start: int, stop: int) -> StoredBatch:
        assert 0 <= start <= stop <= len(self)
        part = StoredBatch(self.header, self._front, self._stored, self._keyring, self.start + start, self.start + stop)
        part._body, part._plain, part._ends, part._layout = self._body, self._plain, self._ends, self._layout
        part._value_size = self._value_size
        return part

    def part(self, offset: int, bytes_max: int, records_max: int) -> StoredBatch | None:
        """Return the records from `offset` on, up to a limit that lies within this opened batch; None if neither limit does.

        The first record is returned regardless of its size.
        """
        ends, header = self._ends, self.header
        start, stop = offset - header.base_offset, self.stop
        if ends is None or header.flags & (OFFSETS | KEYS) or not self.start <= start < stop or records_max < 1:
            return None
        if records_max <= stop - start:
            stop = start + records_max
        if self._value_size == _UNKNOWN:  # the batch is read again and again
            self._value_size = common_size(bytes(self._column(0)))
        size = self._value_size
        if size:
            is_cut = (stop - start) * size > bytes_max
            if is_cut:
                stop = start + max(bytes_max // size, 1)
        else:
            before: int = ends[start]
            is_cut = ends[stop] - before > bytes_max
            if is_cut:
                stop = max(bisect_right(ends, before + bytes_max, start, stop + 1) - 1, start + 1)
        if not is_cut and stop == self.stop and records_max > stop - start:
            return None
        return self.window(start - self.start, stop - self.start)

    def from_offset(self, offset: int) -> StoredBatch:
        """Return this window without the records below `offset`; may be empty."""
        below = self.count_below(offset)
        return self.window(below, len(self)) if below else self

    def count_below(self, offset: int) -> int:
        """Return how many records of this window are below `offset`."""
        below = offset - self.header.base_offset
        if self.header.flags & OFFSETS:
            below = bisect_left(self._column(OFFSETS).cast("I"), below, self.start, self.stop)
        return min(max(below - self.start, 0), len(self))

    # Columns of the window. Each call decodes its column.

    def offsets(self) -> Sequence[int]:
        base = self.header.base_offset
        if not self.header.flags & OFFSETS:
            return range(base + self.start, base + self.stop)
        return [base + delta for delta in self._column(OFFSETS).cast("I")[self.start : self.stop]]

    def values(self) -> list[bytes | None]:
        return self._binary(0, VALUE_NULLS)

    def keys(self) -> list[bytes | None] | None:
        return self._binary(KEYS, KEY_NULLS) if self.header.flags & KEYS else None

    def headers(self) -> list[Headers] | None:
        if not self.header.flags & HEADERS:
            return None
        try:
            return [decode_headers(blob) if blob else () for blob in self._binary(HEADERS, 0)]
        except (struct.error, UnicodeDecodeError) as failure:
            raise _damage("batch", f"invalid record headers from offset {self.first_offset} on: {failure}") from None

    def timestamps(self) -> Sequence[int]:
        if not self.header.flags & TIMESTAMPS:
            return [self.header.min_timestamp] * len(self)
        return self._column(TIMESTAMPS).cast("q")[self.start : self.stop].tolist()

    def expiries(self) -> list[int] | None:
        if not self.header.flags & EXPIRIES:
            return None
        return self._column(EXPIRIES).cast("q")[self.start : self.stop].tolist()

    def records(self) -> Iterator[Record]:
        count = len(self)
        keys, headers, expiries = self.keys(), self.headers(), self.expiries()
        yield from map(
            Record,
            self.offsets(),
            self.timestamps(),
            [None] * count if keys is None else keys,
            self.values(),
            [()] * count if headers is None else headers,
            [NEVER] * count if expiries is None else expiries,
        )

    def record_batch(self) -> RecordBatch:
        return RecordBatch(self.values(), self.keys(), self.headers(), self.timestamps(), self.expiries())

    def column_batch(self, *, with_times: bool = True) -> ColumnBatch:
        if len(self) < self.header.count:
            batch = self.record_batch()
            return ColumnBatch.of(batch if with_times else replace(batch, timestamps=None))
        # The columns were checked before the batch was stored, and its checksum was verified.
        keys, headers, times = self.key_buffers(), self.header_buffers(), self.timestamp_buffer() if with_times else None
        if with_times and times is None:
            times = memoryview(array("q", [self.header.min_timestamp]) * len(self))
        return ColumnBatch(
            _owned(*self.value_buffers()),
            None if keys is None else _owned(*keys),
            None if headers is None else _owned(*headers),
            times,
            self.expiry_buffer(),
        )

    def value_sizes(self) -> list[int]:
        ends = self._column(0).cast("I")[self.start : self.stop + 1].tolist()
        return [end - begin for begin, end in pairwise(ends)]

    @property
    def size_estimate_bytes(self) -> int:
        # Decoding the columns of a small batch costs more than an exact size is worth.
        return self.header.raw_size if self.stop - self.start == self.header.count else self.size_bytes

    @property
    def value_size(self) -> int | None:
        return self._value_size if self._value_size > 0 and not self.header.flags & VALUE_NULLS else None

    @property
    def size_bytes(self) -> int:
        if self._value_size > 0 and not self.header.flags & KEYS:
            return self._value_size * (self.stop - self.start)
        if self._ends is not None and not self.header.flags & KEYS:
            size: int = self._ends[self.stop] - self._ends[self.start]
            return size
        return self._bytes_before(self.stop) - self._bytes_before(self.start)

    def _bytes_before(self, index: int) -> int:
        if self._ends is None:
            self._ends = self._column(0).cast("I")
        size: int = self._ends[index]
        return size + self._column(KEYS).cast("I")[index] if self.header.flags & KEYS else size

    def fitting(self, bytes_max: int) -> int:
        before = self._bytes_before(self.start)
        if self._bytes_before(self.stop) - before <= bytes_max:
            return len(self)
        return bisect_right(range(self.start, self.stop + 1), before + bytes_max, key=self._bytes_before) - 1

    def value_buffers(self) -> tuple[memoryview, memoryview, memoryview | None]:
        return self._column(0), self._column_data(0), self._column(VALUE_NULLS) if self.header.flags & VALUE_NULLS else None

    def key_buffers(self) -> tuple[memoryview, memoryview, memoryview | None] | None:
        if not self.header.flags & KEYS:
            return None
        return self._column(KEYS), self._column_data(KEYS), self._column(KEY_NULLS) if self.header.flags & KEY_NULLS else None

    def header_buffers(self) -> tuple[memoryview, memoryview] | None:
        """Return (offsets u32 × (header.count + 1), data) of the whole batch's headers, one blob per record; None when there are none."""
        return (self._column(HEADERS), self._column_data(HEADERS)) if self.header.flags & HEADERS else None

    def timestamp_buffer(self) -> memoryview | None:
        return self._column(TIMESTAMPS).cast("q") if self.header.flags & TIMESTAMPS else None

    def expiry_buffer(self) -> memoryview | None:
        return self._column(EXPIRIES).cast("q") if self.header.flags & EXPIRIES else None

    def delta_buffer(self) -> memoryview | None:
        return self._column(OFFSETS).cast("I") if self.header.flags & OFFSETS else None

    @property
    def expires(self) -> bool:
        return bool(self.header.flags & EXPIRIES)

    @property
    def has_headers(self) -> bool:
        return bool(self.header.flags & HEADERS)

    # Body.

    def _column(self, flag: int) -> memoryview:
        if self._body is None:
            self._decode()
        assert self._body is not None
        begin, end = self._layout[flag]
        return self._body[begin:end]

    def _column_data(self, flag: int) -> memoryview:
        offsets = self._column(flag)
        begin = self._layout[flag][1] + -self._layout[flag][1] % ALIGN
        assert self._body is not None
        return self._body[begin : begin + offsets.cast("I")[-1]]

    def _binary(self, flag: int, nulls: int) -> list[bytes | None]:
        all_ends = self._ends if flag == 0 and self._ends is not None else self._column(flag).cast("I")
        begin = self._layout[flag][1]
        begin += -begin % ALIGN
        start, stop, size = self.start, self.stop, 0 if flag else self._value_size
        items: list[bytes | None]
        if 0 < size <= EQUAL_SIZE_MAX:
            content = self._plain[begin + start * size : begin + stop * size]
            items = [content] if stop - start == 1 else equal_items(content, size, stop - start)
        else:
            # A compiled slice of bytes does not bound its ends, and those of a damaged batch may be anywhere.
            upper = min(begin + all_ends[stop], len(self._plain))
            content = self._plain[min(begin + all_ends[start], upper) : upper]
            items = [content] if stop - start == 1 else slices(all_ends[start : stop + 1], content)
        if nulls and self.header.flags & nulls:
            blank_nulls(items, self._column(nulls), self.start)
        return items

    def _decode(self) -> None:
        """Decrypt and decompress the body, and compute the column layout."""
        header = self.header
        plain = self._stored
        if header.flags & ENCRYPTED:
            if self._keyring is None:
                raise CorruptData(f"log {header.log}: offset {header.base_offset} is encrypted, and no key is configured")
            (sealed_size,) = _U32.unpack_from(plain, 0)
            plain = self._keyring.unseal(header.log, header.nonce, plain[4 : 4 + sealed_size], self._front[8:])
        if header.flags & COMPRESSED:
            plain = zstd.decompress(plain, size=header.raw_size)
        body = memoryview(plain)[: header.raw_size]
        if len(body) != header.raw_size:
            raise CorruptData(f"log {header.log}: body at offset {header.base_offset}: expected {header.raw_size} bytes, got {len(body)}")
        self._layout = layout(header, lambda position: int(_U32.unpack_from(body, position)[0]))
        self._body, self._plain = body, plain


def _owned(offsets: memoryview, data: memoryview, validity: memoryview | None = None) -> Column:
    return Column(offsets, bytes(data), validity, is_checked=True)


@lru_cache(1024)
def _columns(flags: int) -> tuple[tuple[int, int], ...]:
    """Return flag and kind of each column, in order: `_BINARY`, `_BITS`, or the width of an integer."""
    order = (
        (VALUE_NULLS, _BITS),
        (KEYS, _BINARY),
        (KEY_NULLS if flags & KEYS else 0, _BITS),
        (HEADERS, _BINARY),
        (TIMESTAMPS, 8),
        (EXPIRIES, 8),
        (OFFSETS, 4),
    )
    return ((0, _BINARY), *((flag, kind) for flag, kind in order if flags & flag))


def layout(header: BatchHeader, u32_at: Callable[[int], int]) -> dict[int, tuple[int, int]]:
    """Return the position of each column in the plain body. For a binary column this is its offsets array; the data follows it. `u32_at`
    returns the integer at a position of the body. Raises `CorruptData`."""
    found: dict[int, tuple[int, int]] = {}
    count, size, start = header.count, header.raw_size, 0
    for flag, kind in _columns(header.flags):
        stop = end = start + (4 * (count + 1) if kind == _BINARY else (count + 7) // 8 if kind == _BITS else kind * count)
        if kind == _BINARY and stop <= size:
            end += -end % ALIGN + u32_at(stop - 4)
        if end > size:
            raise CorruptData(f"log {header.log}: a column at offset {header.base_offset} is truncated")
        found[flag] = (start, stop)
        start = end + -end % ALIGN
    return found
