"""Overview of a broker: the JSON of `headrace status -o json`, `headrace top --json`, `GET /status.json` and the Flight action `status`.

All of them come from one function (`broker/overview.py`), so all show the same numbers. A reader decodes the JSON with

    overview = msgspec.json.decode(body, type=Overview)

Every count whose name ends in `_records`, `_bytes`, `_total` or `_seconds` below `Traffic`, `Activity` and `TopicCounters` is a counter: it
only grows while the broker runs. A rate is the difference of two readings divided by the time between them; `rate` computes it and
returns None when the broker was restarted between the readings, which `started_at_ms` tells.

A principal sees what the rules allow. Totals cover the topics and groups that it may see. `server` and the problems of `health` are for
principals that may describe the broker. `version` and `uptime_ms` are null for a peer that has to log in first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class _Part(msgspec.Struct, frozen=True):
    """Base class. Unknown fields are ignored, so that an older reader understands a newer broker."""


class Health(_Part, frozen=True, kw_only=True):
    """State of background threads and tasks."""

    state: str
    """ok, degraded (a step fails and is retried) or failed (writes fail until the broker is restarted)"""
    problems: list[str]


class TopicTotals(_Part, frozen=True, kw_only=True):
    """Totals over all visible topics."""

    count: int
    partitions: int
    records: int
    size_bytes: int


class GroupLag(_Part, frozen=True, kw_only=True):
    """Lag of a group in a topic, over all partitions."""

    group: str
    topic: str
    lag: int


class DeadLetters(_Part, frozen=True, kw_only=True):
    """Dead letters of a topic that wait for a decision."""

    topic: str
    waiting: int


class Traffic(_Part, frozen=True, kw_only=True):
    """Records and bytes of keys and values since the start. A record that five readers receive is delivered five times."""

    published_records: int = 0
    published_bytes: int = 0
    delivered_records: int = 0
    delivered_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            published_records=self.published_records + other.published_records,
            published_bytes=self.published_bytes + other.published_bytes,
            delivered_records=self.delivered_records + other.delivered_records,
            delivered_bytes=self.delivered_bytes + other.delivered_bytes,
        )


class TopicCounters(Traffic, frozen=True, kw_only=True):
    """One row of the operation `topic.counters`: a topic with its size and its traffic over all protocols."""

    topic: str
    partitions: int
    records: int
    """Records stored now."""
    size_bytes: int


class Warning(_Part, frozen=True, kw_only=True):
    """A condition that needs the attention of the operator."""

    name: str
    """Stable name, such as `disk_space`. Alert rules and the documentation use it too."""
    text: str
    """The condition with its numbers."""
    advice: str
    """The next step."""


class Disk(_Part, frozen=True, kw_only=True):
    """File system of the data directory. Publishing stops when less than `headroom_bytes` are free."""

    free_bytes: int
    total_bytes: int
    headroom_bytes: int


class Listener(_Part, frozen=True, kw_only=True):
    """An open address."""

    kind: str
    """tcp, quic, flight or http"""
    address: str
    protocols: list[str]
    encryption: str = ""


class Connections(_Part, frozen=True, kw_only=True):
    """Open connections of all protocols except the Flight endpoint, whose calls are in `Activity`."""

    open: int
    max: int
    by_protocol: dict[str, int]


class LoopLag(_Part, frozen=True, kw_only=True):
    """Delays of the event loop since the start. `counts` has the ticks at or below each of `bounds_ms`, and above the last."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    recent_max_ms: float
    """Maximum of the last one to two minutes."""
    bounds_ms: list[int] = []
    counts: list[int] = []


class Activity(_Part, frozen=True, kw_only=True):
    """Work of the process. Maps are by reason or protocol."""

    appends_in_flight: int = 0
    """Appends that wait for the disk."""
    staged_bytes: int = 0
    """Bytes of exactly-once writers that are staged and not yet published."""
    unsettled: int = 0
    """Deliveries that wait for an ack."""
    flight_calls: int = 0
    """Calls in progress on the Flight endpoint."""
    flight_calls_total: int = 0
    refused_total: dict[str, int] = {}
    """Requests that failed, by error code."""
    throttled_total: dict[str, int] = {}
    """Times that the broker slowed a peer down, by reason."""
    flushes_total: int = 0
    flush_seconds: float = 0.0
    flush_bytes: int = 0
    syncs_total: int = 0
    sync_seconds: float = 0.0
    memory_bytes: int = 0
    open_files: int = 0
    open_files_max: int = 0


class Server(_Part, frozen=True, kw_only=True):
    """Facts of the broker process, for principals that may describe the broker."""

    pid: int
    engine: str
    capabilities: dict[str, bool | int | str | None] = {}
    """Features of the engine, by name."""
    is_coordinator: bool = True
    """False for a broker that shares its log with others and does not own the tables."""
    coordinator: str = ""
    """Address of the coordinator, if the log is shared and the address is known."""
    data: str
    disk: Disk
    loop_lag: LoopLag
    loop_turns: LoopLag | None = None
    """The same for the CPU time of one turn of the loop."""
    listeners: list[Listener]
    connections: Connections
    activity: Activity = Activity()


class Overview(_Part, frozen=True, kw_only=True):
    """The state of a broker."""

    principal: str
    access: str
    version: str | None
    uptime_ms: int | None
    time_ms: int
    """Clock of the broker at this reading, in Unix ms."""
    started_at_ms: int
    """Unix ms at which this broker started: counters of two readings can be compared only if it is the same."""
    health: Health
    topics: TopicTotals
    groups: list[GroupLag]
    """The groups with the highest lag, at most 100."""
    groups_count: int
    lag: int
    """Sum over all visible groups."""
    dead_letters: list[DeadLetters]
    delayed: int
    """Delayed messages that wait and that the principal may see."""
    traffic: dict[str, Traffic]
    """By protocol, over all visible topics."""
    warnings: list[Warning]
    server: Server | None


def total(traffic: Mapping[str, Traffic] | Iterable[Traffic]) -> Traffic:
    """Return the sum over all protocols or topics."""
    found = Traffic()
    for one in traffic.values() if isinstance(traffic, Mapping) else traffic:
        found = found + one
    return found


class Rates(_Part, frozen=True, kw_only=True):
    """Per second, between two readings."""

    published_records: float
    published_bytes: float
    delivered_records: float
    delivered_bytes: float


def rate(before: Traffic | None, after: Traffic, seconds: float) -> Rates:
    """Return the rates between two readings of the same counters. `before` None: the topic or protocol was idle."""
    before = before or Traffic()
    return Rates(**{name: max(0, getattr(after, name) - getattr(before, name)) / seconds for name in Traffic.__struct_fields__})


def rates(before: Overview, after: Overview) -> dict[str, Rates] | None:
    """Return the rates by protocol, with the key `all` for their sum; None if the two readings cannot be compared."""
    seconds = (after.time_ms - before.time_ms) / 1000
    if before.started_at_ms != after.started_at_ms or seconds <= 0:
        return None
    found = {name: rate(before.traffic.get(name), now, seconds) for name, now in after.traffic.items()}
    return {"all": rate(total(before.traffic), total(after.traffic), seconds), **found}
