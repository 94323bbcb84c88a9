"""Child programs of a command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.programs import last_line, started, stop

DEADLINE_SECONDS = 300.0


def said(log: Path, word: str) -> str:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while word not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)
    return last_line(log)


def wait_gone(process: int) -> None:
    """Wait until a process that this one has not started has ended."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while " Z " not in Path(f"/proc/{process}/stat").read_text():
            assert time.monotonic() < deadline, "it lives on"
            time.sleep(0.005)


def test_what_it_says_is_in_the_log_and_it_leads_a_session_of_its_own(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['WORD'], file=sys.stderr); print(os.getsid(0), 'done')"
    program = started([sys.executable, "-c", code], tmp_path / "log", {"WORD": "hello"})
    assert program.wait(DEADLINE_SECONDS) == 0
    assert "hello" in (tmp_path / "log").read_text()
    assert said(tmp_path / "log", "done") == f"{program.pid} done" and program.pid != os.getsid(0)


def test_it_is_asked_first(tmp_path: Path) -> None:
    program = started([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], tmp_path / "log")
    said(tmp_path / "log", "up")
    stop(program, DEADLINE_SECONDS)
    assert program.returncode == -signal.SIGTERM
    stop(program, DEADLINE_SECONDS)


def test_one_that_does_not_listen_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    deaf = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child_code = f"{deaf}; time.sleep(600)"
    code = f"{deaf}; child = subprocess.Popen([sys.executable, '-c', {child_code!r}]); print(child.pid, flush=True); time.sleep(600)"
    program = started([sys.executable, "-c", code], tmp_path / "log")
    child = int(said(tmp_path / "log", "\n"))
    stop(program, 0.05)
    assert program.returncode == -signal.SIGKILL
    wait_gone(child)


def test_a_silent_program_has_no_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert last_line(tmp_path / "log") == "it wrote no output"


def test_a_tied_program_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import sys, time; print(sys.argv[1], flush=True); time.sleep(600)")
    log, here = tmp_path / "log", {"PYTHONPATH": str(tmp_path)}
    code = f"""
import os, pathlib, signal, sys, time
from headrace.programs import started
command = [sys.executable, "-m", "headrace.programs", "child", "up"]
print(started(command, pathlib.Path({str(log)!r}), {here!r}, is_tied=True).pid, flush=True)
while "up" not in pathlib.Path({str(log)!r}).read_text():
    time.sleep(0.005)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert parent.returncode == -signal.SIGKILL
    wait_gone(int(parent.stdout))
