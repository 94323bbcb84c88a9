"""A broker in its own process, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from headrace.storage.check import check
from headrace.storage.files import DiskFiles
from tests.canaries import look
from tests.kafka_fixtures import kafka_arguments

DEADLINE_SECONDS = 300.0
WITHOUT_UVLOOP = "import sys; sys.modules['uvloop'] = None; from headrace.cli import main; main()"


class BrokerProcess:
    """A broker on a free port. `with` waits until it is ready, ends the process, and checks the data directory.

    The variable KEY, if a test sets it, is the encryption key. With `log`, stderr goes to that file: a test does not read the pipe, and
    a full pipe would block the broker. `code` runs instead of the module.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        data: Path | None = None,
        uvloop: bool = True,
        code: str = "",
        log: Path | None = None,
        **environment: str,
    ) -> None:
        self.data = data or directory / "data"
        engine = [] if "--engine" in arguments else kafka_arguments(self.data)
        self._is_embedded = "kafka" not in (*engine, *arguments)
        self._key = bytes.fromhex(environment["KEY"]) if "KEY" in environment else None
        self.ready_file = directory / f"ready-{time.monotonic_ns()}"
        code = code or ("" if uvloop else WITHOUT_UVLOOP)
        python = [sys.executable, "-c", code] if code else [sys.executable, "-m", "headrace"]
        listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
        # The default QUIC, Flight and HTTP ports would collide with other tests, and Arrow is slow to load. Tests that need one set it.
        environment.setdefault("HEADRACE__LISTEN__FLIGHT", "")
        environment.setdefault("HEADRACE__LISTEN__QUIC", "")
        environment.setdefault("HEADRACE__LISTEN__HTTP", "")
        command = [*python, "serve", "--data", str(self.data), "--ready-file", str(self.ready_file), *listen, *engine, *arguments]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
        self._log = log
        with contextlib.ExitStack() as files:
            errors = files.enter_context(log.open("w")) if log else subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**inherited, **environment}, cwd=directory
            )

    def __enter__(self) -> BrokerProcess:
        self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_SECONDS)
        if self._is_embedded:
            assert check(DiskFiles(self.data), self._key).problems == []

    def wait_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                _, errors = self.process.communicate(timeout=DEADLINE_SECONDS)
                raise AssertionError(f"not ready, exit code {self.process.returncode}: {errors}")
            time.sleep(0.005)
        look(self.ready_file.read_bytes(), "a ready file")

    @property
    def ready(self) -> dict[str, object]:
        content: dict[str, object] = json.loads(self.ready_file.read_text())
        return content

    @property
    def addresses(self) -> list[tuple[str, int]]:
        protocols = self.ready["protocols"]
        assert isinstance(protocols, dict)
        return [(host.strip("[]"), int(port)) for host, _, port in (address.rpartition(":") for address in protocols["tcp"])]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal and wait. Return the exit code, stdout and stderr."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, out, self._log.read_text() if self._log else errors


def start_error(directory: Path, *arguments: str, **environment: str) -> str:
    """Start a broker that must fail to start, with exit code 1, one line on stderr and nothing on stdout. Return the line."""
    broker = BrokerProcess(directory, *arguments, **environment)  # type: ignore[arg-type]  # only strings are passed on
    code, out, errors = broker.ended()
    assert (code, out) == (1, ""), errors
    assert errors.startswith("headrace: ") and errors.count("\n") == 1, errors
    assert not broker.ready_file.exists()
    return errors.removeprefix("headrace: ").rstrip("\n")
