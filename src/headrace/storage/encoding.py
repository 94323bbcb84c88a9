"""Encoding of record batches and column batches in the format that `batch.py` draws."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final, cast

from google_crc32c import extend as crc32c_extend
from google_crc32c import value as crc32c

from headrace.columns import EQUAL_ROWS_MIN, Column, encode_headers, equal_rows, packed
from headrace.limits import BATCH_BYTES_MAX, KIB
from headrace.records import AnyBatch, ColumnBatch, RecordBatch
from headrace.storage import zstd
from headrace.storage.batch import (
    ALIGN,
    COMPRESSED,
    ENCRYPTED,
    EXPIRIES,
    HEADER_BYTES,
    HEADERS,
    KEY_NULLS,
    KEYS,
    MAGIC,
    OFFSETS,
    REFERENCED,
    TIMESTAMPS,
    VALUE_NULLS,
    VERSION,
    BatchHeader,
    Built,
    BuiltInPlace,
)
from headrace.storage.checksums import joined
from headrace.storage.crypt import NONCE_BYTES, TAG_BYTES, Keyring

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

_COVERED = struct.Struct("<IHHIIQIIqq12sI")
assert _COVERED.size == HEADER_BYTES - 8, "the checksum covers the rest of the header"
_U32 = struct.Struct("<I")
_SINGLE = struct.Struct("<IHHIIQIIqq12sIII")
assert _SINGLE.size == _COVERED.size + 8, "the covered part of the header, and the offsets array of one record"
_PLACE = struct.Struct("<IIQ")
"""Log, count and base offset."""
_PLACE_AT: Final = 8
assert struct.calcsize("<IHH") == _PLACE_AT, "size, version and flags are before the log"
_MAGIC_CRC = struct.Struct("<4sI")
_NO_NONCE: Final = bytes(NONCE_BYTES)
SINGLE_BYTES: Final = 16
"""Size of a record in a batch of several, beside its value: its end, its time, and its part of the padding and of the header."""
_LOG_AT: Final = 16
_BASE_OFFSET_AT: Final = 24
assert struct.calcsize("<4sIIHH") == _LOG_AT and struct.calcsize("<4sIIHHII") == _BASE_OFFSET_AT, "fields that differ from row to row"
_CRC_AT: Final = 4
_COVERED_AT: Final = 8
_BLOCK: Final = 64
"""Rows whose checksums are computed by one call."""
_PARTS_FROM_BYTES: Final = 64 * KIB
"""From this size on, the parts of a batch are written separately: copying them costs more than a few entries of a write vector."""
_PADDING: Final = [bytes(-size % ALIGN) for size in range(ALIGN)]


def encode(
    log: int,
    base_offset: int,
    batch: AnyBatch,
    *,
    now: int,
    compress: bool = False,
    keyring: Keyring | None = None,
    deltas: Sequence[int] | None = None,
    span: int | None = None,
) -> bytes:
    """Encode one batch. `now` stamps a batch that has no timestamps. Compaction passes `deltas` and `span`, because it leaves gaps."""
    return b"".join(build(log, base_offset, batch, now=now, compress=compress, keyring=keyring, deltas=deltas, span=span)[1])


def build(
    log: int,
    base_offset: int,
    batch: AnyBatch,
    *,
    now: int,
    compress: bool = False,
    keyring: Keyring | None = None,
    deltas: Sequence[int] | None = None,
    span: int | None = None,
) -> Built:
    """Encode one batch as parts, and return them with the parsed header."""
    return cast("Built", _build(log, base_offset, batch, now, 0, compress, keyring, deltas, span))


def build_large(
    log: int, base_offset: int, batch: AnyBatch, *, now: int, compress: bool = False, keyring: Keyring | None = None
) -> BuiltInPlace:
    """Encode a batch of a large append as parts, marked as such. Columns are not copied, unless they are compressed or encrypted."""
    return _build(log, base_offset, batch, now, REFERENCED, compress, keyring, None, None)


def _build(
    log: int,
    base_offset: int,
    batch: AnyBatch,
    now: int,
    marked: int,
    compress: bool,
    keyring: Keyring | None,
    deltas: Sequence[int] | None,
    span: int | None,
) -> BuiltInPlace:
    count = len(batch.values)
    assert count > 0, "a batch has at least one record"
    columns: list[SizedBuffer] = []
    known: Column | None = None
    if isinstance(batch, ColumnBatch):
        known = batch.values
        flags, low, high = _put_buffers(columns, batch, now, in_place=marked != 0)
    else:
        if not (compress or keyring or deltas or batch.keys or batch.headers or batch.timestamps or batch.expiries):
            try:
                return build_plain(log, base_offset, batch.values, now, marked)  # type: ignore[arg-type]  # a tombstone raises TypeError
            except TypeError:
                pass
        flags, low, high = _put_lists(columns, batch, now)
    if deltas is not None:
        flags |= OFFSETS
        _put(columns, array("I", deltas).tobytes())
    return seal_columns(
        log, base_offset, count, columns, flags | marked, (low, high), compress=compress, keyring=keyring, span=span, known=known
    )


def seal_columns(
    log: int,
    base_offset: int,
    count: int,
    columns: list[SizedBuffer],
    flags: int,
    times: tuple[int, int],
    *,
    compress: bool,
    keyring: Keyring | None,
    span: int | None = None,
    known: Column | None = None,
) -> BuiltInPlace:
    """Compress, encrypt and checksum the columns of one batch. `times` are its lowest and highest timestamp; `known` is a column whose
    checksum may be known. If all columns are bytes, the result is a `Built`."""
    raw_size = sum(map(len, columns))
    if compress:
        squeezed = zstd.compress(b"".join(columns))
        if len(squeezed) < raw_size:
            columns, flags = [squeezed], flags | COMPRESSED
    nonce, size = _NO_NONCE, sum(map(len, columns))
    if keyring is not None:
        flags, nonce, size = flags | ENCRYPTED, keyring.next_nonce(), 4 + size + TAG_BYTES
    padding = _PADDING[size % ALIGN]
    size += HEADER_BYTES + len(padding)
    assert size <= BATCH_BYTES_MAX
    header = BatchHeader(0, size, flags, log, count, base_offset, count if span is None else span, raw_size, *times, nonce)
    return header, _seal(header, [*columns, padding], keyring, known)


def build_plain(log: int, base_offset: int, values: Sequence[bytes], now: int, flags: int = 0) -> Built:
    """Build a batch of values only. This is the fast path: a flush to a thousand partitions builds a thousand of these. A tombstone
    raises `TypeError`."""
    count = len(values)
    if count == 1:
        content = values[0]
        length = len(content)
        raw_size = 8 + length + -length % ALIGN
        size = HEADER_BYTES + raw_size
        if size < _PARTS_FROM_BYTES:
            front = _SINGLE.pack(size, VERSION, flags, log, 1, base_offset, 1, raw_size, now, now, _NO_NONCE, 0, 0, length)
            front = b"".join((front, content, _PADDING[length % ALIGN]))
            crc = crc32c(front)
            header = BatchHeader(crc, size, flags, log, 1, base_offset, 1, raw_size, now, now, _NO_NONCE)
            return header, (b"".join((MAGIC, _U32.pack(crc), front)),)
    content = b"".join(values)
    padding = _PADDING[len(content) % ALIGN]
    ends = array("I", accumulate(map(len, values), initial=0)).tobytes()
    ends += _PADDING[len(ends) % ALIGN]
    raw_size = len(ends) + len(content) + len(padding)
    size = HEADER_BYTES + raw_size
    assert size <= BATCH_BYTES_MAX
    front = _COVERED.pack(size, VERSION, flags, log, count, base_offset, count, raw_size, now, now, _NO_NONCE, 0) + ends
    parts: tuple[bytes, ...]
    if size < _PARTS_FROM_BYTES:
        front = b"".join((front, content, padding))
        crc, parts = crc32c(front), ()
    else:
        crc, parts = crc32c_extend(crc32c_extend(crc32c(front), content), padding), (content, padding)
    header = BatchHeader(crc, size, flags, log, count, base_offset, count, raw_size, now, now, _NO_NONCE)
    return header, (MAGIC + _U32.pack(crc) + front, *parts)


class SingleBuilder:
    """Builds batches that hold one value. What they have in common is encoded once, as long as the values have the same size."""

    __slots__ = ("_front", "_middle", "_now", "_padding", "_raw_size", "_size", "_value_bytes")

    def __init__(self, now: int) -> None:
        self._now = now
        self._value_bytes = -1
        """Size of the last value, which the following attributes are valid for."""
        self._front = self._middle = self._padding = b""
        """Encoded fields before the log, after the base offset, and after the value."""
        self._size = self._raw_size = 0

    def build(self, log: int, base_offset: int, value: bytes) -> Built:
        length = len(value)
        if length != self._value_bytes:
            if HEADER_BYTES + 2 * ALIGN + length >= _PARTS_FROM_BYTES:
                return build_plain(log, base_offset, [value], self._now)
            self._prepare(length)
        now = self._now
        covered = b"".join((self._front, _PLACE.pack(log, 1, base_offset), self._middle, value, self._padding))
        crc = crc32c(covered)
        header = BatchHeader(crc, self._size, 0, log, 1, base_offset, 1, self._raw_size, now, now, _NO_NONCE)
        return header, (_MAGIC_CRC.pack(MAGIC, crc) + covered,)

    def _prepare(self, length: int) -> None:
        self._value_bytes = length
        self._raw_size = 8 + length + -length % ALIGN
        self._size = HEADER_BYTES + self._raw_size
        whole = _SINGLE.pack(self._size, VERSION, 0, 0, 1, 0, 1, self._raw_size, self._now, self._now, _NO_NONCE, 0, 0, length)
        self._front, self._middle = whole[:_PLACE_AT], whole[_PLACE_AT + _PLACE.size :]
        self._padding = _PADDING[length % ALIGN]


def encode_singles(logs: Sequence[int], offsets: Sequence[int], values: Sequence[bytes], now: int) -> bytes:
    """Encode a batch for each of these values, and return all batches end to end. They are those of `build_plain`.

    Batches of values of one size are rows of a table. Its columns are written one byte of all rows at a time, so that only the checksum
    costs a call for each.
    """
    length, count = len(values[0]), len(values)
    size = HEADER_BYTES + 8 + length + -length % ALIGN
    if count < EQUAL_ROWS_MIN or size >= _PARTS_FROM_BYTES or list(map(len, values)).count(length) < count:
        single, parts = SingleBuilder(now), list[bytes]()
        for log, offset, value in zip(logs, offsets, values, strict=True):
            parts += single.build(log, offset, value)[1]
        return b"".join(parts)
    raw_size = size - HEADER_BYTES
    front = _SINGLE.pack(size, VERSION, 0, 0, 1, 0, 1, raw_size, now, now, _NO_NONCE, 0, 0, length)
    rows = equal_rows(values, length, _MAGIC_CRC.pack(MAGIC, 0) + front, _PADDING[length % ALIGN])
    _write_column(rows, size, _LOG_AT, array("I", logs))
    _write_column(rows, size, _BASE_OFFSET_AT, array("Q", offsets))
    crcs: list[int] = []
    for first in range(0, count, _BLOCK):
        covered = _covered_rows(size, min(_BLOCK, count - first)).unpack_from(rows, first * size)
        crcs += map(crc32c, covered)
    _write_column(rows, size, _CRC_AT, array("I", crcs))
    return bytes(rows)


@lru_cache(maxsize=256)
def _covered_rows(size: int, count: int) -> struct.Struct:
    """The bytes of so many rows that their checksums cover."""
    return struct.Struct(f"{_COVERED_AT}x{size - _COVERED_AT}s" * count)


def _write_column(rows: bytearray, row_bytes: int, at: int, numbers: array[int]) -> None:
    """Write a number at `at` of each row, where there are zeros."""
    width, whole = numbers.itemsize, numbers.tobytes()
    for number in range(width):
        column = whole[number::width]
        if column.count(0) < len(column):
            rows[at + number :: row_bytes] = column


def _seal(header: BatchHeader, parts: list[SizedBuffer], keyring: Keyring | None, known: Column | None) -> tuple[SizedBuffer, ...]:
    """Return the parts of the finished batch, and set the checksum in `header`."""
    checksum, content = (None, None) if known is None else (known.checksum, known.content)
    front = header.encode()[8:]
    if keyring is not None:
        *columns, padding = parts
        sealed = keyring.seal(header.log, header.nonce, b"".join(columns), front)
        parts = [_U32.pack(len(sealed)), sealed, padding]
    crc = crc32c(front)
    for part in parts:
        if checksum is not None and part is content:
            crc = joined(crc, checksum, len(part))
        else:
            crc = crc32c_extend(crc, part)
    header.crc = crc
    front = b"".join((MAGIC, _U32.pack(crc), front))
    return (front, *parts) if header.size >= _PARTS_FROM_BYTES else (b"".join((front, *parts)),)


def _put_lists(columns: list[SizedBuffer], batch: RecordBatch, now: int) -> tuple[int, int, int]:
    """Append the columns of a batch. Returns flags, lowest and highest timestamp."""
    flags = put_binary(columns, packed(batch.values), 0, VALUE_NULLS)
    if batch.keys is not None:
        flags |= put_binary(columns, packed(batch.keys), KEYS, KEY_NULLS)
    if batch.headers is not None:
        # Publishers often share one headers object among all records; it is encoded once.
        blobs = {id_: encode_headers(pairs) if pairs else b"" for id_, pairs in {id(pairs): pairs for pairs in batch.headers}.items()}
        flags |= put_binary(columns, packed([blobs[id(pairs)] for pairs in batch.headers]), HEADERS, 0)
    low = high = now
    if batch.timestamps is not None:
        low, high = min(batch.timestamps), max(batch.timestamps)
        if low != high:
            flags |= TIMESTAMPS
            columns.append(array("q", batch.timestamps).tobytes())
    if batch.expiries is not None and any(batch.expiries):
        flags |= EXPIRIES
        columns.append(array("q", batch.expiries).tobytes())
    return flags, low, high


def _put_buffers(columns: list[SizedBuffer], batch: ColumnBatch, now: int, *, in_place: bool) -> tuple[int, int, int]:
    """Append the columns of a batch that has them already. The bytes are the same as those of `_put_lists`. With `in_place`, they may be
    in buffers of another library."""
    values, keys, headers = batch.values, batch.keys, batch.headers
    flags = put_binary(columns, (values.offsets, values.content if in_place else values.data, values.validity), 0, VALUE_NULLS)
    if keys is not None:
        flags |= put_binary(columns, (keys.offsets, keys.content if in_place else keys.data, keys.validity), KEYS, KEY_NULLS)
    if headers is not None:
        flags |= put_binary(columns, (headers.offsets, headers.content if in_place else headers.data, None), HEADERS, 0)
    low = high = now
    if batch.timestamps is not None:
        low, high = batch.oldest, batch.newest
        if low != high:
            flags |= TIMESTAMPS
            columns.append(batch.timestamps.tobytes())
    if batch.expiries is not None:
        expiries = batch.expiries.tobytes()
        if expiries != bytes(len(expiries)):
            flags |= EXPIRIES
            columns.append(expiries)
    return flags, low, high


def _put(columns: list[SizedBuffer], data: SizedBuffer) -> None:
    columns.append(data)
    if len(data) % ALIGN:
        columns.append(_PADDING[len(data) % ALIGN])


def put_binary(columns: list[SizedBuffer], column: tuple[bytes, SizedBuffer, bytes | None], flag: int, nulls: int) -> int:
    """Append an offsets array, its data and its validity bits, if any. Returns the flags."""
    offsets, data, validity = column
    _put(columns, offsets)
    _put(columns, data)
    if validity is None:
        return flag
    _put(columns, validity)
    return flag | nulls
