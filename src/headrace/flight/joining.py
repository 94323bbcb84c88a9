"""Joining of small record batches, because a message costs as much as a few thousand rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

_JOIN_BYTES: Final = 1 << 20
"""A chunk of at least this size is passed on without joining, which would copy it."""
_JOIN_ROWS: Final = 8_192


class Joiner:
    """Joins adjacent chunks of rows, up to `rows_max` rows and about `bytes_max` bytes."""

    def __init__(self, schema: pa.Schema, rows_max: int, bytes_max: int) -> None:
        self._schema, self._rows_max, self._bytes_max = schema, rows_max, bytes_max
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = self._next_offset = 0

    def take(self, chunk: pa.RecordBatch, size_bytes: int, next_offset: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Add a chunk, which `next_offset` follows. Yield record batches that are complete, each with the offset after it."""
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

    def flush(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the remainder."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._pending_rows = self._pending_bytes = 0
            yield pending[0] if len(pending) == 1 else self._joined(pending), self._next_offset

    def _joined(self, chunks: list[pa.RecordBatch]) -> pa.RecordBatch:
        arrays = [pa.concat_arrays([chunk.column(index) for chunk in chunks]) for index in range(len(self._schema))]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
