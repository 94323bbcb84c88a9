"""What every engine refuses before it stages anything."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.columns import headers_bytes
from headrace.errors import InvalidRequest, RecordTooLarge
from headrace.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from headrace.records import AnyBatch, ColumnBatch, check_headers

__all__ = ["check_batch", "headers_bytes"]

_TIME_MAX = (1 << 63) - 1


def check_batch(batch: AnyBatch) -> int:
    """The size of keys and values together. Raises `RecordTooLarge`, `LimitExceeded` or `InvalidRequest`.

    Its cost is a C loop over each column, headers excepted; a run of columns was checked when it was made.
    """
    if isinstance(batch, ColumnBatch):
        return batch.size_bytes
    count = len(batch.values)
    if count == 0:
        raise InvalidRequest("a run needs at least one record")
    if batch.keys is None and batch.headers is None and batch.timestamps is None and batch.expiries is None:
        return _check_sizes(batch.values, VALUE_BYTES_MAX)
    for column in (batch.keys, batch.headers, batch.timestamps, batch.expiries):
        if column is not None and len(column) != count:
            raise InvalidRequest(f"a column of {len(column)} entries does not fit a run of {count} records")
    size_bytes = _check_sizes(batch.values, VALUE_BYTES_MAX)
    if batch.keys is not None:
        size_bytes += _check_sizes(batch.keys, KEY_BYTES_MAX)
    if batch.headers is not None:
        for pairs in {id(pairs): pairs for pairs in batch.headers if pairs}.values():
            check_headers(pairs)
    for times in (batch.timestamps, batch.expiries):
        if times is not None and not 0 <= min(times) <= max(times) <= _TIME_MAX:
            raise InvalidRequest("a time is before 1970 or too far ahead")
    return size_bytes


def _check_sizes(items: Sequence[bytes | None], bytes_max: int) -> int:
    try:
        sizes = list(map(len, items))  # type: ignore[arg-type]  # None is found by the TypeError: cheaper than looking
    except TypeError:
        sizes = [0 if item is None else len(item) for item in items]
    largest = max(sizes)
    if largest > bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)
    return sum(sizes)
