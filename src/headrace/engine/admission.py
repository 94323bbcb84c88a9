"""What every engine refuses before it stages anything."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.columns import headers_bytes
from headrace.errors import InvalidRequest, RecordTooLarge
from headrace.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from headrace.records import AnyRun, ColumnRun, check_headers

__all__ = ["check_run", "headers_bytes"]

_TIME_MAX = (1 << 63) - 1


def check_run(run: AnyRun) -> int:
    """The size of keys and values together. Raises `RecordTooLarge`, `LimitExceeded` or `InvalidRequest`.

    Its cost is a C loop over each column, headers excepted; a run of columns was checked when it was made.
    """
    if isinstance(run, ColumnRun):
        return run.size_bytes
    count = len(run.values)
    if count == 0:
        raise InvalidRequest("a run needs at least one record")
    if run.keys is None and run.headers is None and run.timestamps is None and run.expiries is None:
        return _check_sizes(run.values, VALUE_BYTES_MAX)
    for column in (run.keys, run.headers, run.timestamps, run.expiries):
        if column is not None and len(column) != count:
            raise InvalidRequest(f"a column of {len(column)} entries does not fit a run of {count} records")
    size_bytes = _check_sizes(run.values, VALUE_BYTES_MAX)
    if run.keys is not None:
        size_bytes += _check_sizes(run.keys, KEY_BYTES_MAX)
    if run.headers is not None:
        for pairs in {id(pairs): pairs for pairs in run.headers if pairs}.values():
            check_headers(pairs)
    for times in (run.timestamps, run.expiries):
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
