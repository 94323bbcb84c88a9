"""Inject system-call faults into a real broker process with strace.

A fault is injected either from the first instruction of a process (`tracer`) or into a running one (`injected`), which strace
attaches to and leaves again. The trace that strace writes names every call it tampered with, so a test knows whether its fault
was reached.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ATTACH_SECONDS_MAX: Final = 300.0
TRACED: Final = "pwritev2,fdatasync,fsync,rename,unlink"
"""Calls needed to verify the sync order; traced in addition to the calls of the faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One strace injection: `Fault("fdatasync", "error=EIO", "3")` fails the third fdatasync of each thread."""

    calls: str
    effect: str
    when: str = "1+"

    @property
    def is_delay(self) -> bool:
        return self.effect.startswith("delay")

    @property
    def error(self) -> str:
        return self.effect.removeprefix("error=") if self.effect.startswith("error=") else ""

    def __str__(self) -> str:
        return f"{self.calls}:{self.effect}:when={self.when}"


def tracer(trace: Path, faults: Sequence[Fault]) -> list[str]:
    """Return the strace command line to put before the command, or before `-p PID`."""
    calls = ",".join([TRACED, *(fault.calls for fault in faults)])
    command = ["strace", "-f", "-y", "-s", "0", "-o", str(trace), "-e", f"trace={calls}", "-e", "signal=none"]
    for fault in faults:
        command += ["-e", f"inject={fault}"]
    return command


@contextlib.contextmanager
def injected(pid: int, trace: Path, *faults: Fault) -> Iterator[None]:
    """Attach to all threads of a process during the block. The process may end inside the block."""
    process = subprocess.Popen([*tracer(trace, faults), "-p", str(pid)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "attached" in line, f"strace cannot attach to {pid}: {line}"
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=ATTACH_SECONDS_MAX)


def fired(trace: Path) -> int:
    """Return how many calls strace has tampered with so far."""
    if not trace.exists():
        return 0
    content = trace.read_text(errors="replace")
    return content.count("(INJECTED)") + content.count("(DELAYED)")
