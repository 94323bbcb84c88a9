"""Child programs of a command. Each has its own session and writes to a log file.

Ctrl-C in the terminal reaches only the parent, which decides the order of stopping. A program that must not outlive a parent that is
killed is started with `is_tied`, by `python -m headrace.programs MODULE ARGUMENTS`.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, *, is_tied: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program. Its output goes to `log`; `environment` is added to the current one. With `is_tied` its standard input ends when
    this process does."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if is_tied else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate the program; after `seconds` kill it and its children."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def last_line(log: Path) -> str:
    """Return the last line of the program's output."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it wrote no output"


def _terminate_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run a module as a program that is terminated when its standard input ends."""
    threading.Thread(target=_terminate_at_end_of_input, name="input", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
