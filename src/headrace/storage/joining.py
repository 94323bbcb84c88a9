"""Joining of small batches, so that a log that is filled one record at a time is as small and as fast to read as one filled in bulk.

The journal has a batch for each flush. When the batches leave the tail for a segment, adjacent small ones become one batch with the same
records: offsets, timestamps, keys, headers, expiries and tombstones stay as they are. Columns are concatenated, no record is decoded.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from headrace.columns import packed
from headrace.limits import BATCH_RECORDS_MAX
from headrace.storage.batch import (
    ALIGN,
    ENCRYPTED,
    EXPIRIES,
    HEADER_BYTES,
    HEADERS,
    KEY_NULLS,
    KEYS,
    OFFSETS,
    TIMESTAMPS,
    VALUE_NULLS,
    BatchHeader,
    Built,
    StoredBatch,
)
from headrace.storage.crypt import Keyring
from headrace.storage.encoding import build_plain, put_binary, seal_columns

if TYPE_CHECKING:
    from _typeshed import SizedBuffer

_JOINED_MIN: Final = 8
"""A batch is joined if so many of its size fit into a joined one. The header is a small part of a larger batch."""
_VALUE_AT: Final = HEADER_BYTES + 8
"""Position of the value in a batch that holds nothing else, after the offsets array."""
_VALUE_BYTES = struct.Struct("<I")
_Buffers: TypeAlias = tuple[memoryview, memoryview, memoryview | None] | tuple[memoryview, memoryview]


def join(batches: Sequence[Built], bytes_max: int, *, compress: bool, keyring: Keyring | None) -> list[Built]:
    """Return the same records in fewer batches with columns of up to `bytes_max` bytes.

    `keyring` opens encrypted batches. A joined batch is encrypted if its parts are.
    """
    if len(batches) > 1 and _is_one_group([built[0] for built in batches], bytes_max):
        return [_join(batches, compress, keyring)]
    return [group[0] if len(group) == 1 else _join(group, compress, keyring) for group in _groups(batches, bytes_max)]


def join_singles(log: int, base_offset: int, values: Sequence[bytes], times: Sequence[int], bytes_max: int) -> list[Built]:
    """Return batches of these records, as `join` does of a batch for each of them."""
    raw_bytes_max = max(map(len, values)) + 2 * ALIGN
    if 1 < len(values) <= BATCH_RECORDS_MAX and raw_bytes_max * max(len(values), _JOINED_MIN) <= bytes_max:
        columns: list[SizedBuffer] = []
        flags = put_binary(columns, packed(values), 0, VALUE_NULLS)
        low, high = min(times), max(times)
        if low != high:
            flags |= TIMESTAMPS
            columns.append(array("q", times).tobytes())
        sealed = seal_columns(log, base_offset, len(values), columns, flags, (low, high), compress=False, keyring=None)
        return [cast("Built", sealed)]
    rows = zip(range(base_offset, base_offset + len(values)), values, times, strict=True)
    return join([build_plain(log, offset, [value], time) for offset, value, time in rows], bytes_max, compress=False, keyring=None)


def fitting(batches: list[Built], room: int) -> list[Built]:
    """Return as many batches from the front as fit into `room` bytes, at least one."""
    for count, (header, _) in enumerate(batches):
        room -= header.size
        if room < 0:
            return batches[: max(count, 1)]
    return batches


def _is_one_group(headers: Sequence[BatchHeader], bytes_max: int) -> bool:
    """Return whether all batches become one. The tails of thousands of logs are short, and looking at each column is several times as
    fast as looking at each batch."""
    sizes, flags = [header.raw_size for header in headers], {header.flags for header in headers}
    if sum(sizes) > bytes_max or max(sizes) * _JOINED_MIN > bytes_max or len(flags) > 1 or headers[0].flags & OFFSETS:
        return False
    count, span = sum([header.count for header in headers]), sum([header.span for header in headers])
    return span == count <= BATCH_RECORDS_MAX and headers[-1].next_offset - headers[0].base_offset == span


def _groups(batches: Sequence[Built], bytes_max: int) -> Iterator[list[Built]]:
    """Yield adjacent batches that become one batch."""
    group: list[Built] = []
    size = count = 0
    for built in batches:
        header = built[0]
        if group and not (
            header.base_offset == group[-1][0].next_offset
            and size + header.raw_size <= bytes_max
            and count + header.count <= BATCH_RECORDS_MAX
            and _is_small(header, bytes_max)
            and _is_small(group[0][0], bytes_max)
            and not (header.flags ^ group[0][0].flags) & ENCRYPTED
        ):
            yield group
            group, size, count = [], 0, 0
        group.append(built)
        size += header.raw_size
        count += header.count
    if group:
        yield group


def _is_small(header: BatchHeader, bytes_max: int) -> bool:
    return header.raw_size * _JOINED_MIN <= bytes_max and not header.flags & OFFSETS and header.span == header.count


def _join(group: Sequence[Built], compress: bool, keyring: Keyring | None) -> Built:
    headers = [header for header, _ in group]
    first, flags, count = headers[0], 0, sum([header.count for header in headers])
    for found in {header.flags for header in headers}:
        flags |= found
    columns: list[SizedBuffer] = []
    parts: list[StoredBatch] = []
    if flags == 0 and count == len(group):
        kept = put_binary(columns, _single_values(group), 0, VALUE_NULLS)
    else:
        parts = [StoredBatch.of_built(built, keyring) for built in group]
        kept = put_binary(columns, _binary(parts, StoredBatch.value_buffers), 0, VALUE_NULLS)
    if flags & KEYS:
        kept |= put_binary(columns, _binary(parts, StoredBatch.key_buffers), KEYS, KEY_NULLS)
    if flags & HEADERS:
        offsets, data, _ = _binary(parts, StoredBatch.header_buffers)
        kept |= put_binary(columns, (offsets, data, None), HEADERS, 0)
    low, high = min([header.min_timestamp for header in headers]), max([header.max_timestamp for header in headers])
    if low != high:
        kept |= TIMESTAMPS
        columns.append(b"".join(part.timestamp_buffer() or _same(part.header) for part in parts) if parts else _stamps(headers))
    if flags & EXPIRIES:
        kept |= EXPIRIES
        columns.append(b"".join(part.expiry_buffer() or bytes(8 * len(part)) for part in parts))
    sealing = keyring if flags & ENCRYPTED else None
    sealed = seal_columns(first.log, first.base_offset, count, columns, kept, (low, high), compress=compress, keyring=sealing)
    return cast("Built", sealed)


def _single_values(group: Sequence[Built]) -> tuple[bytes, bytes, None]:
    """Return the column of batches that hold one value and nothing else. This is the common case, and several times as fast."""
    wholes = [parts[0] if len(parts) == 1 else b"".join(parts) for _, parts in group]
    unpack = _VALUE_BYTES.unpack_from
    values = [whole[_VALUE_AT : _VALUE_AT + unpack(whole, _VALUE_AT - 4)[0]] for whole in wholes]
    return array("I", accumulate(map(len, values), initial=0)).tobytes(), b"".join(values), None


def _stamps(headers: Sequence[BatchHeader]) -> bytes:
    return array("q", [header.min_timestamp for header in headers]).tobytes()


def _same(header: BatchHeader) -> bytes:
    return (array("q", [header.min_timestamp]) * header.count).tobytes()


def _binary(parts: list[StoredBatch], buffers: Callable[[StoredBatch], _Buffers | None]) -> tuple[bytes, bytes, bytes | None]:
    """Concatenate one column. The records of a part that does not have it get empty items that are null."""
    ends, data, marks = array("I", [0]), list[memoryview](), list[str]()
    total, has_nulls = 0, False
    for part in parts:
        found, count = buffers(part), len(part)
        if found is None:
            ends.extend(repeat(total, count))
            marks.append("0" * count)
            has_nulls = True
            continue
        offsets, content, *validity = found
        ends.extend([end + total for end in offsets.cast("I")[1:]])
        total = ends[-1]
        data.append(content)
        if validity and validity[0] is not None:
            marks.append(f"{int.from_bytes(validity[0], 'little'):0{count}b}"[::-1])
            has_nulls = True
        else:
            marks.append("1" * count)
    bits = int("".join(marks)[::-1], 2).to_bytes(len(ends) + 6 >> 3, "little") if has_nulls else None
    return ends.tobytes(), b"".join(data), bits
