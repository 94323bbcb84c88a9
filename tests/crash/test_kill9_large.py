"""Kill -9 of a process that writes large appends."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.storage.batch import REFERENCED
from headrace.storage.check import check
from headrace.storage.files import DiskFiles
from tests.conftest import Proof
from tests.crash.large_writer import LOGS, opened, value

pytestmark = pytest.mark.kill_loop

CYCLES = 5
ROOT = Path(__file__).parents[2]


def run_and_kill(directory: Path, acknowledgements: int) -> int:
    """Kill the writer after so many acknowledgements. Returns the last acknowledged offset."""
    command = [sys.executable, "-m", "tests.crash.large_writer", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            for _ in range(acknowledgements):
                line = process.stdout.readline()
                assert line, "the writer has ended"
        finally:
            process.kill()
        # The pipe may have more that was acknowledged before the kill; the last line may be torn.
        rest = [text for text in process.stdout.read().split("\n")[:-1] if text]
    return int(rest[-1] if rest else line)


def test_a_killed_process_loses_no_large_append_and_tears_none(tmp_path: Path, proof: Proof) -> None:
    rng = random.Random(1)
    for _ in range(CYCLES):
        acked = run_and_kill(tmp_path, rng.randrange(5, 60))
        files = DiskFiles(tmp_path)
        assert check(files).clean
        store = opened(tmp_path)
        assert not store.report.damages
        ends = {store.bounds(log).end for log in LOGS}
        assert len(ends) == 1 and ends.pop() > acked, "an append to both logs is there in part, or lost"
        flags = 0
        for log in LOGS:
            offset = 0
            while offset < store.bounds(log).end:
                for batch in store.read(log, offset, bytes_max=1 << 20):
                    flags |= batch.header.flags
                    assert [record.value for record in batch.records()] == [value(number + log) for number in batch.offsets()]
                    offset = batch.next_offset
        assert flags & REFERENCED, "there are large appends"
        store.files.close()  # without a checkpoint, as after another kill
        proof("kill -9 cycles with large appends", 1)
