"""An interrupted benchmark stops its processes and removes its files."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.bench.commands import command, processes_below

DEADLINE_SECONDS = 300


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_stops_its_broker_and_removes_its_files(sent: signal.Signals, tmp_path: Path) -> None:
    words = command("latency", "--rate", "100", "--duration", "3600", directory=tmp_path)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not list(tmp_path.rglob("ready.json")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(processes_below(tmp_path)) == 2
        process.send_signal(sent)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors.strip() == "", "no traceback, no message"
    assert processes_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
