"""Pipeline processes: start, kill, restart, and status and stop from another terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace.flight.client import FlightClient
from tests.conftest import Proof
from tests.spark.fast_start import spark_home
from tests.spark.pipelines.test_running import publish, records
from tests.spark.serving import FlightBroker, session_settings

pytestmark = pytest.mark.spark

TOML = """
[pipeline]
name = "copy"
trigger = "100 ms"

[sources.numbers]
topic = "{source}"
format = "json"
schema = "id long"
options = {{ maxOffsetsPerTrigger = 200 }}

[steps.doubled]
sql = "select id, id * 2 as twice from numbers"

[sinks.topic]
from = "doubled"
kind = "topic"
topic = "{target}"

[sinks.table]
from = "doubled"
kind = "delta"
path = "table"
"""


class Terminal:
    """Run `headrace` commands in a separate directory."""

    def __init__(self, directory: Path, broker: FlightBroker) -> None:
        self.directory, self.broker = directory, broker
        self.environment = {
            **os.environ,
            "SPARK_HOME": str(spark_home()),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "HEADRACE_PIPELINES": str(directory / "entries"),
            "HEADRACE_FLIGHT": broker.address,
        }
        self._children: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        settings = [f"--conf={key}={_text(value)}" for key, value in session_settings(self.directory / "spark").items()]
        child = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments, "--master=local[2]", *settings],
            cwd=self.directory,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._children.append(child)
        return child

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            cwd=self.directory, env=self.environment, text=True, capture_output=True, timeout=600, check=False,
        )  # fmt: skip

    def status(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        """Read the status file, which is a second faster than the command."""
        file = self.directory / "checkpoints" / "copy" / ".headrace" / "status.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found if found.get("pid") == child.pid else {"state": "unborn", "queries": []}

    def close(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.communicate()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture
def terminal(tmp_path: Path, broker: FlightBroker) -> Iterator[Terminal]:
    made = Terminal(tmp_path, broker)
    yield made
    made.close()


def until(is_so: Callable[[], bool], child: subprocess.Popen[str] | None = None, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if child is not None and child.poll() is not None:
            raise AssertionError(f"it ended with {child.returncode}: {child.communicate()[1]}")
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def rows_of(terminal: Terminal, child: subprocess.Popen[str]) -> list[int]:
    return [query["rows_total"] for query in terminal.status(child)["queries"]]


def java_below(pid: int) -> int:
    """Return the Java process of a session, the only child of its driver."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert "java" in Path(f"/proc/{child}/cmdline").read_text()
    return int(child)


def test_every_row_is_there_once_though_the_pipeline_is_killed_again_and_again(
    terminal: Terminal, flight_client: FlightClient, fresh_topic: Callable[..., str], proof: Proof
) -> None:
    source, target = fresh_topic(partitions=2), fresh_topic("-out")
    (terminal.directory / "copy.toml").write_text(TOML.format(source=source, target=target))
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        publish(flight_client, source, *({"id": id} for id in range(sent, sent + count)))
        sent += count

    kills = 0
    send(600)
    for wanted in (400, 200):
        child = terminal.start("pipeline", "run", "copy.toml")
        rows = partial(rows_of, terminal, child)
        until(lambda rows=rows, wanted=wanted: min(rows(), default=0) >= wanted, child)  # type: ignore[misc]
        send(600)
        until(lambda rows=rows, wanted=wanted: max(rows()) > wanted, child)  # type: ignore[misc]
        kills += 1
        if kills == 1:
            child.kill()
            assert child.wait() == -signal.SIGKILL
        else:
            os.kill(java_below(child.pid), signal.SIGKILL)
            _, errors = child.communicate(timeout=300)
            assert child.returncode == 1
            assert errors.splitlines()[-1].startswith("headrace: the Spark process has ended; see ")
        [row] = json.loads(terminal.run("pipeline", "list", "-o", "json").stdout)
        assert (row["name"], row["state"], row["pid"]) == ("copy", "lost" if kills == 1 else "failed", child.pid)
    child = terminal.start("pipeline", "run", "copy.toml")
    until(lambda: {query["lag"] for query in terminal.status(child)["queries"]} == {0}, child)
    shown = terminal.run("pipeline", "status", "copy", "-o", "json")
    assert {row["sink"]: row["state"] for row in json.loads(shown.stdout)} == {"topic": "running", "table": "running"}
    again = terminal.run("pipeline", "run", "copy.toml")
    assert (again.returncode, "pipeline copy runs already" in again.stderr) == (7, True)
    stopped = terminal.run("pipeline", "stop", "copy")
    assert (stopped.returncode, stopped.stderr) == (0, "copy: stopped\n")
    assert child.wait(timeout=300) == 0
    in_topic = Counter(row["id"] for row in records(flight_client, target))
    in_table = Counter(DeltaTable(terminal.directory / "table").to_pyarrow_table().column("id").to_pylist())
    assert in_topic == Counter(range(sent))
    assert in_table == Counter(range(sent))
    assert terminal.run("pipeline", "stop", "copy").returncode == 7
    proof("kills of a running pipeline", kills)
    proof("rows that came through them exactly once", 2 * sent)


def test_an_execution_reads_what_is_there_and_ends_and_one_that_follows_ends_by_a_signal(
    terminal: Terminal, flight_client: FlightClient, fresh_topic: Callable[..., str]
) -> None:
    source, target = fresh_topic(), fresh_topic("-out")
    (terminal.directory / "copy.toml").write_text(TOML.format(source=source, target=target))
    publish(flight_client, source, *({"id": id} for id in range(500)))
    once = terminal.start("pipeline", "run", "copy.toml", "--once")
    _, errors = once.communicate(timeout=600)
    assert once.returncode == 0, errors
    assert "copy: finished; topic 500 rows, table 500 rows" in errors
    assert "Exception" not in errors
    assert len(records(flight_client, target)) == 500
    asked = terminal.start("sql", f"select count(*) as n, sum(twice) as total from `{target}`", "--format=json", "-o", "json")
    answer, errors = asked.communicate(timeout=600)
    assert (asked.returncode, errors) == (0, "")
    assert json.loads(answer) == [{"n": 500, "total": 499 * 500}]
    following = terminal.start("pipeline", "run", "copy.toml")
    until(lambda: terminal.status(following)["state"] == "running", following)
    following.send_signal(signal.SIGTERM)
    _, errors = following.communicate(timeout=300)
    assert following.returncode == 0, errors
    assert "copy: stopped" in errors
    assert terminal.status(following)["state"] == "stopped"
