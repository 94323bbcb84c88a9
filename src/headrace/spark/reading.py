"""Task side of a read: a range of offsets becomes record batches with the columns of the planned schema.

    broker ── Arrow Flight ── RecordBatch ── (typed values) ── Spark

Rows without typed values stay in Arrow buffers. After a connection loss a read resumes after the last row received.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.errors import BrokerError, OffsetOutOfRange, UnknownPartition, UnknownTopic
from headrace.spark.connection import connect
from headrace.spark.ranges import Losses, Range, loss_message
from headrace.spark.read_settings import ReadSettings

if TYPE_CHECKING:
    from headrace.arrow.values import Decoder
    from headrace.flight.client import FlightClient, TopicState

ROWS_MAX: Final = 65_536
"""Rows of one batch. Larger batches are not faster."""


@dataclass(frozen=True)
class RangeReader:
    """Reader that Spark pickles to every task. It fetches `columns` and returns rows of `schema`, which differs only for typed values."""

    settings: ReadSettings
    columns: tuple[str, ...]
    schema: StructType
    decoder: Decoder | None = None

    def read(self, wanted: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range. Spark replaces an empty list of partitions by one that is not a `Range` and has no rows."""
        if isinstance(wanted, Range):
            for batch in self._fetched(wanted):
                shaped = self._shaped(batch, wanted.topic)
                if shaped.num_rows:
                    yield shaped

    @cached_property
    def _target(self) -> pa.Schema:
        return to_arrow_schema(self.schema, timezone="UTC")

    def _shaped(self, batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
        if self.decoder is not None:
            return self.decoder.decode(batch, topic, connect(self.settings.servers))
        return pa.RecordBatch.from_arrays(batch.columns, schema=self._target)

    def _fetched(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the range, with retries while the broker is unavailable."""
        client, position = connect(self.settings.servers), wanted.start
        failing_since, failures = 0.0, 0

        def reached(offset: int) -> None:
            nonlocal position, failures
            position, failures = offset, 0

        while position < wanted.stop:
            try:
                yield from client.read(
                    wanted.topic, wanted.partition, position, wanted.stop, columns=self.columns, rows_max=ROWS_MAX, reached=reached
                )
                return
            except (OffsetOutOfRange, UnknownTopic, UnknownPartition) as failure:
                position = self._skipped(wanted, position, failure, client)
            except BrokerError as failure:
                failures += 1
                failing_since = time.monotonic() if failures == 1 else failing_since
                if not failure.retriable or time.monotonic() - failing_since > self.settings.retry.timeout_seconds:
                    raise
                time.sleep(self.settings.retry.backoff(failures))

    def _skipped(self, wanted: Range, position: int, failure: BrokerError, client: FlightClient) -> int:
        """Return the next offset to read after records of the range were removed."""
        losses = Losses(fatal=self.settings.fail_on_data_loss)
        if isinstance(failure, OffsetOutOfRange) and position < failure.first:
            losses.report(loss_message(wanted, position, failure.first, self._state(client, wanted.topic)))
            return failure.first
        losses.report(
            f"topic {wanted.topic}, partition {wanted.partition}: offsets {position} to {wanted.stop - 1} cannot be read, {failure}"
        )
        return wanted.stop

    def _state(self, client: FlightClient, topic: str) -> TopicState | None:
        try:
            return client.describe([topic])[topic]
        except BrokerError:
            return None
