"""The real broker as a child process, under a small journal and small segments so that everything happens often."""

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
from tests.crash.doors import BLIPMQ_KEY

SMALL: Final = {
    "HEADRACE__STORAGE__JOURNAL_SIZE": "1 MiB",
    "HEADRACE__STORAGE__SEGMENT_SIZE": "64 KiB",
    "HEADRACE__STORAGE__CHECKPOINT_INTERVAL": "100ms",
    "HEADRACE__STORAGE__HEADROOM": "0",
    "HEADRACE__LOG__LEVEL": "warning",
    "HEADRACE__RUSTLOG__AUTO_CREATE": "true",
    "HEADRACE__BLIPMQ__KEYS": "env:CRASH_TEST_KEY",
    "CRASH_TEST_KEY": BLIPMQ_KEY,
}
START_SECONDS_MAX: Final = 120.0


class BrokerDied(AssertionError):
    """The broker went away by itself."""


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


class Broker:
    """One life of the broker on a data directory. `tracer` is a command that runs it, such as strace and its flags."""

    def __init__(self, directory: Path, *, tracer: Sequence[str] = (), settings: Mapping[str, str] = SMALL) -> None:
        self._ready_file = directory / "ready.json"
        self._ready_file.unlink(missing_ok=True)
        self._output = (directory / "broker.log").open("ab")
        command = [*tracer, sys.executable, "-m", "headrace", "serve", "--data", str(directory / "data")]
        command += ["--listen", "127.0.0.1:0", "--listen-quic", "127.0.0.1:0", "--ready-file", str(self._ready_file)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "HEADRACE__LISTEN__BULK": "", **settings},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self._directory = directory
        self.pid = 0
        """Of the broker itself, also when a tracer runs it; known once it is ready."""
        self.quic = ("", 0)
        """The address of its QUIC door; known once it is ready."""

    def wait_ready(self) -> tuple[str, int]:
        """The address of its TCP door."""
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
        self.quic = _address(ready["doors"]["quic"][0])
        return _address(ready["doors"]["tcp"][0])

    def output(self) -> str:
        return (self._directory / "broker.log").read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """To the broker alone if it is known, else to everything that was started."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, number)
            else:
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self, seconds_max: float = 20.0) -> int:
        """Ask it to drain; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds_max)

    def wait(self, seconds_max: float = 20.0) -> int:
        code = self.process.wait(seconds_max)
        self._output.close()
        return code


@contextlib.contextmanager
def serving(directory: Path, *, tracer: Sequence[str] = (), settings: Mapping[str, str] = SMALL) -> Iterator[Broker]:
    """A broker that is gone when the block ends, however it ends."""
    broker = Broker(directory, tracer=tracer, settings=settings)
    try:
        yield broker
    finally:
        if broker.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(broker.process.pid, signal.SIGKILL)
            broker.wait()


def check_directory(directory: Path) -> subprocess.CompletedProcess[str]:
    """`headrace check` on the data directory of a stopped broker."""
    command = [sys.executable, "-m", "headrace", "check", str(directory / "data")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
