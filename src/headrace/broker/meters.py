"""Counters of the broker: plain integers that the hot path adds to and the metrics read.

`Meters.meter` is looked up once and kept by routes, cursors and members. Counting a batch costs a few additions, whatever its size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from headrace.engine.contract import Batch, Write
from headrace.histogram import SECONDS, Histogram

_REASONS_MAX: Final = 256
"""Distinct reasons of refused requests. The codes are ours, so this is never reached by peers."""


class Meter:
    """Traffic of one topic through one protocol."""

    __slots__ = (
        "delivered_bytes",
        "delivered_records",
        "durations",
        "fetch_duration",
        "publish_duration",
        "published_bytes",
        "published_records",
        "turn",
    )

    def __init__(self, publish_duration: Histogram, fetch_duration: Histogram) -> None:
        self.published_records = self.published_bytes = 0
        self.delivered_records = self.delivered_bytes = 0
        self.turn = 0
        """Last call of `Meters.published_each` that has counted a batch here."""
        self.durations = Histogram()
        """Times from publish to acknowledgement, over batches."""
        self.publish_duration, self.fetch_duration = publish_duration, fetch_duration
        """Durations of all topics of the protocol."""

    @property
    def published_batches(self) -> int:
        return self.durations.count

    @property
    def publish_seconds(self) -> float:
        """Sum of the times from publish to acknowledgement."""
        return self.durations.total

    @classmethod
    def zero(cls) -> Meter:
        return cls(Histogram(), Histogram())

    def published(self, topic: str, writes: Sequence[Write], seconds: float) -> None:
        """Count an acknowledged batch. Its dead letters, which are writes to another topic, do not count."""
        for write in writes:
            if write.topic == topic:
                self.published_records += write.records
                self.published_bytes += write.size_bytes
        self.took(seconds)

    def published_singly(self, records: int, size_bytes: int, seconds: float) -> None:
        """Count single records that were acknowledged together. Each was a batch for its publisher."""
        self.published_batches_together(records, records, size_bytes, seconds)

    def published_batches_together(self, batches: int, records: int, size_bytes: int, seconds: float) -> None:
        """Count batches that were acknowledged together."""
        self.count(records, size_bytes)
        self.durations.observe(seconds, batches)
        self.publish_duration.observe(seconds, batches)

    def count(self, records: int, size_bytes: int) -> None:
        """Count published records."""
        self.published_records += records
        self.published_bytes += size_bytes

    def took(self, seconds: float) -> None:
        """Count the time from the publish of a batch to its acknowledgement."""
        index = bisect_left(SECONDS, seconds)
        own, common = self.durations, self.publish_duration
        own.counts[index] += 1
        own.total += seconds
        common.counts[index] += 1
        common.total += seconds

    def delivered(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.delivered_records += len(batch)
            self.delivered_bytes += batch.size_bytes

    def read(self, batches: Iterable[Batch], seconds: float) -> None:
        """Count a read and its duration."""
        self.delivered(batches)
        self.fetch_duration.observe(seconds)

    def add(self, other: Meter) -> None:
        """Add the traffic of another meter."""
        self.published_records += other.published_records
        self.published_bytes += other.published_bytes
        self.delivered_records += other.delivered_records
        self.delivered_bytes += other.delivered_bytes
        self.durations.add(other.durations)


class Meters:
    """All counters of a broker. `ticks` returns seconds of a monotonic clock."""

    def __init__(self, ticks: Callable[[], float]) -> None:
        self.ticks = ticks
        self.topics: dict[str, dict[str, Meter]] = {}
        """By topic and protocol, in the order of the first traffic."""
        self._of_protocol: dict[str, dict[str, Meter]] = {}
        """Some of them by protocol and topic, for `published_each`: one lookup less for each record."""
        self.publish_durations: dict[str, Histogram] = {}
        """By protocol."""
        self.fetch_durations: dict[str, Histogram] = {}
        self.refused: Counter[tuple[str, str]] = Counter()
        """Failed requests by protocol and error code."""
        self._turn = 0
        """Number of calls of `published_each`."""
        self._gone: dict[str, Meter] = {}
        """Traffic of deleted topics by protocol, so that totals never decrease."""

    def meter(self, topic: str, protocol: str) -> Meter:
        by_protocol = self.topics.setdefault(topic, {})
        found = by_protocol.get(protocol)
        if found is None:
            found = by_protocol[protocol] = self._new(protocol)
        return found

    def published_each(self, topics: Sequence[str], sizes: Sequence[int], protocol: str, failed: Collection[int], seconds: float) -> None:
        """Count records that were acknowledged together, except those whose index is in `failed`. The records of a topic are one batch."""
        self._turn += 1
        turn, batches = self._turn, 0
        column = bisect_left(SECONDS, seconds)
        known = self._of_protocol.setdefault(protocol, {})
        for index, size_bytes in enumerate(sizes):
            if not failed or index not in failed:
                topic = topics[index]
                meter = known.get(topic)
                if meter is None:
                    meter = known[topic] = self.meter(topic, protocol)
                meter.published_records += 1
                meter.published_bytes += size_bytes
                if meter.turn != turn:
                    meter.turn = turn
                    durations = meter.durations
                    durations.counts[column] += 1
                    durations.total += seconds
                    batches += 1
        if batches:
            self.publish_durations[protocol].observe(seconds, batches)

    def _new(self, protocol: str) -> Meter:
        return Meter(self.publish_durations.setdefault(protocol, Histogram()), self.fetch_durations.setdefault(protocol, Histogram()))

    def refuse(self, protocol: str, code: str) -> None:
        """Count a request that failed."""
        key = (protocol, code)
        if key in self.refused or len(self.refused) < _REASONS_MAX:
            self.refused[key] += 1

    def topic_gone(self, topic: str) -> None:
        for known in self._of_protocol.values():
            known.pop(topic, None)
        for protocol, meter in self.topics.pop(topic, {}).items():
            self._gone.setdefault(protocol, self._new(protocol)).add(meter)

    def by_protocol(self, sees: Callable[[str], bool], *, with_gone: bool) -> dict[str, Meter]:
        """Return the traffic over the topics that `sees` accepts, by protocol. `with_gone`: deleted topics count too."""
        totals: dict[str, Meter] = {}
        if with_gone:
            for protocol, meter in self._gone.items():
                totals.setdefault(protocol, self._new(protocol)).add(meter)
        for topic, meters in self.topics.items():
            if sees(topic):
                for protocol, meter in meters.items():
                    totals.setdefault(protocol, self._new(protocol)).add(meter)
        return totals
