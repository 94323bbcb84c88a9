"""Merging of small record batches and splitting of large ones into the batches that are stored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import add
from typing import cast

from headrace.columns import headers_bytes
from headrace.limits import BATCH_BYTES_TARGET, BATCH_RECORDS_MAX
from headrace.records import AnyBatch, ColumnBatch, RecordBatch


def chunked(batches: Sequence[AnyBatch], now: int, *, small: bool) -> list[AnyBatch]:
    """Return the records of these batches, in order, as batches that are stored one by one. `small`: together they are below the target.

    A column batch is neither merged nor split.
    """
    if (
        small
        and len(batches) == 1
        and (batches[0].headers is None or isinstance(batches[0], ColumnBatch))
        and len(batches[0]) <= BATCH_RECORDS_MAX
    ):
        return [batches[0]]
    found: list[AnyBatch] = []
    waiting: list[RecordBatch] = []
    for batch in batches:
        if isinstance(batch, ColumnBatch):
            _join(waiting, now, small, found)
            waiting = []
            found.append(batch)
        else:
            waiting.append(batch)
    _join(waiting, now, small, found)
    return found


def plain_values(batch: AnyBatch, *, small: bool) -> Sequence[bytes] | None:
    """Return the values of a batch that has nothing else, no tombstone, and the size of one stored batch. `small`: its size is known."""
    if not isinstance(batch, RecordBatch) or batch.keys is not None or batch.headers is not None:
        return None
    if batch.timestamps is not None or batch.expiries is not None:
        return None
    values = cast("Sequence[bytes]", batch.values)
    return values if None not in values and fits_one(values, small=small) else None


def fits_one(values: Sequence[bytes], *, small: bool) -> bool:
    """Return whether the values fit one stored batch. `small`: their size does."""
    return len(values) <= BATCH_RECORDS_MAX and (small or sum(map(len, values)) <= BATCH_BYTES_TARGET)


def _join(batches: list[RecordBatch], now: int, small: bool, found: list[AnyBatch]) -> None:
    if not batches:
        return
    batch = merge(batches, now)
    if small and batch.headers is None and len(batch.values) <= BATCH_RECORDS_MAX:
        found.append(batch)
    else:
        found += split(batch)


def merge(batches: Sequence[RecordBatch], now: int) -> RecordBatch:
    """Return one batch in the given order. `now` stamps batches without timestamps if others have them."""
    if len(batches) == 1:
        return batches[0]
    timestamps: list[int] | None = None
    if any(batch.timestamps is not None for batch in batches):
        timestamps = [at for batch in batches for at in ([now] * len(batch) if batch.timestamps is None else batch.timestamps)]
    return RecordBatch(
        list(chain.from_iterable(batch.values for batch in batches)),
        None if all(batch.keys is None for batch in batches) else [key for batch in batches for key in batch.keys or [None] * len(batch)],
        None
        if all(batch.headers is None for batch in batches)
        else [pairs for batch in batches for pairs in batch.headers or [()] * len(batch)],
        timestamps,
        None
        if all(batch.expiries is None for batch in batches)
        else [at for batch in batches for at in batch.expiries or [0] * len(batch)],
    )


def split(batch: RecordBatch) -> Iterator[RecordBatch]:
    """Split a batch at the target size. A record larger than the target gets its own batch."""
    ends = _ends(batch)
    count, start, before = len(ends), 0, 0
    while start < count:
        stop = max(bisect_right(ends, before + BATCH_BYTES_TARGET, start, min(start + BATCH_RECORDS_MAX, count)), start + 1)
        yield batch if stop - start == count else batch[start:stop]
        start, before = stop, ends[stop - 1]


def _ends(batch: RecordBatch) -> list[int]:
    """Return the running total of record sizes, without fixed-width columns."""
    if batch.headers is None:
        try:
            sizes = map(len, batch.values)  # type: ignore[arg-type]  # None raises TypeError: cheaper than a test of each
            return list(accumulate(sizes if batch.keys is None else map(add, sizes, map(len, batch.keys))))  # type: ignore[arg-type]
        except TypeError:
            pass
    return list(accumulate(_sizes(batch)))


def _sizes(batch: RecordBatch) -> Iterator[int]:
    absent: Sequence[None] = [None] * len(batch)
    for value, key, pairs in zip(batch.values, batch.keys or absent, batch.headers or absent, strict=True):
        yield len(value or b"") + len(key or b"") + (headers_bytes(pairs) + 8 * len(pairs) if pairs else 0)
