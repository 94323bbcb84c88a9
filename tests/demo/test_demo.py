"""The demo as `make run` starts it: real broker, five real clients, real Spark."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from headrace.demo.demo import DemoOptions, run_demo

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders" / "pipeline.toml"
ANYWHERE = ("--listen", "127.0.0.1:0", "--listen-quic", "127.0.0.1:0", "--listen-flight", "127.0.0.1:0", "--listen-console", "127.0.0.1:0")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", "demo", *arguments], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.spark
def test_a_timed_execution_exits_and_all_checks_hold(tmp_path: Path) -> None:
    done = demo(str(EXAMPLE), "--data", str(tmp_path / "data"), "--duration", "8", "--rate", "300", *ANYWHERE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n  yes  ") == 4 and "  NO  " not in done.stdout
    assert "0 lost, 0 doubled" in done.stdout
    last = [line for line in done.stdout.splitlines() if " orders: " in line][-1]
    for protocol in ("figg", "rustlog", "blipmq", "flymq", "fujin"):
        assert re.search(rf"{protocol} [1-9]", last), f"each protocol has taken some: {last}"
    assert done.stdout.startswith("console: http://127.0.0.1:"), "the address of the console comes first"
    assert "shown this once" not in done.stdout, "the demo does not show its key"


def test_a_part_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    taken = tmp_path / "data" / "broker"
    taken.parent.mkdir()
    taken.write_text("not a directory")
    done = demo(str(EXAMPLE), "--data", str(tmp_path / "data"), "--duration", "1", *ANYWHERE)
    assert done.returncode == 1
    assert "the broker ended with exit code 1" in done.stderr
    assert str(tmp_path / "data" / "broker.log") in done.stderr


@pytest.mark.kafka
@pytest.mark.xdist_group("kafka")
def test_on_kafka_the_broker_gets_a_running_node_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoOptions] = []

    def run(options: DemoOptions, console: Console) -> bool:
        seen.append(options)
        [bootstrap] = [argument.removeprefix("kafka.bootstrap=") for argument in options.serve_arguments if "bootstrap" in argument]
        host, _, port = bootstrap.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=300):
            return True

    monkeypatch.setattr("headrace.demo.demo._run", run)
    assert run_demo(DemoOptions(EXAMPLE, tmp_path / "data", is_on_kafka=True), Console(quiet=True))
    [options] = seen
    assert options.serve_arguments[:2] == ("--engine", "kafka") and options.data.is_relative_to(tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
