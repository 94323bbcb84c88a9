"""Conversion of stored batches to Arrow record batches.

Keys and values of a stored batch have the layout of Arrow and are wrapped without a copy; a window of a batch is a slice. Offsets and
timestamps are computed or wrapped by numpy. Only headers need Python code per record, and only if requested. Small batches are joined,
because a message costs as much as a few thousand rows; large ones are sliced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

import numpy as np
import pyarrow as pa

from headrace.engine.contract import Batch
from headrace.flight.arrays import Int64s, nulls, timestamps
from headrace.flight.request import HEADERS, encode_place, stored_schema
from headrace.limits import BATCH_BYTES_MAX, FLIGHT_BATCH_BYTES_TARGET
from headrace.records import NEVER, Headers

assert BATCH_BYTES_MAX < 1 << 31, "a column of one batch never needs 64-bit offsets"
_JOIN_BYTES: Final = 1 << 20
"""A chunk of at least this size is sent without joining, which would copy it."""
_JOIN_ROWS: Final = 8_192


class ArrowBatches:
    """Converts stored batches to record batches of some columns, with at most `rows_max` rows and about the target size."""

    def __init__(self, columns: tuple[str, ...], rows_max: int, bytes_max: int = FLIGHT_BATCH_BYTES_TARGET) -> None:
        self.schema = stored_schema(columns)
        self._columns = columns
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = self._next_offset = 0

    def feed(self, batches: Iterable[Batch], now: int) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield record batches to send, each with the position to resume at. Small remainders are kept for the next call. Records that have
        expired by `now` (Unix ms) are skipped."""
        for batch in batches:
            for part in self._parts(batch):
                size_bytes = part.size_estimate_bytes
                yield from self._take(self._living(part, now), size_bytes, part.next_offset)

    def flush(self) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield the remainder."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._pending_rows = self._pending_bytes = 0
            yield pending[0] if len(pending) == 1 else self._joined(pending), encode_place(self._next_offset)

    def _take(self, chunk: pa.RecordBatch, size_bytes: int, next_offset: int) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        rows = chunk.num_rows
        if not rows:
            return
        is_large = size_bytes >= _JOIN_BYTES
        if is_large or self._pending_rows + rows > self._rows_max or self._pending_bytes + size_bytes > self._bytes_max:
            yield from self.flush()
        self._pending.append(chunk)
        self._pending_rows += rows
        self._pending_bytes += size_bytes
        self._next_offset = next_offset
        if self._pending_rows >= min(_JOIN_ROWS, self._rows_max) or self._pending_bytes >= _JOIN_BYTES:
            yield from self.flush()

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch in windows within the limits; a single record may exceed them."""
        if 0 < len(batch) <= self._rows_max and batch.size_estimate_bytes <= self._bytes_max:
            yield batch
            return
        while len(batch):
            count = min(max(batch.fitting(self._bytes_max), 1), self._rows_max)
            if count >= len(batch):
                yield batch
                return
            yield batch.window(0, count)
            batch = batch.window(count, len(batch))

    def _joined(self, chunks: list[pa.RecordBatch]) -> pa.RecordBatch:
        arrays = [pa.concat_arrays([chunk.column(index) for chunk in chunks]) for index in range(len(self._columns))]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _living(self, batch: Batch, now: int) -> pa.RecordBatch:
        """Return the records of the window that have not expired."""
        wrapped = self._wrap(batch)
        expiries = batch.expiry_buffer()
        if expiries is None:
            return wrapped
        times = np.frombuffer(expiries, np.int64)[batch.start : batch.stop]
        living = (times == NEVER) | (times > now)
        return wrapped if living.all() else wrapped.filter(pa.array(living))

    def _wrap(self, batch: Batch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([_COLUMNS[name](batch) for name in self._columns], schema=self.schema)


def _binary(buffers: tuple[memoryview, memoryview, memoryview | None], batch: Batch) -> pa.Array:
    offsets, content, validity = buffers
    return pa.Array.from_buffers(
        pa.binary(),
        len(batch),
        [None if validity is None else pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(content)],
        offset=batch.start,
    )


def _values(batch: Batch) -> pa.Array:
    return _binary(batch.value_buffers(), batch)


def _keys(batch: Batch) -> pa.Array:
    buffers = batch.key_buffers()
    return nulls(len(batch), "key") if buffers is None else _binary(buffers, batch)


def offsets_of(batch: Batch) -> Int64s:
    base, deltas = batch.base_offset, batch.delta_buffer()
    if deltas is None:
        return np.arange(base + batch.start, base + batch.stop, dtype=np.int64)
    return np.frombuffer(deltas, np.uint32)[batch.start : batch.stop].astype(np.int64) + base


def _offsets(batch: Batch) -> pa.Array:
    return pa.array(offsets_of(batch))


def _timestamps(batch: Batch) -> pa.Array:
    known = batch.timestamp_buffer()
    if known is None:
        return timestamps(np.full(len(batch), batch.min_timestamp, dtype=np.int64))
    return timestamps(np.frombuffer(known, np.int64)[batch.start : batch.stop])


def _headers(batch: Batch) -> pa.Array:
    rows = batch.headers()
    if rows is None:
        return nulls(len(batch), "headers")
    return headers_array(rows)


def headers_array(rows: list[Headers]) -> pa.Array:
    """Return an array with a list of pairs for each record; null without headers."""
    pairs = [pair for row in rows for pair in row]
    ends = pa.array(list(accumulate(map(len, rows), initial=0)), pa.int32())
    entries = pa.StructArray.from_arrays(
        [pa.array([name for name, _ in pairs], pa.string()), pa.array([value for _, value in pairs], pa.binary())], ["key", "value"]
    )
    return pa.ListArray.from_arrays(ends, entries, type=HEADERS, mask=pa.array([not row for row in rows], pa.bool_()))


_COLUMNS: Final = {"key": _keys, "value": _values, "offset": _offsets, "timestamp": _timestamps, "headers": _headers}


def below(batches: list[Batch], stop: int) -> list[Batch]:
    """Return the records with offsets below `stop`."""
    kept: list[Batch] = []
    for batch in batches:
        if not len(batch) or batch.first_offset >= stop:
            continue
        if batch.next_offset > stop:
            batch = batch.window(0, int(np.searchsorted(offsets_of(batch), stop)))
        kept.append(batch)
    return kept
