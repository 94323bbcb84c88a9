"""Readings for metrics: everything that must be read on the event loop, in one call."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from headrace.broker.dead_letters.dead_letters import SUFFIX, DeadLetters
from headrace.broker.delayed import Schedule
from headrace.broker.groups.members import GroupConsumers
from headrace.broker.groups.offsets import Groups
from headrace.broker.meters import Meter, Meters
from headrace.broker.publishing.publish import Publisher
from headrace.broker.topics import Topics
from headrace.broker.writers.stages import Stages
from headrace.engine.contract import Engine, HealthState
from headrace.errors import UnknownTopic
from headrace.histogram import FEW_SECONDS, Histogram

_SERIES_OF_LATENCIES: Final = len(FEW_SECONDS) + 3
"""Series of one histogram: its buckets, sum and count."""
_STEPS_A_TURN: Final = 256
"""Partitions read in one turn of the event loop."""


@dataclass(slots=True)
class Readings:
    """Numbers of one moment. The lists have at most the requested number of entries; `left_out` counts the others by list."""

    health: HealthState
    uptime_ms: int
    topics: int = 0
    partitions: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    """Topic, partition, first offset, end offset, size in bytes."""
    lags: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Group, topic, partition, lag."""
    unsettled: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Group, topic, members, deliveries that wait for an ack."""
    traffic: list[tuple[str, str, Meter]] = field(default_factory=list)
    """Topic, protocol, counters. Topics beyond the maximum are one entry with the topic `OTHER_TOPICS`."""
    latencies: list[tuple[str, str, Histogram]] = field(default_factory=list)
    """Topic, protocol, times from publish to acknowledgement. A histogram has several series, so fewer topics have their own than in
    `traffic`. Each of the others is an entry with the topic `OTHER_TOPICS`."""
    dead_letters: dict[str, int] = field(default_factory=dict)
    delayed: int = 0
    appends_in_flight: int = 0
    staged_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("partitions", "groups", "topics"), 0))


OTHER_TOPICS: Final = "(other)"
"""Label of the topics beyond the maximum. No topic can have this name."""


class MeasuringOperations:
    """Part of `Broker`. For the process itself: no principal and no permission."""

    _engine: Engine
    _topics: Topics
    _groups: Groups
    _consumers: GroupConsumers
    _dead_letters: DeadLetters
    _schedule: Schedule
    _stages: Stages
    _publisher: Publisher
    meters: Meters

    @property
    def uptime_ms(self) -> int:
        raise NotImplementedError

    @property
    def appends_in_flight(self) -> int:
        """Appends that wait for the disk."""
        return self._publisher.staged

    @property
    def staged_bytes(self) -> int:
        """Bytes of exactly-once writers that are not yet published."""
        return self._stages.size_bytes

    @property
    def unsettled(self) -> int:
        """Deliveries of all groups that wait for an ack."""
        return sum(count for _, _, _, count in self._consumers.unsettled())

    async def measure(self, series_max: int) -> Readings:
        """Return the numbers for metrics, with at most `series_max` entries in each list. Yields to the event loop between steps."""
        found = Readings(self._engine.health.report().state, self.uptime_ms)
        await self._measure_partitions(found, series_max)
        await self._measure_groups(found, series_max)
        self._measure_traffic(found, series_max)
        found.delayed = len(self._schedule)
        found.appends_in_flight = self.appends_in_flight
        found.staged_bytes = self.staged_bytes
        return found

    async def _measure_partitions(self, found: Readings, series_max: int) -> None:
        topics = self._topics.visible()
        found.topics = len(topics)
        for steps, topic in enumerate(topics):
            if len(found.partitions) + topic.partitions > series_max:
                found.left_out["partitions"] += topic.partitions
                continue
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                for partition in range(topic.partitions):
                    bounds = self._engine.bounds(topic.name, partition)
                    size_bytes = self._engine.size_bytes(topic.name, partition)
                    found.partitions.append((topic.name, partition, bounds.first, bounds.end, size_bytes))
                if topic.name.endswith(SUFFIX) and (waiting := self._dead_letters.count(topic.name.removesuffix(SUFFIX))):
                    found.dead_letters[topic.name.removesuffix(SUFFIX)] = waiting
            if steps % _STEPS_A_TURN == 0:
                await asyncio.sleep(0)

    async def _measure_groups(self, found: Readings, series_max: int) -> None:
        for steps, group in enumerate(self._groups.names()):
            if len(found.lags) >= series_max:
                found.left_out["groups"] += 1
                continue
            lags = self._groups.lag(group, self._consumers.topics(group))
            found.lags += [(group, row.topic, row.partition, row.lag) for row in lags]
            if steps % _STEPS_A_TURN == 0:
                await asyncio.sleep(0)
        found.unsettled = self._consumers.unsettled()[:series_max]

    def _measure_traffic(self, found: Readings, series_max: int) -> None:
        """Read the counters. The topics of the first traffic keep their own series, so that no counter moves between series."""
        other: dict[str, Meter] = {}
        for number, (topic, meters) in zip(count(), self.meters.topics.items(), strict=False):
            for protocol, meter in meters.items():
                if number < series_max:
                    found.traffic.append((topic, protocol, meter))
                else:
                    other.setdefault(protocol, Meter.zero()).add(meter)
                found.latencies.append((topic if number < series_max // _SERIES_OF_LATENCIES else OTHER_TOPICS, protocol, meter.durations))
            found.left_out["topics"] += number >= series_max
        found.traffic += [(OTHER_TOPICS, protocol, meter) for protocol, meter in other.items()]
