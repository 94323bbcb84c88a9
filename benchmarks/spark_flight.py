"""Ceiling of Spark sources that use Arrow Flight: a server of prebuilt record batches in memory, and a source that passes them on.

The difference to the constant source is the cost of Flight; the difference to `format("headrace")` is that of the broker.

python -m benchmarks.spark_flight VALUE_BYTES      prints {"address": "127.0.0.1:4711"}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import flight
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from benchmarks.flight import served_address
from benchmarks.spark_ceiling import BATCH_ROWS, ConstantReader, ConstantSource, ConstantStream, Rows, constant
from headrace.heap import keep_large_chunks
from headrace.spark.columns import raw_schema

NAME: Final = "headrace_bare_flight"
SENT: Final = ("key", "value", "offset", "timestamp")
"""Columns that differ from row to row, and that the broker sends as well. A task adds the others."""


class BatchServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Answers a ticket {"rows": 1000, "columns": ["value"]} with constant batches."""

    def __init__(self, value_bytes: int) -> None:
        self._batch = constant(raw_schema(headers=False), value_bytes)
        super().__init__("grpc+tcp://127.0.0.1:0")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        wanted = json.loads(ticket.ticket)
        batch = self._batch.select(wanted["columns"])
        return flight.GeneratorStream(batch.schema, _cut(batch, wanted["rows"]))


def _cut(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    for left in range(rows, 0, -BATCH_ROWS):
        yield batch if left >= BATCH_ROWS else batch.slice(0, left)


@contextmanager
def batch_server(directory: Path, value_bytes: int) -> Iterator[str]:
    """Run a server of prebuilt batches and yield its address."""
    with served_address([sys.executable, "-m", "benchmarks.spark_flight", str(value_bytes)], directory / "batches.log") as address:
        yield address


def register(spark: SparkSession) -> None:
    spark.dataSource.register(FlightSource)


@lru_cache(1)
def _client(address: str) -> flight.FlightClient:
    keep_large_chunks()
    return flight.FlightClient(f"grpc+tcp://{address}", generic_options=[("grpc.max_receive_message_length", -1)])


def _read(schema: StructType, size: int, address: str, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    sent = [name for name in schema.names if name in SENT]
    ticket = {"rows": partition.count if isinstance(partition, Rows) else 0, "columns": sent}
    target, added = to_arrow_schema(schema, timezone="UTC"), constant(schema, size)
    reader = _client(address).do_get(flight.Ticket(json.dumps(ticket).encode()))
    for chunk in reader:
        batch = chunk.data
        columns = [batch.column(name) if name in sent else added.column(name).slice(0, batch.num_rows) for name in schema.names]
        yield pa.RecordBatch.from_arrays(columns, schema=target)


class FlightSource(ConstantSource):
    """Source with the options of the constant source and `address`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def reader(self, schema: StructType) -> DataSourceReader:
        return FlightReader(schema, int(self.options["rows"]), int(self.options["size"]), self.options["address"])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self.options
        return FlightStream(schema, int(options["size"]), int(options["rows"]), int(options["perTrigger"]), options["address"])


class FlightReader(ConstantReader):
    def __init__(self, schema: StructType, rows: int, size: int, address: str) -> None:
        super().__init__(schema, rows, size)
        self._address = address

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._schema, self._size, self._address, partition)


class FlightStream(ConstantStream):
    def __init__(self, schema: StructType, size: int, rows: int, per_trigger: int, address: str) -> None:
        super().__init__(schema, size, rows, per_trigger, 0.0)
        self._address = address

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._schema, self._size, self._address, partition)


def main() -> None:
    server = BatchServer(int(sys.argv[1]))
    print(json.dumps({"address": f"127.0.0.1:{server.port}"}), flush=True)
    server.serve()


if __name__ == "__main__":
    main()
