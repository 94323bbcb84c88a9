"""Programs that a command starts beside itself: each leads a session of its own, writes to a log, and is gone when the command is.

A Ctrl-C in the terminal reaches only us, so that the order of stopping is ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def started(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """All it says goes to `log`; `environment` adds to ours."""
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
    """Ask; after so long kill it, with all that it has started."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(log: Path) -> str:
    """What it said last."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
