"""Offset ranges of a query, one per task, and reports of data loss.

Records may disappear before they are read: retention removes them, or the topic is deleted or recreated. `failOnDataLoss` decides
whether this ends the query or logs a warning. Both messages name the topic, the partition, the offsets and the retention.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from headrace.errors import HeadraceError
from headrace.flight.client import FlightClient, TopicState
from headrace.spark.offsets import Offsets, TopicPartition

TASK_BYTES_TARGET: Final = 128 << 20
"""Size above which a range is split into several tasks, as Spark splits files."""
SPLIT_PARTS_MAX: Final = 4096

_log = logging.getLogger("headrace.spark")


class DataLost(HeadraceError):
    """Unread records no longer exist."""


class Losses:
    """Reports of data loss: an error if `fatal`, else a warning."""

    def __init__(self, *, fatal: bool) -> None:
        self._fatal = fatal

    def report(self, what: str) -> None:
        if self._fatal:
            raise DataLost(f"{what}. With the option failOnDataLoss=false the query continues with the remaining records")
        _log.warning("%s. The query continues because failOnDataLoss is false", what)


@dataclass(frozen=True, slots=True)
class Range(InputPartition):
    """The records of one partition with start <= offset < stop, read by one task."""

    topic: str
    partition: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def present(start: Offsets, stop: Offsets, states: Mapping[str, TopicState], losses: Losses) -> list[Range]:
    """Return the ranges between `start` and `stop` that still exist. A partition missing in `start` is read from its first record."""
    for topic in sorted({topic for topic, _ in start.keys() - stop.keys()} - states.keys()):
        losses.report(f"topic {topic} has been deleted while the query was reading it")
    found = (_present(place, start.get(place, 0), stop[place], states.get(place[0]), losses) for place in sorted(stop))
    return [one for one in found if one is not None]


def _present(place: TopicPartition, start: int, stop: int, state: TopicState | None, losses: Losses) -> Range | None:
    topic, partition = place
    where = f"topic {topic}, partition {partition}"
    if state is None or partition >= len(state.partitions):
        if start < stop:
            losses.report(f"{where}: cannot read {_span(start, stop)}, the topic has been deleted")
        return None
    first, end = state.partitions[partition].first, state.partitions[partition].end
    if stop < start or stop > end:
        losses.report(
            f"{where}: the query has read up to offset {max(start, stop)}, but the log ends at {end}: the topic was deleted and recreated"
        )
        begin, stop = first if start > min(stop, end) else max(start, first), min(stop, end)
        return Range(topic, partition, begin, stop) if begin < stop else None
    if start < first and start < stop:
        losses.report(f"{where}: {_gone(start, min(first, stop))}, the log begins at {first} ({_retention(state)})")
    start = max(start, first)
    return Range(topic, partition, start, stop) if start < stop else None


def loss_message(wanted: Range, position: int, first: int, state: TopicState | None) -> str:
    """Return the message for a task whose next records retention has removed."""
    kept = f" ({_retention(state)})" if state is not None else ""
    where, what = f"topic {wanted.topic}, partition {wanted.partition}", _gone(position, min(first, wanted.stop))
    return f"{where}: {what}, the log begins at {first}{kept}"


def _span(start: int, stop: int) -> str:
    return f"offset {start}" if stop - start == 1 else f"offsets {start} to {stop - 1}"


def _gone(start: int, stop: int) -> str:
    return f"{_span(start, stop)} {'is' if stop - start == 1 else 'are'} gone"


def _retention(state: TopicState) -> str:
    if state.retention_ms <= 0:
        return f"cleanup {state.cleanup}, no retention time"
    units = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))
    name, factor = next((name, factor) for name, factor in units if state.retention_ms % factor == 0)
    return f"retention {state.retention_ms // factor}{name}"


def split(
    ranges: Iterable[Range], states: Mapping[str, TopicState], client: FlightClient, *, tasks_min: int | None, task_records_max: int | None
) -> list[Range]:
    """Split ranges into more tasks, in the same order: a sink keeps that order within a partition."""
    ranges = list(ranges)
    tasks: list[Range] = []
    for one, parts in zip(ranges, _parts(ranges, states, tasks_min), strict=True):
        if parts > 1:
            bounds = client.split(one.topic, one.partition, one.start, one.stop, min(parts, SPLIT_PARTS_MAX))
            tasks += [Range(one.topic, one.partition, start, stop) for start, stop in bounds]
        else:
            tasks.append(one)
    if task_records_max is None:
        return tasks
    return [chunk for one in tasks for chunk in _evenly(one, -(-len(one) // task_records_max))]


def _parts(ranges: list[Range], states: Mapping[str, TopicState], tasks_min: int | None) -> list[int]:
    if tasks_min is None:
        return [_by_size(one, states[one.topic]) for one in ranges]
    if len(ranges) >= tasks_min:
        return [1] * len(ranges)
    total = sum(map(len, ranges))
    return [max(1, round(len(one) / total * tasks_min)) for one in ranges]


def _by_size(one: Range, state: TopicState) -> int:
    held = state.partitions[one.partition]
    return int(-(-len(one) * held.size_bytes // (max(held.end - held.first, 1) * TASK_BYTES_TARGET))) or 1


def _evenly(one: Range, parts: int) -> Iterator[Range]:
    for index in range(parts):
        start, stop = (one.start + len(one) * cut // parts for cut in (index, index + 1))
        yield Range(one.topic, one.partition, start, stop)
