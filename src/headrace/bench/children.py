"""Child processes of a benchmark: the broker and its peers. All are stopped when the benchmark ends."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from headrace.errors import HeadraceError
from headrace.programs import last_line, started, stop

_OFF: Final = dict.fromkeys(("HEADRACE__LISTEN__FLIGHT", "HEADRACE__LISTEN__HTTP", "HEADRACE__LISTEN__QUIC"), "")
"""Listeners that a benchmark opens only if it measures them."""


class BenchFailed(HeadraceError):
    """The benchmark stopped: a peer died, closed the connection or answered with an error."""


class PeerMissing(BenchFailed):
    """A required program or library is not installed. The message says how to install it."""


START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
_POLL_SECONDS = 0.01
_KEY_VARIABLE = "HEADRACE_BENCH_BLIPMQ_KEY"

Address = tuple[str, int]


@contextmanager
def workspace(parent: Path | None) -> Iterator[Path]:
    """Yield a directory that is removed at the end in every case. SIGTERM is handled like Ctrl-C."""

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    path = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def child(command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program and stop it at the end: with SIGTERM, then with SIGKILL."""
    process = started(command, log, environment)
    try:
        yield process
    finally:
        stop(process, STOP_SECONDS_MAX)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Wait for a child to become ready. Raises `BenchFailed` with its last line of output if it ends first."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not ready():
        if process.poll() is not None:
            raise BenchFailed(f"{what} ended with exit code {process.returncode}: {last_line(log)}")
        if time.monotonic() > deadline:
            raise BenchFailed(f"{what} was not ready after {START_SECONDS_MAX:.0f} s: {last_line(log)}")
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Broker:
    """Running Headrace broker."""

    address: Address
    pid: int
    start_seconds: float
    """From the start of the process until all listeners are open."""
    key: bytes
    """BlipMQ API key."""

    def resident_bytes(self) -> int:
        """Return the resident set size of the process."""
        return memory_bytes(self.pid, "VmRSS")

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


def memory_bytes(pid: int, field: str) -> int:
    """Return a size from the status of a process: its resident set (`VmRSS`) or the largest one so far (`VmHWM`)."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise BenchFailed(f"/proc/{pid}/status has no {field} line")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process so far, user and kernel mode."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as status:
        fields = status.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Served:
    """Process of `headrace serve` whose listeners are open."""

    protocols: Mapping[str, Sequence[str]]
    """Addresses by kind, as in the ready file."""
    pid: int
    start_seconds: float
    """From the start of the process until all listeners are open."""


@contextmanager
def serving(directory: Path, flags: Sequence[str] = (), *, profile: Path | None = None, environment: Mapping[str, str]) -> Iterator[Served]:
    """Run `headrace serve` on `directory/data` and a free loopback port, with further `flags` and settings in `environment`.

    With `profile`, it runs under cProfile, which writes that file when the broker ends. The Flight endpoint and QUIC are off unless
    `flags` name them: Arrow adds 80 MiB to the memory of the process, and the default ports may be in use.
    """
    ready_file, log = directory / "ready.json", directory / "serve.log"
    ready_file.unlink(missing_ok=True)
    profiler = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    command = [sys.executable, *profiler, "-m", "headrace", "serve", "--data", str(directory / "data"), "--listen", "127.0.0.1:0"]
    command += [*flags, "--ready-file", str(ready_file)]
    began = time.perf_counter()
    with child(command, log, environment={**_OFF, **environment}) as process:
        wait_until(ready_file.exists, process, log, "headrace serve")
        yield Served(json.loads(ready_file.read_text("utf-8"))["protocols"], process.pid, time.perf_counter() - began)


@contextmanager
def broker(
    directory: Path,
    *,
    ack: str = "durable",
    profile: Path | None = None,
    environment: Mapping[str, str] | None = None,
    key_owner: str = "blipmq",
) -> Iterator[Broker]:
    """Run a broker for the protocols over TCP. `ack` applies to topics created while it runs; `environment` holds further settings.

    The BlipMQ retry backoff is 60 s, so that a stalled machine does not cause redeliveries.
    """
    key = secrets.token_urlsafe()
    settings = {
        **(environment or {}),
        "HEADRACE__STORAGE__ACK": ack,
        "HEADRACE__BLIPMQ__KEYS": f"{key_owner}=env:{_KEY_VARIABLE}",
        "HEADRACE__BLIPMQ__RETRY_BACKOFF": "60s",
        _KEY_VARIABLE: key,
    }
    with serving(directory, profile=profile, environment=settings) as served:
        yield Broker(parse_address(served.protocols["tcp"][0]), served.pid, served.start_seconds, key.encode())


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT`, with an IPv6 host in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise BenchFailed(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
