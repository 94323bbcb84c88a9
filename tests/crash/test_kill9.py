"""Kill -9 loop, short enough for the normal suite. `python -m tests.crash.kill9 --cycles N` makes more cycles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Proof
from tests.crash.kill9 import kill_repeatedly

pytestmark = pytest.mark.kill_loop

CYCLES = 50


def test_no_acknowledged_record_is_lost_however_often_the_broker_is_killed(tmp_path: Path, proof: Proof) -> None:
    outcome = kill_repeatedly(tmp_path, cycles=CYCLES, seed=1)
    proof("kill -9 cycles", outcome.cycles.total())
    proof("records acknowledged under kill -9", outcome.acked)
    assert outcome.cycles.total() == CYCLES
    assert outcome.protocols == {"figg", "flymq", "blipmq", "rustlog", "fujin"}
    assert outcome.kept >= outcome.acked
