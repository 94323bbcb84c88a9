"""State that all RustLog connections of one broker share: settings, metrics, and offsets that belong to no topic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace.broker.groups.offsets import GroupLag
from headrace.errors import InvalidRequest, LimitExceeded
from headrace.limits import (
    GROUP_NAME_BYTES_MAX,
    IN_FLIGHT_BYTES_MAX,
    RUSTLOG_REPLY_BYTES_MAX,
    RUSTLOG_STALL_SECONDS_MAX,
    RUSTLOG_STRAY_OFFSETS_MAX,
    TOPIC_NAME_BYTES_MAX,
)
from headrace.sessions.turns import Turns

_SAMPLES_MAX: Final = 1_024
_LAG_TEXT_CHARS_MAX: Final = 4 * 1024 * 1024
"""Maximum size of the list of lags. The text must fit a frame in either dialect."""


@dataclass(frozen=True, slots=True)
class RustLogSettings:
    """Settings of the RustLog protocol."""

    auto_create: bool = False
    """Whether a Produce to an unknown topic creates it, if the broker allows that. The original returns an error."""
    stall_seconds: float = RUSTLOG_STALL_SECONDS_MAX
    """Timeout for a peer that stops in the middle of a frame. Zero disables it."""
    reply_bytes_max: int = RUSTLOG_REPLY_BYTES_MAX
    """Maximum size of a Fetch reply with more than one record."""
    in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX
    """Produced bytes of one connection that are not durable yet. Above this the socket is not read."""


class UnattachedOffsets:
    """Offsets that clients of the original commit before their topic exists.

    The original accepts them, so they must be readable. The broker's table of offsets has no place for them, because it could never remove
    a misspelt name. They are held in memory up to a limit, and a real commit replaces them.
    """

    def __init__(self, offsets_max: int = RUSTLOG_STRAY_OFFSETS_MAX) -> None:
        self._offsets: dict[tuple[str, str, int], int] = {}
        self._offsets_max = offsets_max

    def __len__(self) -> int:
        return len(self._offsets)

    def keep(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Store an offset. Raises `InvalidRequest`, `LimitExceeded`."""
        if len(group.encode()) > GROUP_NAME_BYTES_MAX or len(topic.encode()) > TOPIC_NAME_BYTES_MAX:
            raise InvalidRequest("group or topic name too long: at most 249 bytes")
        key = (group, topic, partition)
        if key not in self._offsets and len(self._offsets) >= self._offsets_max:
            raise LimitExceeded(f"{self._offsets_max} offsets of topics that do not exist are stored: the limit is reached")
        self._offsets[key] = offset

    def find(self, group: str, topic: str, partition: int) -> int | None:
        return self._offsets.get((group, topic, partition))

    def forget(self, group: str, topic: str, partition: int) -> None:
        self._offsets.pop((group, topic, partition), None)


class Latency:
    """Latest durations of one type of request, in nanoseconds."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_SAMPLES_MAX)

    def record(self, nanoseconds: int) -> None:
        self._samples.append(nanoseconds)

    def percentile(self, percent: int) -> int:
        ordered = sorted(self._samples)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0


class RustLogContext:
    """Shared state of one broker. `ticks_ns` is a monotonic clock in nanoseconds, used for latencies only."""

    def __init__(
        self,
        settings: RustLogSettings | None = None,
        *,
        ticks_ns: Callable[[], int] = time.perf_counter_ns,
        turns: Turns | None = None,
    ) -> None:
        self.settings = RustLogSettings() if settings is None else settings
        self.turns = Turns() if turns is None else turns
        self.ticks_ns = ticks_ns
        self.unattached = UnattachedOffsets()
        self.messages_produced = self.messages_fetched = self.bytes_in = self.bytes_out = 0
        self.connections = self.slow_consumers = 0
        self.produce_latency, self.fetch_latency = Latency(), Latency()

    def metrics(self, lags: Iterable[tuple[str, GroupLag]]) -> str:
        """Return Prometheus text with the metric names of the original. Metrics that this protocol does not know are left out."""
        lines: list[str] = []
        for name, kind, explanation, value in self._figures():
            lines += (f"# HELP {name} {explanation}", f"# TYPE {name} {kind}", f"{name} {value}")
        lines += ("# HELP consumer_lag Records a group has not read yet", "# TYPE consumer_lag gauge")
        return "\n".join([*lines, *_lag_lines(lags), ""])

    def _figures(self) -> Iterable[tuple[str, str, str, int]]:
        yield "messages_produced_total", "counter", "Records written", self.messages_produced
        yield "messages_fetched_total", "counter", "Records sent to readers", self.messages_fetched
        yield "bytes_in_total", "counter", "Bytes of the records written", self.bytes_in
        yield "bytes_out_total", "counter", "Bytes of the records sent to readers", self.bytes_out
        yield "active_connections", "gauge", "Open RustLog connections", self.connections
        yield "slow_consumers_total", "counter", "Times a reader did not take its replies and had to be waited for", self.slow_consumers
        for name, latency in (("fetch", self.fetch_latency), ("produce", self.produce_latency)):
            for percent in (50, 95, 99):
                explanation = f"{percent} of 100 {name} requests were faster, in nanoseconds"
                yield f"{name}_latency_ns_p{percent}", "gauge", explanation, latency.percentile(percent)


def _lag_lines(lags: Iterable[tuple[str, GroupLag]]) -> list[str]:
    lines: list[str] = []
    chars = 0
    for group, lag in lags:
        line = f'consumer_lag{{topic="{_label(lag.topic)}",partition="{lag.partition}",group="{_label(group)}"}} {lag.lag}'
        chars += len(line)
        if chars > _LAG_TEXT_CHARS_MAX:
            lines.append("# the list of lags is cut here")
            break
        lines.append(line)
    return lines


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
