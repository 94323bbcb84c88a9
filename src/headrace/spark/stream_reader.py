"""`spark.readStream.format("headrace")`, the driver's part: where to start, how far the next micro-batch goes, what its tasks read.

Spark keeps one object of this class for as long as the query runs, in a process of its own, and calls it from one thread. It asks for
the latest offset about ninety times a second; the broker holds that question until there is news, so an idle query costs little and
a new record is seen at once.

The checkpoint is the truth about what was read. Progress is committed to a group all the same, where lag can be seen. Not by Spark's
`commit()`, which never comes for the last batch of a run: the start that Spark hands to `latestOffset` is the end of the last batch
that was completed.
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
from headrace.spark.admission import Patience, records_within, share
from headrace.spark.batch_reader import resolved
from headrace.spark.connection import connect
from headrace.spark.offsets import Offsets, Place, from_json, to_json
from headrace.spark.progress import Progress
from headrace.spark.ranges import Losses, present, split
from headrace.spark.reading import RangeReader

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_MS: Final = 50
"""How long one question for news may be held: the query cannot be stopped meanwhile."""
PATTERN_SECONDS: Final = 1.0
"""How often a pattern looks for new topics, and a query that has none for its first."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per run of a query."""

    def __init__(self, reader: RangeReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._settings, self._clock = reader, reader.settings, clock
        self._patience = Patience(self._settings.records_min, self._settings.delay_ms)
        self._states: dict[str, TopicState] = {}
        self._initial: Offsets | None = None
        self._target: Offsets | None = None
        """Where a run with the trigger AvailableNow ends."""
        self._is_idle = False
        self._listed_at = float("-inf")

    def __reduce__(self) -> tuple[type[StreamReader], tuple[RangeReader]]:
        """Tasks get what they need and nothing else: no connection, no thread."""
        return StreamReader, (self._reader,)

    @property
    def _client(self) -> FlightClient:
        return connect(self._settings.servers)

    @cached_property
    def _progress(self) -> Progress:
        return Progress(self._client, self._settings.group)

    # Offsets

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Asked for twice before the first batch: "latest" must mean the same both times."""
        if self._initial is None:
            settings, client = self._settings, self._client
            self._states = settings.endurance.at_first(lambda: settings.subscription.states(client), settings.servers.addresses)
            firsts, ends = settings.subscription.firsts(self._states), settings.subscription.ends(self._states)
            self._initial = resolved(settings.start, firsts, ends, client, fatal=settings.fail_on_data_loss)
        return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        """What Spark hands back to `latestOffset`, unless the trigger wants everything. Which of the limits it names is not important."""
        settings = self._settings
        if settings.records_max is not None:
            return ReadMaxRows(settings.records_max)
        if settings.bytes_max is not None:
            return ReadMaxBytes(settings.bytes_max)
        return ReadMinRows(settings.records_min) if settings.records_min is not None else ReadAllAvailable()

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        """The end of the next batch; `start` itself if there is to be none."""
        begin = self._own(start)
        self._progress.tell(begin, wait=self._target is not None)
        ends = self._ends(begin) if self._target is None else self._target
        end = self._admitted(begin, ends, limit)
        self._is_idle = end is None
        return to_json(begin if end is None else end)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """For the progress report: the answer to the last question for news."""
        return to_json(self._settings.subscription.ends(self._states)) or None

    def prepareForTriggerAvailableNow(self) -> None:
        self._states = self._described()
        self._target = self._settings.subscription.ends(self._states)

    def _own(self, given: dict[str, dict[str, int]]) -> Offsets:
        """Offsets of a checkpoint may be those of another query, or of another source of this one: Spark tells sources apart by their
        order alone. Going on from there would read everything again, or what nobody asked for."""
        reads = self._settings.subscription.reads
        if given and not any(map(reads, given)):
            raise ConfigError(
                f"the checkpoint is not of this source: it has read {', '.join(sorted(given))}, and {self._settings.subscription} is to be "
                "read. Give the query a checkpoint of its own, and keep the order of its sources"
            )
        return from_json(given)

    def _admitted(self, begin: Offsets, ends: Offsets, limit: ReadLimit) -> Offsets | None:
        """How far the next batch goes. None: there is nothing to do, or not enough yet."""
        base = {place: self._base(place, begin.get(place, 0), end) for place, end in ends.items()}
        available = {place: end - base[place] for place, end in ends.items()}
        records = sum(available.values())
        if not records and all(ends.get(place) == offset for place, offset in begin.items()):
            return None
        if isinstance(limit, ReadAllAvailable):
            return ends
        if records and self._target is None and not self._patience.enough(records, now_ms=self._clock() * 1000):
            return None
        taken = share(available, self._records_max(available))
        return {place: base[place] + taken[place] for place in ends}

    def _base(self, place: Place, begin: int, end: int) -> int:
        """Where reading goes on: behind what retention took, and at the front again in a topic that was made anew."""
        state = self._states.get(place[0])
        first = state.partitions[place[1]].first if state is not None and place[1] < len(state.partitions) else 0
        return min(max(begin, first) if begin <= end else first, end)

    def _records_max(self, available: Mapping[Place, int]) -> int:
        records = sum(available.values())
        if self._settings.bytes_max is not None:
            records = records_within(available, {place: self._record_bytes(place) for place in available}, self._settings.bytes_max)
        return records if self._settings.records_max is None else min(records, self._settings.records_max)

    def _record_bytes(self, place: Place) -> float:
        state = self._states.get(place[0])
        held = state.partitions[place[1]] if state is not None and place[1] < len(state.partitions) else None
        return held.size_bytes / max(held.end - held.first, 1) if held is not None else 0.0

    # What the broker says

    def _ends(self, begin: Offsets) -> Offsets:
        """The ends of all partitions as of now. If the query has nothing to do, the broker is given a moment to change that."""
        subscription = self._settings.subscription
        known = subscription.ends(self._states)
        is_due = self._clock() - self._listed_at >= PATTERN_SECONDS
        if is_due and (subscription.pattern or not self._states):
            self._listed_at = self._clock()
            self._states = self._described()
        elif self._states:
            caught_up = all(begin.get(place, 0) == end for place, end in known.items())
            self._states = self._news(WAIT_MS if caught_up or self._is_idle else 0)
        else:
            time.sleep(WAIT_MS / 1000)  # there is no topic yet whose news could be waited for
        return subscription.ends(self._states)

    def _news(self, wait_ms: int) -> dict[str, TopicState]:
        """Partitions that are not assigned are named too, or the broker would take them for news."""
        ends = {topic: {partition: held.end for partition, held in enumerate(state.partitions)} for topic, state in self._states.items()}
        try:
            return self._settings.endurance.throughout(lambda: self._client.wait(ends, wait_ms))
        except UnknownTopic:
            return self._described()

    def _described(self, topics: Iterable[str] | None = None) -> dict[str, TopicState]:
        """Those topics that are there; what it means that one is not is a question for `present`."""
        client = self._client

        def ask() -> dict[str, TopicState]:
            names = list(self._settings.subscription.topics(client) if topics is None else topics)
            while names:
                try:
                    return client.describe(names)
                except UnknownTopic as failure:
                    names.remove(failure.topic)
            return {}

        return self._settings.endurance.throughout(ask)

    # Batches

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> Sequence[InputPartition]:
        """The tasks of a batch; of one that is run again, too, so nothing but the two offsets counts."""
        settings = self._settings
        begin, stop = self._own(start), self._own(end)
        states = self._described(sorted({topic for topic, _ in begin.keys() | stop.keys()}))
        ranges = present(begin, stop, states, Losses(fatal=settings.fail_on_data_loss))
        return settings.endurance.throughout(
            lambda: split(ranges, states, self._client, tasks_min=settings.tasks_min, task_records_max=settings.task_records_max)
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        """Nothing to do: `latestOffset` learns the same, and of the last batch too."""

    def stop(self) -> None:
        """Nothing to release: the connection belongs to the process, which ends now."""
