"""Parquet files written by tasks. The driver receives their names.

File names are unique to each attempt of a task, and only files whose names reach the driver are committed. So a task may be repeated.
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
"""Size at which a file is closed and the next one opened."""

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
    """Task: writes rows to files and returns the file names. Spark pickles it by name, so the executors need this package."""

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
            # The file must be durable before the commit that names it.
            os.fsync(stream.fileno())
        return Part(name, os.path.getsize(path), rows)


def write_parts(frame: DataFrame, directory: str, prefix: str, schema: pa.Schema) -> list[Part]:
    """Run the plan of `frame` once and write its rows. Return the files in the order of its partitions."""
    os.makedirs(directory, exist_ok=True)
    writer = PartWriter(directory, prefix, schema.serialize().to_pybytes())
    return [Part(row.name, row.size_bytes, row.rows) for row in frame.mapInArrow(writer, _REPORT).collect()]


def sync_directory(directory: str) -> None:
    """Make the file names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
