"""All kinds of clients at the same time across kill -9, checked from outside.

`HEADRACE_CONSISTENCY=100` kills the broker 100 times instead of the usual few.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Proof
from tests.consistency.history import Delivery, History, Read, Settlement, Unit, anomalies
from tests.consistency.workload import Workload

KILLS: Final = int(os.environ.get("HEADRACE_CONSISTENCY", "5"))


def _without_a_confirmed_value(history: History, rng: random.Random) -> History:
    """Return the history in which one confirmed value is missing from the last read of its partition."""
    confirmed = {sent for unit in history.events if isinstance(unit, Unit) and unit.outcome == "ok" for sent in unit.values}
    last = [
        event for event in history.events if isinstance(event, Read) and any((event.place[0], value) in confirmed for value in event.values)
    ][-1]
    index = rng.choice([index for index, value in enumerate(last.values) if (last.place[0], value) in confirmed])
    cut = Read(last.place, last.offsets[:-1], last.values[:index] + last.values[index + 1 :])
    return History([cut if event is last else event for event in history.events])


def _with_a_value_twice(history: History, rng: random.Random) -> History:
    last = [event for event in history.events if isinstance(event, Read) and event.values][-1]
    doubled = Read(last.place, (*last.offsets, len(last.offsets)), (*last.values, rng.choice(last.values)))
    return History([doubled if event is last else event for event in history.events])


def _with_a_settled_value_delivered_again(history: History, rng: random.Random) -> History:
    index = rng.choice([index for index, event in enumerate(history.events) if isinstance(event, Settlement)])
    settled = history.events[index]
    assert isinstance(settled, Settlement)
    return History([*history.events[: index + 1], Delivery(settled.topic, settled.value), *history.events[index + 1 :]])


def _names(history: History) -> set[str]:
    return {text.partition(":")[0] for text in anomalies(history)}


@pytest.mark.kill_loop
@pytest.mark.timeout(max(1_200, 60 * KILLS))
async def test_a_mixed_load_over_kills_leaves_a_history_that_may_have_been(tmp_path: Path, proof: Proof) -> None:
    workload = Workload(tmp_path, seed=1)
    await workload.run(KILLS)
    history, rng = workload.history, random.Random(1)
    assert anomalies(history) == []
    confirmed = {unit.producer for unit in history.events if isinstance(unit, Unit) and unit.outcome == "ok"}
    producers = {"plain-figg", "plain-flymq", "plain-rustlog", "plain-blipmq", "flymq-tx", "fujin-tx", "writer-a", "writer-b"}
    assert confirmed == producers, "a client that never gets through proves nothing"
    # The checker must also find an anomaly that is added to the real history.
    assert "lost" in _names(_without_a_confirmed_value(history, rng))
    assert "duplicate" in _names(_with_a_value_twice(history, rng))
    assert "resurrected" in _names(_with_a_settled_value_delivered_again(history, rng))
    for kind, count in history.counts().items():
        proof(f"events of mixed load judged: {kind}", count)
    proof("kills under mixed load", workload.kills)
