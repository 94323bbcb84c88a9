"""The operation `status` of BROKER: the state of the broker in one reply.

    {principal, access, version, uptime_ms, health: {state, problems},
     topics: {count, partitions, records, size_bytes},
     groups: [{group, topic, lag}], groups_count,
     dead_letters: [{topic, waiting}],
     server: {engine, data, disk, loop_lag, listeners, connections} or null}

Every principal gets the topics, groups and dead letters that it may see. `server` and the problems of `health` are for principals that
may describe the broker. `version` and `uptime_ms` are null for a peer that has to log in first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from headrace.broker import Broker, Principal
from headrace.broker.authorizer import ANONYMOUS
from headrace.errors import UnknownTopic

Report: TypeAlias = Callable[[], Mapping[str, object]]
"""Returns `access`, `version`, and the fields of `server`."""
GROUPS_MAX: Final = 100
"""Groups in the reply: those with the highest lag."""
_STEPS_A_TURN: Final = 256
"""Topics or groups handled in one turn of the loop."""


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
    found = broker.topics(who)
    totals = {"count": len(found), "partitions": sum(topic.partitions for topic in found), "records": 0, "size_bytes": 0}
    for number, topic in enumerate(found):
        with contextlib.suppress(UnknownTopic):  # deleted meanwhile
            for partition in range(topic.partitions):
                bounds = broker.bounds(who, topic.name, partition)
                totals["records"] += bounds.end - bounds.first
                totals["size_bytes"] += broker.size_bytes(who, topic.name, partition)
        if number % _STEPS_A_TURN == 0:
            await asyncio.sleep(0)
    return totals


async def _lags(broker: Broker, who: Principal) -> Counter[tuple[str, str]]:
    lags: Counter[tuple[str, str]] = Counter()
    for number, group in enumerate(broker.groups(who)):
        for row in broker.lag(who, group):
            lags[group, row.topic] += row.lag
        if number % _STEPS_A_TURN == 0:
            await asyncio.sleep(0)
    return lags
