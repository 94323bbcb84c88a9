"""Rows to write, as record batches: DataFrames, tables and iterables, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from headrace.errors import InvalidRequest
from headrace.flight.client import check_put_schema

EXPECTED: Final = (
    "a pandas or Polars DataFrame, a pyarrow Table, RecordBatch or RecordBatchReader, an iterable of record batches, "
    "or an object with __arrow_c_stream__"
)
_INDEX: Final = re.compile(r"__index_level_\d+__")
"""Name that Arrow gives to an index of pandas without a name. A row has no use for it."""


class ArrowStream(Protocol):
    """DataFrame or table of any library, by Arrow's PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> object: ...


Rows: TypeAlias = ArrowStream | pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch]


def record_batches(rows: Rows) -> Iterator[pa.RecordBatch]:
    """Return the rows as record batches of one schema, with the columns of a put. Raises `InvalidRequest` at once for other columns."""
    if isinstance(rows, pa.RecordBatch):
        rows = [rows]
    elif hasattr(rows, "__arrow_c_stream__"):
        rows = _stream(rows)
    elif isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise InvalidRequest(f"rows: expected {EXPECTED}, got {type(rows).__name__}")
    batches = map(_record_batch, iter(rows))
    first = next(batches, None)
    if first is None:
        return iter(())
    check_put_schema(first.schema, topic="")
    return chain([first], (_same(batch, first.schema) for batch in batches))


def _stream(rows: Any) -> Iterator[pa.RecordBatch]:
    """Read an Arrow stream. A stream without batches gives an empty one, so that its columns are checked."""
    try:
        reader = pa.RecordBatchReader.from_stream(rows)
    except (pa.ArrowException, TypeError, ValueError) as failure:
        raise InvalidRequest(f"rows: {type(rows).__name__} cannot be converted to Arrow: {failure}") from None
    kept = [name for name in reader.schema.names if not _INDEX.fullmatch(name)]
    is_empty = True
    for batch in reader:
        is_empty = False
        yield batch.select(kept)
    if is_empty:
        yield pa.RecordBatch.from_pylist([], schema=reader.schema).select(kept)


def _record_batch(batch: object) -> pa.RecordBatch:
    if not isinstance(batch, pa.RecordBatch):
        raise InvalidRequest(f"rows: expected {EXPECTED}, got an iterable of {type(batch).__name__}")
    return batch


def _same(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema != schema:
        raise InvalidRequest(f"rows: all record batches need the same schema; expected {_brief(schema)}, got {_brief(batch.schema)}")
    return batch


def _brief(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)[:200]
