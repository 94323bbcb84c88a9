"""Helpers to publish rows to topics and to read DataFrames."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from headrace.flight.client import FlightClient
from tests.spark.serving import FlightBroker

SECONDS_MAX = 300.0
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def publish(
    flight_client: FlightClient, topic: str, values: Sequence[bytes | None] | range, *, partition: int = 0, **columns: pa.Array
) -> None:
    """Publish values; a range publishes its numbers."""
    texts = [b"%d" % value for value in values] if isinstance(values, range) else list(values)
    flight_client.append(topic, [pa.RecordBatch.from_pydict({"value": pa.array(texts, pa.binary()), **columns})], partition=partition)


def load(spark: SparkSession, broker: FlightBroker, schema: str = "", /, **options: object) -> DataFrame:
    reader = spark.read.format("headrace").option("kafka.bootstrap.servers", broker.address)
    reader = reader.schema(schema) if schema else reader
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def load_stream(spark: SparkSession, broker: FlightBroker, **options: object) -> DataFrame:
    reader = spark.readStream.format("headrace").option("kafka.bootstrap.servers", broker.address)
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def values_of(frame: DataFrame) -> list[str]:
    """Return the values by partition and offset."""
    ordered = frame.orderBy("topic", "partition", "offset").selectExpr("CAST(value AS STRING)").collect()
    return [row[0] for row in ordered]


class Collected:
    """A stream into a table in memory; `run()` reads the available records and ends."""

    def __init__(self, spark: SparkSession, broker: FlightBroker, directory: Path, **options: object) -> None:
        self._spark, self._broker = spark, broker
        self._options = {"startingOffsets": "earliest", **options}
        self.checkpoint = directory / "checkpoint"
        self.batches: list[list[tuple[Any, ...]]] = []

    def start(self, *, available_now: bool = True) -> StreamingQuery:
        frame = load_stream(self._spark, self._broker, **self._options)
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")).start()

    def _take(self, frame: DataFrame, batch: int) -> None:
        rows = frame.selectExpr("topic", "partition", "offset", "CAST(value AS STRING)").collect()
        self.batches.append(sorted(tuple(row) for row in rows))

    def run(self) -> StreamingQuery:
        query = self.start()
        query.awaitTermination(120)
        assert not query.isActive
        return query

    @property
    def values(self) -> list[str]:
        return [row[3] for row in sorted(row for batch in self.batches for row in batch)]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
