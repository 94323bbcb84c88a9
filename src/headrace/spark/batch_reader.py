"""Reader for `spark.read.format("headrace")`. The driver resolves offsets once, and every action on the DataFrame reads the same rows.

Filters are not pushed down: Spark 4.3 reuses the partitions planned for one filter in the next query on the same DataFrame, which then
misses rows (docs/decisions/pyspark.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from headrace.flight.client import FlightClient
from headrace.spark.boundaries import Boundary
from headrace.spark.connection import connect
from headrace.spark.offsets import Offsets, TopicPartition, nested
from headrace.spark.ranges import Losses, present, split
from headrace.spark.reading import RangeReader

if TYPE_CHECKING:
    import pyarrow as pa


class BatchReader(DataSourceReader):
    """Reader of one batch query. The driver creates it, plans its partitions and pickles it in one process."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader

    def partitions(self) -> Sequence[InputPartition]:
        settings = self._reader.settings
        client = connect(settings.servers)
        states = settings.retry.before_start(lambda: settings.subscription.states(client), settings.servers.addresses)
        firsts, ends = settings.subscription.firsts(states), settings.subscription.ends(states)
        start = resolved(settings.start, firsts, ends, client, fatal=settings.fail_on_data_loss)
        stop = resolved(settings.end, firsts, ends, client, fatal=settings.fail_on_data_loss)
        stop = {place: max(offset, start[place]) for place, offset in stop.items()}
        ranges = present(start, stop, states, Losses(fatal=settings.fail_on_data_loss))
        return list(split(ranges, states, client, tasks_min=settings.tasks_min, task_records_max=settings.task_records_max))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)


def resolved(boundary: Boundary, firsts: Offsets, ends: Offsets, client: FlightClient, *, fatal: bool) -> Offsets:
    """Resolve a boundary to offsets that the log holds. An offset outside it is an error if `fatal`, else it is moved with a warning."""

    def offset_for_time(times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        return {
            (topic, partition): offset
            for topic, by_partition in nested(times).items()
            for partition, offset in client.offset_for_time(topic, by_partition).items()
        }

    losses = Losses(fatal=fatal)
    offsets = boundary.resolve(firsts, ends, offset_for_time)
    for place, offset in offsets.items():
        within = min(max(offset, firsts[place]), ends[place])
        if within != offset:
            held = f"the log holds offsets {firsts[place]} to {ends[place] - 1}" if firsts[place] < ends[place] else "the log is empty"
            losses.report(f"option {boundary.option}: offset {offset} of topic {place[0]}, partition {place[1]} is out of range, {held}")
            offsets[place] = within
    return offsets
