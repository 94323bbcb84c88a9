"""Ceiling of Spark's Python sources and sinks: a source of constant prebuilt batches, and a sink that only counts rows.

The difference between `format("headrace")` and these is the cost of the broker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headrace.spark.columns import raw_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "headrace_ceiling"
BATCH_ROWS: Final = 65_536
Offset = dict[str, dict[str, int]]


def register(spark: SparkSession) -> None:
    spark.dataSource.register(ConstantSource)


@dataclass
class Rows(InputPartition):
    """Number of rows for one task."""

    count: int


class ConstantSource(DataSource):
    """Source with the options `rows`, `size` of a value, `perTrigger` and `perSecond` (rows arrive at this rate without end)."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return raw_schema(headers=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return ConstantReader(schema, int(self.options["rows"]), int(self.options["size"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self.options
        return ConstantStream(
            schema, int(options["size"]), int(options.get("rows", 0)), int(options.get("perTrigger", 0)), float(options.get("perSecond", 0))
        )

    def writer(self, schema: StructType, overwrite: bool) -> CountingWriter:
        return CountingWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> CountingStreamWriter:
        return CountingStreamWriter()


@lru_cache(4)
def constant(schema: StructType, size: int) -> pa.RecordBatch:
    """Return a batch of `BATCH_ROWS` equal rows with values of `size` bytes."""
    columns = {
        "key": lambda: pa.nulls(BATCH_ROWS, pa.binary()),
        "value": lambda: pa.array([b"x" * size] * BATCH_ROWS, pa.binary()),
        "topic": lambda: pa.array(["constant"] * BATCH_ROWS, pa.string()),
        "partition": lambda: pa.array([0] * BATCH_ROWS, pa.int32()),
        "offset": lambda: pa.array(range(BATCH_ROWS), pa.int64()),
        "timestamp": lambda: pa.array([0] * BATCH_ROWS, pa.timestamp("us", "UTC")),
        "timestampType": lambda: pa.array([1] * BATCH_ROWS, pa.int32()),
    }
    return pa.RecordBatch.from_arrays([columns[name]() for name in schema.names], schema=to_arrow_schema(schema, timezone="UTC"))


def _batches(schema: StructType, size: int, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    batch = constant(schema, size)
    left = partition.count if isinstance(partition, Rows) else 0
    while left > 0:
        yield batch if left >= BATCH_ROWS else batch.slice(0, left)
        left -= BATCH_ROWS


def _halves(count: int) -> list[Rows]:
    """Split rows over two tasks, as many as a topic of two partitions has."""
    return [Rows(part) for part in (count // 2, count - count // 2) if part]


class ConstantReader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int, size: int) -> None:
        self._schema, self._rows, self._size = schema, rows, size

    def partitions(self) -> Sequence[InputPartition]:
        return _halves(self._rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._schema, self._size, partition)


class ConstantStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, schema: StructType, size: int, rows: int, per_trigger: int, per_second: float) -> None:
        self._schema, self._size, self._rows, self._per_trigger, self._per_second = schema, size, rows, per_trigger, per_second
        self._began = time.time()

    def initialOffset(self) -> Offset:
        return {"constant": {"0": 0}}

    def prepareForTriggerAvailableNow(self) -> None:
        """Do nothing: the end is known."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._per_trigger) if self._per_trigger else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        begin = start["constant"]["0"]
        end = int((time.time() - self._began) * self._per_second) if self._per_second else self._rows
        return {"constant": {"0": min(end, begin + self._per_trigger) if self._per_trigger else max(end, begin)}}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        count = end["constant"]["0"] - start["constant"]["0"]
        return [Rows(count)] if self._per_second else _halves(count)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _batches(self._schema, self._size, partition)


def _count(batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    for _ in batches:
        pass
    return WriterCommitMessage()


class CountingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _count(iterator)


class CountingStreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return _count(iterator)
