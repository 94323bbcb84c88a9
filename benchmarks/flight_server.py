"""Bare Flight server: serves prebuilt batches from memory and discards what it receives.

python -m benchmarks.flight_server ROWS VALUE_BYTES ROWS_PER_BATCH      prints {"address": "127.0.0.1:4711"}
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as pa
from pyarrow import flight


def sample(value_bytes: int, rows: int) -> pa.RecordBatch:
    """Return a batch of `rows` incompressible values of one size."""
    content = np.random.default_rng(1).integers(0, 256, rows * value_bytes, dtype=np.uint8)
    ends = np.arange(0, rows * value_bytes + 1, value_bytes, dtype=np.int32)
    values = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(content)])
    return pa.RecordBatch.from_arrays([values], names=["value"])


class BareServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Answers every ticket with all rows and reads every put to its end."""

    def __init__(self, rows: int, value_bytes: int, batch_rows: int) -> None:
        batch = sample(value_bytes, batch_rows)
        self._batches = [batch] * (rows // batch_rows) + ([batch.slice(0, rows % batch_rows)] if rows % batch_rows else [])
        self._schema = batch.schema
        super().__init__("grpc+tcp://127.0.0.1:0")

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        return flight.GeneratorStream(self._schema, iter(self._batches))

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        rows = 0
        while True:
            try:
                rows += reader.read_chunk().data.num_rows
            except StopIteration:
                break
        writer.write(str(rows).encode())


def main() -> None:
    server = BareServer(*map(int, sys.argv[1:4]))
    print(json.dumps({"address": f"127.0.0.1:{server.port}"}), flush=True)
    server.serve()


if __name__ == "__main__":
    main()
