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
    """A running program that is stopped at the end: asked first, killed if it does not listen.

    It leads a session of its own, so that a Ctrl-C in the terminal reaches only us and the order of stopping is ours.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=None if environment is None else {**os.environ, **environment},
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Wait for a child to be ready; say why if it died first."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not ready():
        if process.poll() is not None:
            raise BenchFailed(f"{what} ended with exit code {process.returncode}: {last_line(log)}")
        if time.monotonic() > deadline:
            raise BenchFailed(f"{what} was not ready after {START_SECONDS_MAX:.0f} s: {last_line(log)}")
        time.sleep(_POLL_SECONDS)


def last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@dataclass(frozen=True, slots=True)
class Broker:
    """A Headrace broker that answers."""

    address: Address
    pid: int
    start_seconds: float
    """From the start of the process until every door was open."""
    key: bytes
    """The API key of its BlipMQ door."""

    def resident_bytes(self) -> int:
        """Physical memory of the process now (its resident set)."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        raise BenchFailed(f"process {self.pid} shows no resident set")

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far, in user and kernel mode."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as status:
            fields = status.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def broker(
    directory: Path,
    *,
    ack: str = "durable",
    profile: Path | None = None,
    environment: Mapping[str, str] | None = None,
    key_owner: str = "blipmq",
) -> Iterator[Broker]:
    """`headrace serve` on `directory/data`, on a free loopback port; `ack` is the promise of topics made while it runs, `environment`
    holds further settings.

    `profile` runs it under cProfile, which writes there when the broker ends. BlipMQ deliveries may wait long for their ACK: a machine
    that stalls for the usual 100 ms must not turn a measurement of deliveries into one of redeliveries.
    """
    ready_file, log = directory / "ready.json", directory / "serve.log"
    ready_file.unlink(missing_ok=True)
    profiler = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    command = [sys.executable, *profiler, "-m", "headrace", "serve", "--data", str(directory / "data")]
    began = time.perf_counter()
    command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready_file)]
    key = secrets.token_urlsafe()
    settings = {
        "HEADRACE__LISTEN__BULK": "",  # Arrow would be 80 MiB of what is measured here
        **(environment or {}),
        "HEADRACE__STORAGE__ACK": ack,
        "HEADRACE__BLIPMQ__KEYS": f"{key_owner}=env:{_KEY_VARIABLE}",
        "HEADRACE__BLIPMQ__RETRY_BACKOFF": "60s",
        _KEY_VARIABLE: key,
    }
    with child(command, log, environment=settings) as process:
        wait_until(ready_file.exists, process, log, "headrace serve")
        started = time.perf_counter() - began
        doors = json.loads(ready_file.read_text("utf-8"))["doors"]
        yield Broker(parse_address(doors["tcp"][0]), process.pid, started, key.encode())


def parse_address(text: str) -> Address:
    """`HOST:PORT`, where an IPv6 host stands in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise BenchFailed(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
