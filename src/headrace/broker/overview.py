"""The overview of a broker: its state in one reply, as `headrace.overview` describes it.

The operation `status` of FlyMQ's BROKER, the Flight action `status` and `GET /status.json` return it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from headrace.broker.authorizer import ANONYMOUS, Principal
from headrace.broker.broker import Broker
from headrace.broker.meters import Meter
from headrace.engine.contract import Topic
from headrace.overview import TopicCounters, Traffic, Warning

Report: TypeAlias = Callable[[], Mapping[str, Any]]
"""Returns `access`, `version`, and the fields of `server`."""
GROUPS_MAX: Final = 100
"""Groups in the reply: those with the highest lag."""
LOOP_LAG_MS_MAX: Final = 250
"""Delay of the event loop that causes a warning."""
_GROUPS_A_TURN: Final = 64
"""Groups handled in one turn of the loop."""
_NEARLY: Final = 0.9
"""Part of a limit from which on there is a warning."""


async def overview(broker: Broker, who: Principal, report: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of `headrace.overview.Overview`. Yields to the event loop: topics and groups may be thousands."""
    facts = dict(report)
    access, version = facts.pop("access", "open"), facts.pop("version", None)
    is_known = access == "open" or who.name != ANONYMOUS
    may_describe = broker.may_describe(who)
    health = broker.health
    problems = [str(problem) for problem in health.problems] if may_describe else []
    lags = await _lags(broker, who)
    dead_letters = {topic: count for topic, count in broker.dead_letter_counts(who).items() if count}
    return {
        "principal": who.name,
        "access": access,
        "version": version if is_known else None,
        "uptime_ms": broker.uptime_ms if is_known else None,
        "time_ms": broker.now,
        "started_at_ms": broker.now - broker.uptime_ms,
        "health": {"state": health.state.value, "problems": problems},
        "topics": await _topics(broker, who),
        "groups": [{"group": group, "topic": topic, "lag": lag} for (group, topic), lag in lags.most_common(GROUPS_MAX)],
        "groups_count": len({group for group, _ in lags}),
        "lag": lags.total(),
        "dead_letters": [{"topic": topic, "waiting": count} for topic, count in dead_letters.items()],
        "delayed": broker.delayed_count(who),
        "traffic": {protocol: Traffic(**_traffic(meter)) for protocol, meter in sorted(broker.traffic(who).items())},
        "warnings": list(_warnings(problems, dead_letters, facts if may_describe else {})),
        "server": facts if may_describe and facts else None,
    }


async def topic_counters(broker: Broker, who: Principal) -> list[TopicCounters]:
    """Return size and traffic of every topic that this principal may see, by name."""

    def counted(topics: list[Topic]) -> list[TopicCounters]:
        return [_counters(broker, who, topic) for topic in topics]

    return [row for rows in await broker.listed(who, counted) for row in rows]


def _counters(broker: Broker, who: Principal, topic: Topic) -> TopicCounters:
    total = Meter.zero()
    for meter in broker.meters.topics.get(topic.name, {}).values():
        total.add(meter)
    records, size_bytes = _size(broker, who, topic.name, topic.partitions)
    return TopicCounters(topic=topic.name, partitions=topic.partitions, records=records, size_bytes=size_bytes, **_traffic(total))


def _traffic(meter: Meter) -> dict[str, int]:
    return {name: getattr(meter, name) for name in Traffic.__struct_fields__}


def _size(broker: Broker, who: Principal, topic: str, partitions: int) -> tuple[int, int]:
    """Return the records and bytes stored now."""
    bounds = [broker.bounds(who, topic, partition) for partition in range(partitions)]
    return sum(held.end - held.first for held in bounds), sum(broker.size_bytes(who, topic, partition) for partition in range(partitions))


async def _topics(broker: Broker, who: Principal) -> object:
    totals = {"count": 0, "partitions": 0, "records": 0, "size_bytes": 0}

    def add(topics: list[Topic]) -> None:
        totals["count"] += len(topics)
        for topic in topics:
            records, size_bytes = _size(broker, who, topic.name, topic.partitions)
            totals["partitions"] += topic.partitions
            totals["records"] += records
            totals["size_bytes"] += size_bytes

    await broker.listed(who, add)
    return totals


async def _lags(broker: Broker, who: Principal) -> Counter[tuple[str, str]]:
    lags: Counter[tuple[str, str]] = Counter()
    for number, group in enumerate(broker.groups(who)):
        for row in broker.lag(who, group):
            lags[group, row.topic] += row.lag
        if number % _GROUPS_A_TURN == 0:
            await asyncio.sleep(0)
    return lags


def _warnings(problems: list[str], dead_letters: Mapping[str, int], server: Mapping[str, Any]) -> Iterator[Warning]:
    """Yield what needs attention, the most urgent first."""
    for problem in problems:
        yield Warning(name="health", text=problem, advice="see the log of the broker; writes that fail for good need a restart")
    if (disk := server.get("disk")) is not None and disk["free_bytes"] < 2 * disk["headroom_bytes"]:
        text = f"{disk['free_bytes']} bytes are free; publishing stops below {disk['headroom_bytes']}"
        yield Warning(name="disk_space", text=text, advice="add space, delete topics, or shorten their retention")
    if (connections := server.get("connections")) is not None and connections["open"] > _NEARLY * connections["max"]:
        text = f"{connections['open']} of {connections['max']} connections are open"
        yield Warning(name="connections", text=text, advice="find clients that leak connections, or raise limits.connections")
    activity = server.get("activity") or {}
    if activity.get("open_files", 0) > _NEARLY * activity.get("open_files_max", 1 << 62):
        text = f"{activity['open_files']} of {activity['open_files_max']} files are open"
        yield Warning(name="open_files", text=text, advice="raise the limit of open files (LimitNOFILE)")
    if (lag_ms := (server.get("loop_lag") or {}).get("recent_max_ms", 0.0)) > LOOP_LAG_MS_MAX:
        text = f"the event loop was delayed by {lag_ms:.0f} ms in the last minute"
        yield Warning(name="loop_lag", text=text, advice="look for large requests, many connections, or a machine without free CPU")
    if waiting := sum(dead_letters.values()):
        text = f"{waiting} dead letters wait in {len(dead_letters)} topics"
        yield Warning(name="dead_letters", text=text, advice="headrace dlq list TOPIC shows the reasons; then replay or purge them")
