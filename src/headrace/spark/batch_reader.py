"""`spark.read.format("headrace")`: offsets are resolved once, on the driver, and every action on the DataFrame reads the same rows.

Filters are not pushed down, although Spark could ask for it: Spark 4.3 keeps the partitions that were planned for one filter and
uses them for the next query on the same DataFrame, which then misses rows (docs/decisions/pyspark.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from headrace.flight.client import FlightClient
from headrace.spark.boundaries import Boundary
from headrace.spark.connection import connect
from headrace.spark.offsets import Offsets, Place, nested
from headrace.spark.ranges import Losses, present, split
from headrace.spark.reading import RangeReader

if TYPE_CHECKING:
    import pyarrow as pa


class BatchReader(DataSourceReader):
    """Made, asked for its partitions and pickled in one process of the driver."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader

    def partitions(self) -> Sequence[InputPartition]:
        settings = self._reader.settings
        client = connect(settings.servers)
        states = settings.endurance.at_first(lambda: settings.subscription.states(client), settings.servers.addresses)
        firsts, ends = settings.subscription.firsts(states), settings.subscription.ends(states)
        start = resolved(settings.start, firsts, ends, client, fatal=settings.fail_on_data_loss)
        stop = resolved(settings.end, firsts, ends, client, fatal=settings.fail_on_data_loss)
        stop = {place: max(offset, start[place]) for place, offset in stop.items()}
        ranges = present(start, stop, states, Losses(fatal=settings.fail_on_data_loss))
        return list(split(ranges, states, client, tasks_min=settings.tasks_min, task_records_max=settings.task_records_max))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)


def resolved(boundary: Boundary, firsts: Offsets, ends: Offsets, client: FlightClient, *, fatal: bool) -> Offsets:
    """Offsets within what the log holds; one that a user gave and that lies outside is an error, or moved with a warning."""

    def offset_for_time(times: Mapping[Place, int]) -> dict[Place, int | None]:
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
