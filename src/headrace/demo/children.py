"""Child processes of the demo: the broker and the pipeline."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.errors import HeadraceError
from headrace.programs import last_line, started, stop

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
_POLL_SECONDS: Final = 0.05


class DemoFailed(HeadraceError):
    """A child process failed. The text names it and its log."""


class Program:
    """A running `headrace` command."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self._process = started([sys.executable, "-m", "headrace", *arguments], log, environment)

    def check_alive(self) -> None:
        """Raise `DemoFailed` if the process has ended."""
        if self._process.poll() is not None:
            raise DemoFailed(f"{self.name} ended with exit code {self._process.returncode}: {last_line(self.log)} (see {self.log})")

    def wait_for_file(self, ready: Path) -> Any:
        """Wait for the ready file and return its content. Raises `DemoFailed`."""
        self._wait(ready.exists)
        return json.loads(ready.read_text("utf-8"))

    def wait_for_output(self, text: str) -> str:
        """Wait until the output contains `text` and return it. Raises `DemoFailed`."""
        self._wait(lambda: text in self.output)
        return self.output

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was not ready after {START_SECONDS_MAX:.0f} s (see {self.log})")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop the process and its children: Spark starts several."""
        stop(self._process, STOP_SECONDS_MAX)
