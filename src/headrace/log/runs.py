"""From the runs of a flush to the runs of batches: joined where they are small, cut where they are large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX
from headrace.records import Headers, Run


def merge(runs: Sequence[Run], stamps: Sequence[int]) -> Run:
    """One run in the order of the given ones. `stamps` holds the clock for each; the first stamps a result without timestamps."""
    if len(runs) == 1:
        return runs[0]
    timestamps: list[int] | None = None
    if len(set(stamps)) > 1 or any(run.timestamps is not None for run in runs):
        timestamps = [
            at for run, now in zip(runs, stamps, strict=True) for at in ([now] * len(run) if run.timestamps is None else run.timestamps)
        ]
    return Run(
        [value for run in runs for value in run.values],
        None if all(run.keys is None for run in runs) else [key for run in runs for key in run.keys or [None] * len(run)],
        None if all(run.headers is None for run in runs) else [pairs for run in runs for pairs in run.headers or [()] * len(run)],
        timestamps,
        None if all(run.expiries is None for run in runs) else [at for run in runs for at in run.expiries or [0] * len(run)],
    )


def cut(run: Run) -> Iterator[Run]:
    """The run in pieces that each make one batch. A record larger than the target gets a batch of its own."""
    if run.headers is None and len(run) <= BATCH_RECORDS_MAX and run.size_bytes <= BATCH_BYTES_TARGET:
        yield run
        return
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
    for value, key, pairs in zip(run.values, run.keys or nothing, run.headers or nothing, strict=True):
        yield len(value or b"") + len(key or b"") + (headers_bytes(pairs) + 8 * len(pairs) if pairs else 0) + 8


def headers_bytes(pairs: Headers) -> int:
    """Names and values together: what `limits.HEADERS_BYTES_MAX` counts."""
    return sum(len(name.encode()) + len(value) for name, value in pairs)
