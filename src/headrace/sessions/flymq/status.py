"""The operation `status` of BROKER: the state of the broker in one reply.

    {principal, access, version, uptime_ms, health: {state, problems},
     topics: {count, partitions, records, size_bytes},
     groups: [{group, topic, lag}], groups_count,
     dead_letters: [{topic, waiting}],
     server: {engine, data, disk, loop_lag, loop_turns, listeners, connections} or null}

Every principal gets the topics, groups and dead letters that it may see. `server` and the problems of `health` are for principals that
may describe the broker. `version` and `uptime_ms` are null for a peer that has to log in first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from headrace.broker import Broker, Principal, Topic
from headrace.broker.authorizer import ANONYMOUS

Report: TypeAlias = Callable[[], Mapping[str, object]]
"""Returns `access`, `version`, and the fields of `server`."""
GROUPS_MAX: Final = 100
"""Groups in the reply: those with the highest lag."""
_GROUPS_A_TURN: Final = 64
"""Groups handled in one turn of the loop."""


async def status(broker: Broker, who: Principal, report: Mapping[str, object]) -> object:
    facts = dict(report)
    access, version = facts.pop("access", "open"), facts.pop("version", None)
    is_known = access == "open" or who.name != ANONYMOUS
    may_describe = broker.may_describe(who)
    health = broker.health
    lags = await _lags(broker, who)
    return {
        "principal": who.name,
        "access": access,
        "version": version if is_known else None,
        "uptime_ms": broker.uptime_ms if is_known else None,
        "health": {
            "state": health.state.value,
            "problems": [str(problem) for problem in health.problems] if may_describe else [],
        },
        "topics": await _topics(broker, who),
        "groups": [{"group": group, "topic": topic, "lag": lag} for (group, topic), lag in lags.most_common(GROUPS_MAX)],
        "groups_count": len({group for group, _ in lags}),
        "dead_letters": [{"topic": topic, "waiting": count} for topic, count in broker.dead_letter_counts(who).items() if count],
        "server": facts if may_describe else None,
    }


async def _topics(broker: Broker, who: Principal) -> object:
    totals = {"count": 0, "partitions": 0, "records": 0, "size_bytes": 0}

    def add(topics: list[Topic]) -> None:
        totals["count"] += len(topics)
        for topic in topics:
            totals["partitions"] += topic.partitions
            for partition in range(topic.partitions):
                bounds = broker.bounds(who, topic.name, partition)
                totals["records"] += bounds.end - bounds.first
                totals["size_bytes"] += broker.size_bytes(who, topic.name, partition)

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
