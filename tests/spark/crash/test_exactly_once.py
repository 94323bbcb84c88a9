"""Every row exactly once under kills of any process. HEADRACE_KILLS=100 makes the test longer; so does `tests.spark.crash.supervisor`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Proof
from tests.spark.crash.supervisor import IN_PLACE, OF_DRIVERS, kill_repeatedly, schedule

KILLS = int(os.environ.get("HEADRACE_KILLS", "16"))


@pytest.mark.spark
@pytest.mark.kill_loop
@pytest.mark.timeout(600 + 100 * KILLS)
def test_every_row_arrives_once_and_in_order_however_often_driver_broker_and_workers_are_killed(tmp_path: Path, proof: Proof) -> None:
    outcome = kill_repeatedly(tmp_path, kills=KILLS, seed=1)
    proof("kill -9 under a Spark query", outcome.kills.total())
    proof("rows copied exactly once under kill -9", outcome.rows)
    assert outcome.kills.total() >= KILLS
    assert {kind.split()[0] for kind in outcome.kills} == {"driver", "broker", "worker"}
    assert outcome.kills["driver published"], "none between the publication and Spark's own commit"
    assert outcome.kills["driver planning again"], "none during recovery"
    assert set(outcome.fenced) == {"StaleEpoch"}, "a driver that was replaced could still publish"
    assert outcome.rows > 0


@pytest.mark.parametrize("kills", [1, 12, 16, 100])
def test_a_schedule_has_as_many_kills_as_requested(kills: int) -> None:
    planned = list(schedule(kills))
    assert sum(2 if point == "recovery" else 1 for _, point in planned) in (kills, kills + 1)


def test_a_long_schedule_aims_at_every_point() -> None:
    planned = set(schedule(100))
    assert {(target, point) for point, target in IN_PLACE} <= planned
    assert {("driver", point) for point in OF_DRIVERS} <= planned
