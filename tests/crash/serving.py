"""Broker as a child process, with a small journal and small segments so that rolls and checkpoints are frequent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.canaries import look
from tests.crash.protocols import BLIPMQ_KEY

SMALL: Final = {
    "HEADRACE__STORAGE__JOURNAL_SIZE": "1 MiB",
    "HEADRACE__STORAGE__SEGMENT_SIZE": "64 KiB",
    "HEADRACE__STORAGE__CHECKPOINT_INTERVAL": "100ms",
    "HEADRACE__STORAGE__HEADROOM": "0",
    "HEADRACE__LOGGING__LEVEL": "warning",
    "HEADRACE__RUSTLOG__AUTO_CREATE": "true",
    "HEADRACE__BLIPMQ__KEYS": "env:CRASH_TEST_KEY",
    "CRASH_TEST_KEY": BLIPMQ_KEY,
}
START_SECONDS_MAX: Final = 300.0


class BrokerDied(AssertionError):
    """The broker exited unexpectedly."""


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


class Broker:
    """One process of the broker on a data directory. `tracer` is a command prefix, such as strace and its options."""

    def __init__(self, directory: Path, *, tracer: Sequence[str] = (), settings: Mapping[str, str] = SMALL) -> None:
        self._ready_file = directory / "ready.json"
        self._ready_file.unlink(missing_ok=True)
        self._output = (directory / "broker.log").open("ab")
        command = [*tracer, sys.executable, "-m", "headrace", "serve", "--data", str(directory / "data")]
        command += ["--listen", "127.0.0.1:0", "--listen-quic", "127.0.0.1:0", "--ready-file", str(self._ready_file)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "HEADRACE__LISTEN__FLIGHT": "", "HEADRACE__LISTEN__HTTP": "", **settings},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self._directory = directory
        self.pid = 0
        """Process id of the broker itself, also under a tracer; known once it is ready."""
        self.quic = ("", 0)
        """Address of its QUIC listener; known once it is ready."""

    def wait_ready(self) -> tuple[str, int]:
        """Return the address of its TCP listener."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._ready_file.exists():
            if self.process.poll() is not None:
                raise BrokerDied(f"the broker left with {self.process.returncode} while starting: {self.output()[-2000:]}")
            if time.monotonic() > deadline:
                raise BrokerDied(f"the broker was not ready after {START_SECONDS_MAX} s: {self.output()[-2000:]}")
            time.sleep(0.005)
        look(self._ready_file.read_bytes(), "a ready file")
        ready = json.loads(self._ready_file.read_text())
        self.pid = ready["pid"]
        self.quic = _address(ready["protocols"]["quic"][0])
        return _address(ready["protocols"]["tcp"][0])

    def output(self) -> str:
        return (self._directory / "broker.log").read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the broker if its process id is known, else to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, number)
            else:
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self, seconds_max: float = 300.0) -> int:
        """Let it drain and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds_max)

    def wait(self, seconds_max: float = 300.0) -> int:
        code = self.process.wait(seconds_max)
        self._output.close()
        return code


@contextlib.contextmanager
def serving(directory: Path, *, tracer: Sequence[str] = (), settings: Mapping[str, str] = SMALL) -> Iterator[Broker]:
    """Yield a broker that is stopped when the block ends."""
    broker = Broker(directory, tracer=tracer, settings=settings)
    try:
        yield broker
    finally:
        if broker.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(broker.process.pid, signal.SIGKILL)
            broker.wait()


def check_directory(directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `headrace check` on the data directory of a stopped broker."""
    command = [sys.executable, "-m", "headrace", "check", str(directory / "data")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
