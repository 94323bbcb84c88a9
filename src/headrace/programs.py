"""Child programs of a command. Each has its own session and writes to a log file.

Ctrl-C in the terminal reaches only the parent, which decides the order of stopping.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def started(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program. Its output goes to `log`; `environment` is added to the current one."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate the program; after `seconds` kill it and its children."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(log: Path) -> str:
    """Return the last line of the program's output."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it wrote no output"
