"""Figures of the last hour, sampled through the connection of a user: each user sees what rules allow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.clients.flymq.client import FlyMqClient
from headrace.console.connection import REQUEST_SECONDS, status_of
from headrace.errors import HeadraceError

SPAN_SECONDS: Final = 3600.0
_SPAN_SECONDS_MIN: Final = 300.0
INTERVAL_SECONDS: Final = 5.0
_SLOWER_ABOVE_TOPICS: Final = 2_000
_SLOWER: Final = 6
"""With many topics, their counters are sampled with every sixth sample only."""
_IDLE_SECONDS: Final = 600.0
"""Samples are taken less often while no page is requested for this time."""
FRESH_SECONDS: Final = 3.0
"""Age up to which the list of topics is not requested again while one types."""


@dataclass(slots=True)
class Sample:
    """State of the broker at one time (Unix seconds)."""

    at: float
    status: dict[str, Any]

    @property
    def lag(self) -> int:
        return int(self.status["lag"])

    @property
    def dead_letters(self) -> int:
        return sum(row["waiting"] for row in self.status["dead_letters"])

    def traffic(self, name: str) -> int:
        """Return a counter of records or bytes, summed over all protocols."""
        return sum(one[name] for one in self.status["traffic"].values())


@dataclass(slots=True)
class TopicList:
    """Topics at one time, and their rates since an earlier time."""

    at: float = 0.0
    topics: list[dict[str, Any]] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


class Samples:
    """Ring of samples, filled by a task."""

    def __init__(self, client: FlyMqClient, clock: Callable[[], float] = time.time) -> None:
        self._client, self._clock = client, clock
        self.ring: deque[Sample | None] = deque(maxlen=int(SPAN_SECONDS / INTERVAL_SECONDS))
        """None: the broker did not answer."""
        self.list = TopicList()
        self._before = TopicList()
        self._listing = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set and replaced with every sample."""
        self.used_at = clock()
        """Time of the last page."""

    async def run(self) -> None:
        number = 0
        while True:
            await self.take()
            last = self.ring[-1]
            count = last.status["topics"]["count"] if last else 0
            if last and (count <= _SLOWER_ABOVE_TOPICS or number % _SLOWER == 0):
                try:
                    await self.topics()
                except (HeadraceError, TimeoutError):
                    pass  # the next sample tries again
            self.changed.set()
            self.changed = asyncio.Event()
            number += 1
            is_idle = self._clock() - self.used_at > _IDLE_SECONDS
            await asyncio.sleep(INTERVAL_SECONDS * (_SLOWER if is_idle else 1))

    async def take(self) -> Sample | None:
        """Take one sample."""
        try:
            sample = Sample(self._clock(), await status_of(self._client)) if self._client.is_connected else None
        except (HeadraceError, TimeoutError):
            sample = None
        self.ring.append(sample)
        return sample

    async def topics(self, *, fresh_seconds: float = FRESH_SECONDS) -> TopicList:
        """Return the topics, at most this old, with their rates."""
        async with self._listing:
            if self._clock() - self.list.at > fresh_seconds:
                async with asyncio.timeout(REQUEST_SECONDS):
                    self._note(await self._client.call("topic.counters"))
            return self.list

    def _note(self, topics: list[dict[str, Any]]) -> None:
        now = self._clock()
        published = {topic["topic"]: topic["published_records"] for topic in topics}
        # Rates compare with a list that is an interval old, not with that of the page before.
        if now - self._before.at >= 2 * INTERVAL_SECONDS and self.list.at:
            self._before = self.list
        seconds = now - self._before.at
        before = self._before.published if self._before.at else {}
        rates = {
            name: (count - before[name]) / seconds
            for name, count in published.items()
            if name in before and seconds >= 1 and count >= before[name]  # a restart resets the counters
        }
        self.list = TopicList(now, topics, published, rates)
        if not self._before.at:
            self._before = self.list

    @property
    def span_seconds(self) -> float:
        """Time that the charts show: an hour, or less while there are samples of a shorter time only."""
        oldest = next((sample.at for sample in self.ring if sample is not None), self._clock())
        return min(SPAN_SECONDS, max(_SPAN_SECONDS_MIN, self._clock() - oldest))

    @property
    def access(self) -> str:
        """The access mode of the broker at the last sample; empty if there is none."""
        last = self.ring[-1] if self.ring else None
        return str(last.status["access"]) if last is not None else ""

    def series(self, value: Callable[[Sample], float | None]) -> list[tuple[float, float | None]]:
        """Return (time, value) of all samples."""
        return [(sample.at, value(sample)) for sample in self.ring if sample is not None]

    def rate(self, name: str) -> list[tuple[float, float | None]]:
        """Return the rate of a counter per second. A restart of the broker, which resets counters, leaves a gap."""
        found: list[tuple[float, float | None]] = []
        for before, after in itertools.pairwise(sample for sample in self.ring if sample is not None):
            seconds = (after.status["time_ms"] - before.status["time_ms"]) / 1000
            is_same = before.status["started_at_ms"] == after.status["started_at_ms"] and seconds > 0
            found.append((after.at, (after.traffic(name) - before.traffic(name)) / seconds if is_same else None))
        return found

    def lag_of(self, group: str) -> list[tuple[float, float | None]]:
        """Return the lag of a group, summed over its topics."""

        def lag(sample: Sample) -> float | None:
            found = [row["lag"] for row in sample.status["groups"] if row["group"] == group]
            return sum(found) if found else None

        return self.series(lag)
