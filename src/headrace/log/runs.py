"""From the runs of a flush to the runs of batches: joined where they are small, cut where they are large."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from headrace.columns import headers_bytes
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX
from headrace.records import AnyRun, ColumnRun, Run


def pieces(runs: Sequence[AnyRun], now: int, *, small: bool) -> list[AnyRun]:
    """The records of these runs, in order, as runs that each make one batch. `small`: together they are below the target.

    A run of columns is as good as a batch: it is neither joined nor cut.
    """
    if small and len(runs) == 1 and (runs[0].headers is None or isinstance(runs[0], ColumnRun)) and len(runs[0]) <= BATCH_RECORDS_MAX:
        return [runs[0]]
    found: list[AnyRun] = []
    waiting: list[Run] = []
    for run in runs:
        if isinstance(run, ColumnRun):
            _join(waiting, now, small, found)
            waiting = []
            found.append(run)
        else:
            waiting.append(run)
    _join(waiting, now, small, found)
    return found


def _join(runs: list[Run], now: int, small: bool, found: list[AnyRun]) -> None:
    if not runs:
        return
    run = merge(runs, now)
    if small and run.headers is None and len(run.values) <= BATCH_RECORDS_MAX:
        found.append(run)
    else:
        found += cut(run)


def merge(runs: Sequence[Run], now: int) -> Run:
    """One run in the order of the given ones. `now` stamps those that have no timestamps, if others have."""
    if len(runs) == 1:
        return runs[0]
    timestamps: list[int] | None = None
    if any(run.timestamps is not None for run in runs):
        timestamps = [at for run in runs for at in ([now] * len(run) if run.timestamps is None else run.timestamps)]
    return Run(
        list(chain.from_iterable(run.values for run in runs)),
        None if all(run.keys is None for run in runs) else [key for run in runs for key in run.keys or [None] * len(run)],
        None if all(run.headers is None for run in runs) else [pairs for run in runs for pairs in run.headers or [()] * len(run)],
        timestamps,
        None if all(run.expiries is None for run in runs) else [at for run in runs for at in run.expiries or [0] * len(run)],
    )


def cut(run: Run) -> Iterator[Run]:
    """The run in pieces that each make one batch. A record larger than the target gets a batch of its own."""
    ends = _ends(run)
    count, start, before = len(ends), 0, 0
    while start < count:
        stop = max(bisect_right(ends, before + BATCH_BYTES_TARGET, start, min(start + BATCH_RECORDS_MAX, count)), start + 1)
        yield run if stop - start == count else run[start:stop]
        start, before = stop, ends[stop - 1]


def _ends(run: Run) -> list[int]:
    """The running total of what records take in a batch, their entries in fixed-width columns aside."""
    if run.keys is None and run.headers is None:
        try:
            return list(accumulate(map(len, run.values)))  # type: ignore[arg-type]  # None is found by the TypeError: cheaper than looking
        except TypeError:
            pass
    return list(accumulate(_sizes(run)))


def _sizes(run: Run) -> Iterator[int]:
    nothing: Sequence[None] = [None] * len(run)
    for value, key, pairs in zip(run.values, run.keys or nothing, run.headers or nothing, strict=True):
        yield len(value or b"") + len(key or b"") + (headers_bytes(pairs) + 8 * len(pairs) if pairs else 0)
