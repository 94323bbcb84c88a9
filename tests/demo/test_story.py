"""The whole story once, as `make run` tells it: real broker, five real clients, real Spark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders" / "pipeline.toml"
ANYWHERE = ("--listen", "127.0.0.1:0", "--listen-quic", "127.0.0.1:0", "--bulk", "127.0.0.1:0")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", "demo", *arguments], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.spark
def test_a_timed_run_ends_by_itself_and_everything_adds_up(tmp_path: Path) -> None:
    told = demo(str(EXAMPLE), "--data", str(tmp_path / "data"), "--duration", "8", "--rate", "300", *ANYWHERE)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("\n  yes  ") == 4 and "  NO  " not in told.stdout
    assert "0 lost, 0 doubled" in told.stdout
    last = [line for line in told.stdout.splitlines() if " orders: " in line][-1]
    for door in ("figg", "rustlog", "blipmq", "flymq", "fujin"):
        assert re.search(rf"{door} [1-9]", last), f"each door has taken some: {last}"
    assert "shown this once" not in told.stdout, "the key of a demonstration is nobody's business"


def test_a_part_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    taken = tmp_path / "data" / "broker"
    taken.parent.mkdir()
    taken.write_text("not a directory")
    told = demo(str(EXAMPLE), "--data", str(tmp_path / "data"), "--duration", "1", *ANYWHERE)
    assert told.returncode == 1
    assert "the broker ended with exit code 1" in told.stderr
    assert str(tmp_path / "data" / "broker.log") in told.stderr
