"""Arrow binary arrays in numpy: lengths, hashes and blobs of whole columns, without Python code per record."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InvalidRequest, LimitExceeded
from headrace.flight.request import READ_SCHEMA, TIMESTAMP
from headrace.limits import FLIGHT_UNPACKED_BYTES_MAX, HEADERS_BYTES_MAX, HEADERS_MAX

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int64s: TypeAlias = npt.NDArray[np.int64]
_FNV_BASIS: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_VECTOR_KEYS_MIN: Final = 64
"""Below this many keys, a numpy operation costs more than hashing their bytes in Python."""
_EMPTY: Final = np.zeros(0, np.uint8)
_MS: Final = 1_000
_TIME_MAX: Final = 253_402_300_799_999
"""The end of the year 9999 in Unix ms. The protocols accept later times, but those may overflow microseconds and calendars."""


class Binary:
    """A binary column without its array offset: `ends` has one entry more than there are items; `valid` is None without nulls.

    The bytes of a null are undefined in Arrow; here they are empty.
    """

    __slots__ = ("content", "ends", "valid")

    def __init__(self, array: pa.Array) -> None:
        self.valid: npt.NDArray[np.bool_] | None = None
        if array.null_count:
            self.valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
            array = pc.fill_null(array, b"")
        _, ends, content = array.buffers()
        count = len(array)
        self.ends: Int64s = (
            np.zeros(count + 1, np.int64) if ends is None else np.frombuffer(ends, np.int32, count + 1, array.offset * 4).astype(np.int64)
        )
        self.content: Bytes = _EMPTY if content is None else np.frombuffer(content, np.uint8)

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def lengths(self) -> Int64s:
        return np.diff(self.ends)


def checked(array: pa.Array, name: str) -> pa.Array:
    """Validate a column received from a peer. Arrow decodes messages without validating them; offsets, views or indices outside their
    buffers would read other memory of the broker or crash it.

    Raises `InvalidRequest`, which names the column, and `LimitExceeded` for a column that is too large when unpacked.
    """
    try:
        array.validate(full=True)
    except pa.ArrowException as failure:
        raise InvalidRequest(f"column {name!r} is damaged: {str(failure)[:200]}") from None
    if (size_bytes := _unpacked_bytes(array)) > FLIGHT_UNPACKED_BYTES_MAX:
        raise LimitExceeded(
            f"column {name!r} takes {size_bytes} bytes unpacked, more than {FLIGHT_UNPACKED_BYTES_MAX}; send it in smaller record batches"
        )
    return array


def texts_as_bytes(array: pa.Array) -> pa.Array:
    """Return the same buffers as a binary type: skips the UTF-8 validation."""
    if pa.types.is_string(array.type):
        return array.view(pa.binary())
    return array.view(pa.large_binary()) if pa.types.is_large_string(array.type) else array


def _unpacked_bytes(array: pa.Array) -> int:
    """Return the unpacked size of dictionary and view arrays, whose items may share bytes; 0 for others. The array is validated."""
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _unpacked_bytes(array.flatten())
    if pa.types.is_struct(kind):
        return sum(_unpacked_bytes(array.field(index)) for index in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        if not _is_bytes(kind.value_type) or pa.types.is_null(kind.value_type):
            return 0
        items, places = array.dictionary, array.indices.drop_null()
        return int(_lengths(items)[places.to_numpy(zero_copy_only=False)].sum()) if len(places) else 0
    if pa.types.is_binary_view(kind) or pa.types.is_string_view(kind):
        return int(_lengths(array).sum())
    return 0


def _lengths(array: pa.Array) -> Int64s:
    if pa.types.is_binary_view(array.type) or pa.types.is_string_view(array.type):
        # A view has 16 bytes, of which the first four are its length; undefined for nulls.
        if not len(array):
            return np.zeros(0, np.int64)  # there may be no buffer
        end = (array.offset + len(array)) * 4
        # The peer chooses the length of the buffer: the bytes after the last view need not be whole numbers.
        lengths = np.frombuffer(array.buffers()[1], np.int32, count=end)[array.offset * 4 :: 4].astype(np.int64)
        return np.where(pc.is_valid(array).to_numpy(zero_copy_only=False), lengths, 0) if array.null_count else lengths
    found: Int64s = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def as_binary(array: pa.Array, name: str) -> pa.Array:
    """Convert strings and bytes of any layout to `binary`. Raises `InvalidRequest`, which names the column."""
    kind = array.type
    if kind == pa.binary():
        return array
    if pa.types.is_dictionary(kind):
        return as_binary(cast(array, kind.value_type, name), name)
    if not _is_bytes(kind):
        raise InvalidRequest(f"column {name!r} is {kind}; expected binary or string")
    return cast(array, pa.binary(), name)


def _is_bytes(kind: pa.DataType) -> bool:
    is_known = (
        pa.types.is_binary,
        pa.types.is_string,
        pa.types.is_large_binary,
        pa.types.is_large_string,
        pa.types.is_binary_view,
        pa.types.is_string_view,
        pa.types.is_fixed_size_binary,
        pa.types.is_null,
    )
    return any(known(kind) for known in is_known)


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether `as_binary` accepts the type."""
    return _is_bytes(kind.value_type if pa.types.is_dictionary(kind) else kind)


def cast(array: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """Cast a column. Raises `InvalidRequest`, which names the column."""
    try:
        return array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowCapacityError) as failure:
        raise InvalidRequest(f"column {name!r} cannot be read as {kind}: {str(failure)[:200]}") from None


def fnv1a(keys: Binary) -> npt.NDArray[np.uint32]:
    """Return the 32-bit FNV-1a hash of each key. Hashes one byte of all keys per step, sorted by length so that short keys end first."""
    lengths = keys.lengths
    order = np.argsort(-lengths, kind="stable")
    starts, sizes = keys.ends[:-1][order], lengths[order]
    state = np.full(len(order), _FNV_BASIS, np.uint32)
    prime = np.uint32(_FNV_PRIME)
    longest = int(sizes[0]) if len(sizes) else 0
    position = 0
    while position < longest:
        count = int(np.searchsorted(-sizes, -position))  # keys longer than `position`
        if count < _VECTOR_KEYS_MIN:
            _finish(state[:count], keys.content, starts[:count] + position, sizes[:count] - position)
            break
        state[:count] ^= keys.content[starts[:count] + position]
        state[:count] *= prime
        position += 1
    hashes = np.empty_like(state)
    hashes[order] = state
    return hashes


def _finish(state: npt.NDArray[np.uint32], content: Bytes, starts: Int64s, sizes: Int64s) -> None:
    for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        hashed = int(state[index])
        for byte in content[start : start + size].tobytes():
            hashed = (hashed ^ byte) * _FNV_PRIME & 0xFFFFFFFF
        state[index] = hashed


def header_blobs(array: pa.Array) -> Binary | None:
    """Encode a `list<struct<key: string, value: binary>>` column in the stored format; None if no record has headers.

    Raises `InvalidRequest` for a header without a name, `LimitExceeded` for too many or too large ones.
    """
    if array.null_count:
        array = pc.fill_null(array, pa.scalar([], array.type)) if len(array) else array
    counts: Int64s = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    if not counts.any():
        return None
    pairs = array.flatten()
    if pairs.null_count or pairs.field(0).null_count:
        raise InvalidRequest("column 'headers' has a header without a name")
    names, values = (Binary(as_binary(pairs.field(index), "headers")) for index in (0, 1))
    if int(counts.max()) > HEADERS_MAX:
        raise LimitExceeded(f"a record of {int(counts.max())} headers exceeds the limit of {HEADERS_MAX}")
    carried = _sums(names.lengths + values.lengths, counts)
    if int(carried.max()) > HEADERS_BYTES_MAX:
        raise LimitExceeded(f"headers of {int(carried.max())} bytes exceed the limit of {HEADERS_BYTES_MAX} bytes")
    return _blobs(counts, names, values, carried)


def _sums(sizes: Int64s, counts: Int64s) -> Int64s:
    """Return the sums of consecutive sections of `sizes` that have the lengths `counts`."""
    totals = np.concatenate([[0], np.cumsum(sizes)])
    ends = np.concatenate([[0], np.cumsum(counts)])
    summed: Int64s = totals[ends[1:]] - totals[ends[:-1]]
    return summed


def _blobs(counts: Int64s, names: Binary, values: Binary, carried: Int64s) -> Binary:
    """Encode u16 count, then for each header u16 + name, u32 + value; empty for a record without headers."""
    sizes = np.where(counts > 0, 2 + 6 * counts + carried, 0)
    ends: Int64s = np.concatenate([[0], np.cumsum(sizes)])
    blob = np.zeros(int(ends[-1]), np.uint8)
    has = counts > 0
    _put_number(blob, ends[:-1][has], counts[has], 2)
    pair_sizes = 6 + names.lengths + values.lengths
    before = np.concatenate([[0], np.cumsum(pair_sizes)])[:-1]
    owner = np.repeat(np.arange(len(counts)), counts)
    firsts = np.concatenate([[0], np.cumsum(counts)])[:-1]
    places = ends[:-1][owner] + 2 + before - before[firsts[owner]]
    _put_number(blob, places, names.lengths, 2)
    _put_items(blob, places + 2, names)
    _put_number(blob, places + 2 + names.lengths, values.lengths, 4)
    _put_items(blob, places + 6 + names.lengths, values)
    made = Binary.__new__(Binary)
    made.ends, made.content, made.valid = ends, blob, None
    return made


def _put_number(blob: Bytes, places: Int64s, numbers: Int64s, size: int) -> None:
    for byte in range(size):
        blob[places + byte] = (numbers >> (8 * byte)) & 0xFF


def _put_items(blob: Bytes, places: Int64s, items: Binary) -> None:
    lengths: Any = items.lengths
    steps = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    blob[np.repeat(places, lengths) + steps] = items.content[np.repeat(items.ends[:-1], lengths) + steps]


@lru_cache(64)
def nulls(count: int, name: str) -> pa.Array:
    """Return nulls of the type of a column that readers may select."""
    return pa.nulls(count, READ_SCHEMA.field(name).type)


def timestamps(times: Int64s) -> pa.Array:
    """Return Unix ms as the column `timestamp`."""
    return pa.Array.from_buffers(TIMESTAMP, len(times), [None, pa.py_buffer(np.minimum(times, _TIME_MAX) * _MS)])
