"""Driver side of `spark.readStream.format("headrace")`: initial offsets, the end of each micro-batch, and its tasks.

Spark keeps one object of this class while the query runs, in a separate process, and calls it from one thread. It calls `latestOffset`
about ninety times a second. The broker holds each such request until an offset changes, so an idle query costs little and a new record
is seen at once.

The checkpoint decides what was read. Progress is also committed to a group, which shows the lag. Spark's `commit()` is not used for this:
Spark does not call it for the last batch of an execution. The `start` passed to `latestOffset` is the end of the last completed batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from headrace.errors import ConfigError, UnknownTopic
from headrace.flight.client import FlightClient, TopicState
from headrace.spark.admission import TriggerDelay, apportion, records_within
from headrace.spark.batch_reader import resolved
from headrace.spark.connection import connect
from headrace.spark.offsets import Offsets, TopicPartition, from_json, to_json
from headrace.spark.progress import Progress
from headrace.spark.ranges import Losses, present, split
from headrace.spark.reading import RangeReader

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_MS: Final = 50
"""Time the broker may hold one request for new offsets. The query cannot stop meanwhile."""
PATTERN_SECONDS: Final = 1.0
"""Interval of the search for new topics, for a pattern and for a query without topics."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of one execution of a query."""

    def __init__(self, reader: RangeReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._settings, self._clock = reader, reader.settings, clock
        self._trigger_delay = TriggerDelay(self._settings.records_min, self._settings.delay_ms)
        self._states: dict[str, TopicState] = {}
        self._initial: Offsets | None = None
        self._target: Offsets | None = None
        """End offsets of a query with the trigger AvailableNow."""
        self._is_idle = False
        self._listed_at = float("-inf")

    def __reduce__(self) -> tuple[type[StreamReader], tuple[RangeReader]]:
        """Pickle only what tasks need: no connection, no thread."""
        return StreamReader, (self._reader,)

    @property
    def _client(self) -> FlightClient:
        return connect(self._settings.servers)

    @cached_property
    def _progress(self) -> Progress:
        return Progress(self._client, self._settings.group)

    # Offsets

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the first offsets. Spark calls this twice before the first batch, and "latest" must mean the same both times."""
        if self._initial is None:
            settings, client = self._settings, self._client
            self._states = settings.retry.before_start(lambda: settings.subscription.states(client), settings.servers.addresses)
            firsts, ends = settings.subscription.firsts(self._states), settings.subscription.ends(self._states)
            self._initial = resolved(settings.start, firsts, ends, client, fatal=settings.fail_on_data_loss)
        return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that Spark passes to `latestOffset`, unless the trigger reads everything. `_admitted` applies all limits."""
        settings = self._settings
        if settings.records_max is not None:
            return ReadMaxRows(settings.records_max)
        if settings.bytes_max is not None:
            return ReadMaxBytes(settings.bytes_max)
        return ReadMinRows(settings.records_min) if settings.records_min is not None else ReadAllAvailable()

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        """Return the end of the next batch; `start` if there is no batch."""
        begin = self._own(start)
        self._progress.report(begin, wait=self._target is not None)
        ends = self._ends(begin) if self._target is None else self._target
        end = self._admitted(begin, ends, limit)
        self._is_idle = end is None
        return to_json(begin if end is None else end)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """Return the last known end offsets, for Spark's progress report."""
        return to_json(self._settings.subscription.ends(self._states)) or None

    def prepareForTriggerAvailableNow(self) -> None:
        self._states = self._described()
        self._target = self._settings.subscription.ends(self._states)

    def _own(self, given: dict[str, dict[str, int]]) -> Offsets:
        """Parse offsets; reject those of another source. Spark identifies the sources of a query by their order alone, so a checkpoint may
        hold offsets of another query or source, and resuming from them would read wrong records."""
        reads = self._settings.subscription.reads
        if given and not any(map(reads, given)):
            raise ConfigError(
                f"the checkpoint belongs to another source: it holds offsets of {', '.join(sorted(given))}, but the query reads "
                f"{self._settings.subscription}. Give the query its own checkpoint, and keep the order of its sources"
            )
        return from_json(given)

    def _admitted(self, begin: Offsets, ends: Offsets, limit: ReadLimit) -> Offsets | None:
        """Return the end of the next batch; None if there are no records, or fewer than the minimum."""
        base = {place: self._base(place, begin.get(place, 0), end) for place, end in ends.items()}
        available = {place: end - base[place] for place, end in ends.items()}
        records = sum(available.values())
        if not records and all(ends.get(place) == offset for place, offset in begin.items()):
            return None
        if isinstance(limit, ReadAllAvailable):
            return ends
        if records and self._target is None and not self._trigger_delay.enough(records, now_ms=self._clock() * 1000):
            return None
        taken = apportion(available, self._records_max(available))
        return {place: base[place] + taken[place] for place in ends}

    def _base(self, place: TopicPartition, begin: int, end: int) -> int:
        """Return the next offset to read: after the records that retention removed, or the first offset of a recreated topic."""
        state = self._states.get(place[0])
        first = state.partitions[place[1]].first if state is not None and place[1] < len(state.partitions) else 0
        return min(max(begin, first) if begin <= end else first, end)

    def _records_max(self, available: Mapping[TopicPartition, int]) -> int:
        records = sum(available.values())
        if self._settings.bytes_max is not None:
            records = records_within(available, {place: self._record_bytes(place) for place in available}, self._settings.bytes_max)
        return records if self._settings.records_max is None else min(records, self._settings.records_max)

    def _record_bytes(self, place: TopicPartition) -> float:
        state = self._states.get(place[0])
        held = state.partitions[place[1]] if state is not None and place[1] < len(state.partitions) else None
        return held.size_bytes / max(held.end - held.first, 1) if held is not None else 0.0

    # Topic states

    def _ends(self, begin: Offsets) -> Offsets:
        """Return the current ends of all partitions. If the query has caught up, wait up to `WAIT_MS` for new records."""
        subscription = self._settings.subscription
        known = subscription.ends(self._states)
        is_due = self._clock() - self._listed_at >= PATTERN_SECONDS
        if is_due and (subscription.pattern or not self._states):
            self._listed_at = self._clock()
            self._states = self._described()
        elif self._states:
            caught_up = all(begin.get(place, 0) == end for place, end in known.items())
            self._states = self._updates(WAIT_MS if caught_up or self._is_idle else 0)
        else:
            time.sleep(WAIT_MS / 1000)  # the broker can only hold a request that names a topic
        return subscription.ends(self._states)

    def _updates(self, wait_ms: int) -> dict[str, TopicState]:
        """Wait for new offsets. Unassigned partitions are named too; otherwise the broker reports them as new."""
        ends = {topic: {partition: held.end for partition, held in enumerate(state.partitions)} for topic, state in self._states.items()}
        try:
            return self._settings.retry.while_running(lambda: self._client.wait(ends, wait_ms))
        except UnknownTopic:
            return self._described()

    def _described(self, topics: Iterable[str] | None = None) -> dict[str, TopicState]:
        """Return the topics that exist; `present` reports those that are missing."""
        client = self._client

        def request() -> dict[str, TopicState]:
            names = list(self._settings.subscription.topics(client) if topics is None else topics)
            while names:
                try:
                    return client.describe(names)
                except UnknownTopic as failure:
                    names.remove(failure.topic)
            return {}

        return self._settings.retry.while_running(request)

    # Batches

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> Sequence[InputPartition]:
        """Return the tasks of a batch. A repeated batch gives the same tasks, so only the two offsets may decide them."""
        settings = self._settings
        begin, stop = self._own(start), self._own(end)
        states = self._described(sorted({topic for topic, _ in begin.keys() | stop.keys()}))
        ranges = present(begin, stop, states, Losses(fatal=settings.fail_on_data_loss))
        return settings.retry.while_running(
            lambda: split(ranges, states, self._client, tasks_min=settings.tasks_min, task_records_max=settings.task_records_max)
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        """Do nothing: `latestOffset` reports the progress, including that of the last batch."""

    def stop(self) -> None:
        """Do nothing: the connection belongs to the process, which ends now."""
