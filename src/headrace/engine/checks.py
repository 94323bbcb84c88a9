"""Checks of a batch before it is staged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.errors import InvalidRequest, RecordTooLarge
from headrace.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from headrace.records import AnyBatch, ColumnBatch, check_headers

_TIME_MAX: Final = (1 << 63) - 1


def check_batch(batch: AnyBatch) -> int:
    """Return the size of keys and values. Raises `RecordTooLarge`, `LimitExceeded` or `InvalidRequest`.

    Each column costs one C loop, except headers. A column batch is checked when it is created.
    """
    if isinstance(batch, ColumnBatch):
        return batch.size_bytes
    count = len(batch.values)
    if count == 0:
        raise InvalidRequest("empty batch: expected at least one record")
    if batch.keys is None and batch.headers is None and batch.timestamps is None and batch.expiries is None:
        if count == 1 and (value := batch.values[0]) is not None and len(value) <= VALUE_BYTES_MAX:
            return len(value)
        return _check_sizes(batch.values, VALUE_BYTES_MAX)
    for column in (batch.keys, batch.headers, batch.timestamps, batch.expiries):
        if column is not None and len(column) != count:
            raise InvalidRequest(f"column length: expected {count} entries, got {len(column)}")
    size_bytes = _check_sizes(batch.values, VALUE_BYTES_MAX)
    if batch.keys is not None:
        size_bytes += _check_sizes(batch.keys, KEY_BYTES_MAX)
    if batch.headers is not None:
        for pairs in {id(pairs): pairs for pairs in batch.headers if pairs}.values():
            check_headers(pairs)
    for times in (batch.timestamps, batch.expiries):
        if times is not None and not 0 <= min(times) <= max(times) <= _TIME_MAX:
            raise InvalidRequest("a timestamp or expiry is before 1970 or above 2^63 - 1 (Unix ms)")
    return size_bytes


def _check_sizes(items: Sequence[bytes | None], bytes_max: int) -> int:
    try:
        sizes = list(map(len, items))  # type: ignore[arg-type]  # None raises TypeError: cheaper than a test of each
    except TypeError:
        sizes = [0 if item is None else len(item) for item in items]
    largest = max(sizes)
    if largest > bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)
    return sum(sizes)
