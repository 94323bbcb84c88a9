"""Fake Flight client without a broker, for tests of planning: topics are lists of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pyarrow as pa
import pytest

from headrace.errors import BrokerError, UnknownTopic
from headrace.flight.client import FlightClient, PartitionState, Servers, TopicState
from headrace.spark import batch_reader, reading, stream_reader
from headrace.spark.columns import raw_schema
from headrace.spark.options import Options
from headrace.spark.read_settings import ReadSettings
from headrace.spark.reading import RangeReader

RECORD_BYTES = 100


def state(name: str, *bounds: int | tuple[int, int], retention_ms: int = 604_800_000) -> TopicState:
    """Return a topic state: `state("orders", 10, (3, 8))` has two partitions, [0, 10) and [3, 8)."""
    pairs = [(0, bound) if isinstance(bound, int) else bound for bound in bounds]
    held = tuple(PartitionState(first, end, (end - first) * RECORD_BYTES) for first, end in pairs)
    return TopicState(name, held, retention_ms, "delete")


@dataclass
class FakeClient:
    """Fake client that answers from `states` and raises `failures` first, one per call."""

    states: dict[str, TopicState] = field(default_factory=dict)
    failures: list[BrokerError] = field(default_factory=list)
    times: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    commits: list[tuple[str, Mapping[str, Mapping[int, int]]]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    reads: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def put(self, *states: TopicState) -> None:
        self.states.update({one.name: one for one in states})

    def _called(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def topics(self) -> list[str]:
        self._called()
        return sorted(self.states)

    def describe(self, topics: Sequence[str]) -> dict[str, TopicState]:
        self._called()
        for name in topics:
            if name not in self.states:
                raise UnknownTopic(name)
        return {name: self.states[name] for name in topics}

    def wait(self, ends: Mapping[str, Mapping[int, int]], wait_ms: int) -> dict[str, TopicState]:
        self.waits.append(wait_ms)
        return self.describe(list(ends))

    def split(self, topic: str, partition: int, start: int, stop: int, parts: int) -> list[tuple[int, int]]:
        cuts = [start + (stop - start) * index // parts for index in range(parts + 1)]
        return [(begin, end) for begin, end in pairwise(cuts) if begin < end]

    def offset_for_time(self, topic: str, times: Mapping[int, int]) -> dict[int, int | None]:
        return {
            partition: next((offset for offset, stamp in enumerate(self.times[topic, partition]) if stamp >= time_ms), None)
            for partition, time_ms in times.items()
        }

    def commit(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        self._called()
        self.commits.append((group, offsets))

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        stop: int,
        *,
        columns: Sequence[str],
        rows_max: int,
        reached: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Replay `answers`: a range is a batch of these offsets, an error is raised."""
        self.reads.append((start, stop, tuple(columns)))
        while self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, BrokerError):
                raise answer
            rows = list(answer)
            made = {"offset": pa.array(rows, pa.int64()), "value": pa.array([b"%d" % row for row in rows], pa.binary())}
            reached(rows[-1] + 1)
            yield pa.RecordBatch.from_pydict({name: made[name] for name in columns})


def use(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all connections return this client."""
    for module in (batch_reader, reading, stream_reader):
        monkeypatch.setattr(module, "connect", lambda servers: cast(FlightClient, client))


def range_reader(streaming: bool, columns: tuple[str, ...] = (), /, **options: str) -> RangeReader:
    given = Options({"servers": "127.0.0.1:1", **options})
    schema = raw_schema(headers=True)
    picked = type(schema)([schema[name] for name in columns]) if columns else schema
    return RangeReader(ReadSettings.of(given, streaming=streaming), tuple(picked.fieldNames()), picked)


NOWHERE = Servers(("127.0.0.1:1",))
