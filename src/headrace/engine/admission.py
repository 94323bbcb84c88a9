"""What every engine refuses before it stages anything, and how it cuts what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.errors import InvalidRequest, LimitExceeded, RecordTooLarge
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX, HEADERS_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from headrace.records import Headers, Run

_TIME_MAX = (1 << 63) - 1


def check_run(run: Run) -> None:
    """Raises `RecordTooLarge`, `LimitExceeded` or `InvalidRequest`. Its cost is a C loop over each column, headers excepted."""
    count = len(run.values)
    if count == 0:
        raise InvalidRequest("a run needs at least one record")
    for column in (run.keys, run.headers, run.timestamps, run.expiries):
        if column is not None and len(column) != count:
            raise InvalidRequest(f"a column of {len(column)} entries does not fit a run of {count} records")
    _check_sizes(run.values, VALUE_BYTES_MAX)
    if run.keys is not None:
        _check_sizes(run.keys, KEY_BYTES_MAX)
    if run.headers is not None:
        for pairs in filter(None, run.headers):
            _check_headers(pairs)
    for times in (run.timestamps, run.expiries):
        if times is not None and not 0 <= min(times) <= max(times) <= _TIME_MAX:
            raise InvalidRequest("a time is before 1970 or too far ahead")


def _check_sizes(items: Sequence[bytes | None], bytes_max: int) -> None:
    try:
        largest = max(map(len, items))  # type: ignore[arg-type]  # None is found by the TypeError: cheaper than looking
    except TypeError:
        largest = max((len(item) for item in items if item is not None), default=0)
    if largest > bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=bytes_max)


def _check_headers(pairs: Headers) -> None:
    if len(pairs) > HEADERS_MAX:
        raise LimitExceeded(f"a record of {len(pairs)} headers exceeds the limit of {HEADERS_MAX}")
    size = headers_bytes(pairs)
    if size > HEADERS_BYTES_MAX:
        raise LimitExceeded(f"headers of {size} bytes exceed the limit of {HEADERS_BYTES_MAX} bytes")


def headers_bytes(pairs: Headers) -> int:
    """Names and values together: what `limits.HEADERS_BYTES_MAX` counts."""
    return sum(len(name.encode()) + len(value) for name, value in pairs)


def cut(run: Run) -> Iterator[Run]:
    """The run in pieces that each make one batch. A record larger than the target gets a batch of its own."""
    start, total = 0, 0
    for index, size in enumerate(_sizes(run)):
        if index > start and (total + size > BATCH_BYTES_TARGET or index - start == BATCH_RECORDS_MAX):
            yield run[start:index]
            start, total = index, 0
        total += size
    yield run if start == 0 else run[start : len(run)]


def _sizes(run: Run) -> Iterator[int]:
    """What each record adds to its batch, give or take its entries in fixed-width columns."""
    nothing: Sequence[None] = [None] * len(run)
    columns = zip(run.values, run.keys or nothing, run.headers or nothing, strict=True)
    for value, key, pairs in columns:
        yield len(value or b"") + len(key or b"") + (headers_bytes(pairs) + 8 * len(pairs) if pairs else 0) + 8
