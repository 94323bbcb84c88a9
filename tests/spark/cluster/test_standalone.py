"""A query on a standalone cluster with two workers, whose executors die in the middle of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Proof
from tests.spark.cluster.standalone import Standalone
from tests.spark.crash.supervisor import Supervisor
from tests.spark.crash.traps import VARIABLE

KILLS = (("executor", "staging"), ("executor", "staged"))


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.xdist_group("cluster")
def test_an_executor_that_dies_takes_no_row_with_it_and_leaves_none_behind(tmp_path: Path, cluster: Standalone, proof: Proof) -> None:
    conf = {**cluster.conf, f"spark.executorEnv.{VARIABLE}": str(tmp_path / "traps")}
    supervisor = Supervisor(tmp_path, seed=1, master=cluster.master, conf=conf)
    try:
        outcome = supervisor.run(KILLS)
    finally:
        supervisor.close()
    proof("kill -9 under a Spark query", outcome.kills.total())
    assert outcome.kills == {"executor staging": 1, "executor staged": 1}
    assert outcome.rows > 0
