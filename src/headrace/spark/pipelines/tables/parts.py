"""Tasks write Parquet files; what comes back to the driver is their names.

The files of one attempt of one task have names that no other attempt uses, so a task that is tried again, or runs twice, harms
nothing: only the files whose names reached the driver are committed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FILE_BYTES_TARGET: Final = 256 << 20
"""A file that has grown to this size is closed, and another begun."""

_REPORT: Final = "name string, size_bytes bigint, rows bigint"
_REPORT_ARROW: Final = pa.schema([("name", pa.string()), ("size_bytes", pa.int64()), ("rows", pa.int64())])


@dataclass(frozen=True, slots=True)
class Part:
    """A finished file, by its name in the directory it was written to."""

    name: str
    size_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class PartWriter:
    """What a task runs: rows in, names of files out. It travels to the executors by its name, so they need this package."""

    directory: str
    prefix: str
    schema: bytes
    file_bytes_target: int = FILE_BYTES_TARGET

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        parts = list(self._files(batches, schema))
        columns = [[part.name for part in parts], [part.size_bytes for part in parts], [part.rows for part in parts]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _REPORT_ARROW, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_REPORT_ARROW)

    def _files(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[Part]:
        writer: pq.ParquetWriter | None = None
        name, rows = "", 0
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                name, rows = f"{self.prefix}-{uuid.uuid4().hex}.parquet", 0
                writer = pq.ParquetWriter(os.path.join(self.directory, name), schema, compression="zstd")
            writer.write_table(pa.Table.from_batches([batch]).cast(schema))
            rows += batch.num_rows
            if writer.file_handle.tell() >= self.file_bytes_target:
                yield self._finished(writer, name, rows)
                writer = None
        if writer is not None:
            yield self._finished(writer, name, rows)

    def _finished(self, writer: pq.ParquetWriter, name: str, rows: int) -> Part:
        writer.close()
        path = os.path.join(self.directory, name)
        with open(path, "rb") as stream:
            # The commit that will name this file is durable; so must be what it names.
            os.fsync(stream.fileno())
        return Part(name, os.path.getsize(path), rows)


def write_parts(frame: DataFrame, directory: str, prefix: str, schema: pa.Schema) -> list[Part]:
    """Run the plan of `frame` once and write what it yields; in the order of its partitions."""
    os.makedirs(directory, exist_ok=True)
    writer = PartWriter(directory, prefix, schema.serialize().to_pybytes())
    return [Part(row.name, row.size_bytes, row.rows) for row in frame.mapInArrow(writer, _REPORT).collect()]


def sync_directory(directory: str) -> None:
    """Make the names in it durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
