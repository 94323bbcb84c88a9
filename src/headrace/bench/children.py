"""The programs a run starts: the broker and its peers, each in a process of its own, all of them gone when the run ends."""

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

from headrace.bench.faults import BenchFailed
from headrace.programs import last_line, started, stop

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
_POLL_SECONDS = 0.01
_KEY_VARIABLE = "HEADRACE_BENCH_BLIPMQ_KEY"

Address = tuple[str, int]


@contextmanager
def workspace(parent: Path | None) -> Iterator[Path]:
    """A directory for the files of a run, removed at its end, however it ends. A SIGTERM ends it as Ctrl-C does."""

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
    """A running program that is stopped at the end: asked first, killed if it does not listen."""
    process = started(command, log, environment)
    try:
        yield process
    finally:
        stop(process, STOP_SECONDS_MAX)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Wait for a child to be ready; say why if it died first."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not ready():
        if process.poll() is not None:
            raise BenchFailed(f"{what} ended with exit code {process.returncode}: {last_line(log)}")
        if time.monotonic() > deadline:
            raise BenchFailed(f"{what} was not ready after {START_SECONDS_MAX:.0f} s: {last_line(log)}")
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class Broker:
    """A Headrace broker that answers."""

    address: Address
    pid: int
    start_seconds: float
    """From the start of the process until every protocol was open."""
    key: bytes
    """The API key of its BlipMQ protocol."""

    def resident_bytes(self) -> int:
        """Physical memory of the process now (its resident set)."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        raise BenchFailed(f"process {self.pid} shows no resident set")

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far, in user and kernel mode."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as status:
        fields = status.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Served:
    """A process of `headrace serve` whose protocols are open."""

    protocols: Mapping[str, Sequence[str]]
    """By kind, as the ready file names them."""
    pid: int
    start_seconds: float
    """From the start of the process until every protocol was open."""


@contextmanager
def serving(
    directory: Path, protocols: Sequence[str] = (), *, profile: Path | None = None, environment: Mapping[str, str]
) -> Iterator[Served]:
    """`headrace serve` on `directory/data`, on a free loopback port, with more `protocols` as its flags say, and settings by `environment`.

    `profile` runs it under cProfile, which writes there when the broker ends. Only who asks for it has the Flight endpoint: Arrow would be
    80 MiB of what is measured elsewhere.
    """
    ready_file, log = directory / "ready.json", directory / "serve.log"
    ready_file.unlink(missing_ok=True)
    profiler = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    command = [sys.executable, *profiler, "-m", "headrace", "serve", "--data", str(directory / "data"), "--listen", "127.0.0.1:0"]
    command += [*protocols, "--ready-file", str(ready_file)]
    began = time.perf_counter()
    with child(command, log, environment={"HEADRACE__LISTEN__QUIC": "", "HEADRACE__LISTEN__FLIGHT": "", **environment}) as process:
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
    """A broker for the protocols over TCP; `ack` is the promise of topics made while it runs, `environment` holds further settings.

    BlipMQ deliveries may wait long for their ACK: a machine that stalls for the usual 100 ms must not turn a measurement of deliveries
    into one of redeliveries.
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
    """`HOST:PORT`, where an IPv6 host stands in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise BenchFailed(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
