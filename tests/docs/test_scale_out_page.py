"""docs/scale-out.md: the worked example runs as it stands, and its tables are those of the program."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.capacity import RATES, Costs, plan
from headrace.kafka_server.cluster import free_ports
from tests.storage.stores import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
SECONDS_MAX = 600


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.xdist_group("cluster")
def test_the_worked_example_runs_and_no_record_is_missing(tmp_path: Path) -> None:
    [script] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    names = ("A", "B", "FLIGHT_A", "FLIGHT_B", "MASTER")
    *addresses, master = free_ports(len(names))
    ports = dict(zip(names, [*(f"127.0.0.1:{port}" for port in addresses), str(master)], strict=True))
    environment = {**os.environ, **ports, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["TMPDIR"] = str(tmp_path)
    (tmp_path / "example.sh").write_text(f"set -eu\n{script}")
    with (tmp_path / "errors").open("w") as errors, (tmp_path / "output").open("w") as output:
        # Files, not pipes: the programs in the background would keep a pipe open.
        shell = subprocess.Popen(
            ["bash", "example.sh"], cwd=tmp_path, env=environment, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            shell.wait(SECONDS_MAX)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            until(lambda: not list(tmp_path.glob("kafka-*")))  # the nodes are in sessions of their own: `tools/kafka` stops them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    said = (tmp_path / "errors").read_text()[-3000:]
    assert shell.returncode == 0, said
    assert (tmp_path / "output").read_text().splitlines()[-2:] == ["orders", "2000"], said


def test_the_table_of_sizes_is_what_headrace_capacity_computes() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d.]+) \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(RATES)
    for rate, row in zip(RATES, rows, strict=True):
        found = plan(rate, Costs())
        numbers = [float(text.replace(",", "")) for text in row]
        assert numbers[:4] == [rate, found["brokers"], found["kafka_nodes"], found["partitions"]]
        assert numbers[4] == pytest.approx(float(str(found["gbit_per_s"])), rel=0.1) and numbers[5] == found["executors"]


def test_the_table_of_costs_has_the_numbers_of_the_program() -> None:
    costs = Costs()
    for text in (
        f"| {costs.broker_publish_us} µs |",
        f"| {costs.broker_read_us} µs |",
        f"| {costs.broker_flight_us} µs |",
        f"| {costs.kafka_leader_us}; {costs.kafka_follower_us}; {costs.kafka_read_us} µs |",
        f"| {costs.value_bytes + costs.stored_bytes:.0f} |",
        f"| {costs.spark_us} µs |",
    ):
        assert text in PAGE, text
