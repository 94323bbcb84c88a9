"""The read of one task: a range of offsets becomes record batches with exactly the columns Spark was promised.

    broker ── Arrow Flight ── RecordBatch ── (typed values) ── Spark

No record is touched in Python on the way. A read goes on behind the last row that came when the broker has been away.
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
from headrace.spark.ranges import Losses, Range, lost
from headrace.spark.read_settings import ReadSettings

if TYPE_CHECKING:
    from headrace.flight.client import FlightClient, TopicState
    from headrace.spark.values import Decoder

ROWS_MAX: Final = 65_536
"""Rows of one batch: more of them gain nothing."""
_PAUSE_SECONDS: Final = 0.25


@dataclass(frozen=True)
class RangeReader:
    """Pickled to every task of a query. `columns` are those to fetch; `schema` is what Spark gets, the same unless values are typed."""

    settings: ReadSettings
    columns: tuple[str, ...]
    schema: StructType
    decoder: Decoder | None = None

    def read(self, asked: InputPartition) -> Iterator[pa.RecordBatch]:
        """Spark turns an empty list of partitions into one that is no range; there is nothing to read then."""
        if isinstance(asked, Range):
            for batch in self._fetched(asked):
                shaped = self._shaped(batch, asked.topic)
                if shaped.num_rows:
                    yield shaped

    @cached_property
    def _target(self) -> pa.Schema:
        return to_arrow_schema(self.schema, timezone="UTC")

    def _shaped(self, batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
        if self.decoder is not None:
            return self.decoder.decode(batch, topic)
        return pa.RecordBatch.from_arrays(batch.columns, schema=self._target)

    def _fetched(self, asked: Range) -> Iterator[pa.RecordBatch]:
        """The rows of the range, whatever happens to the broker meanwhile."""
        client, position = connect(self.settings.servers), asked.start
        away_since: float | None = None

        def reached(offset: int) -> None:
            nonlocal position, away_since
            position, away_since = offset, None

        while position < asked.stop:
            try:
                yield from client.read(
                    asked.topic, asked.partition, position, asked.stop, columns=self.columns, rows_max=ROWS_MAX, reached=reached
                )
                return
            except (OffsetOutOfRange, UnknownTopic, UnknownPartition) as failure:
                position = self._skipped(asked, position, failure, client)
            except BrokerError as failure:
                away_since = away_since or time.monotonic()
                if not failure.retriable or time.monotonic() - away_since > self.settings.endurance.away_seconds:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _skipped(self, asked: Range, position: int, failure: BrokerError, client: FlightClient) -> int:
        """Where to go on when what was planned is gone since."""
        losses = Losses(fatal=self.settings.fail_on_data_loss)
        if isinstance(failure, OffsetOutOfRange) and position < failure.first:
            losses.report(lost(asked, position, failure.first, self._state(client, asked.topic)))
            return failure.first
        losses.report(f"topic {asked.topic}, partition {asked.partition}: offsets {position} to {asked.stop - 1} cannot be read, {failure}")
        return asked.stop

    def _state(self, client: FlightClient, topic: str) -> TopicState | None:
        try:
            return client.describe([topic])[topic]
        except BrokerError:
            return None
