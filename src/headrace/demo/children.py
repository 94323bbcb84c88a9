"""The programs of the story, each a process of its own: the broker and the pipeline."""

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
    """A part of the story died or did not come up; the text says which, and where its log is."""


class Program:
    """A `headrace` command at work."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self._process = started([sys.executable, "-m", "headrace", *arguments], log, environment)

    def check_alive(self) -> None:
        """Raises `DemoFailed`."""
        if self._process.poll() is not None:
            raise DemoFailed(f"{self.name} ended with exit code {self._process.returncode}: {last_line(self.log)} (see {self.log})")

    def wait_for_file(self, ready: Path) -> Any:
        """The content of the ready file, once it is there. Raises `DemoFailed`."""
        self._wait(ready.exists)
        return json.loads(ready.read_text("utf-8"))

    def wait_for_word(self, word: str) -> str:
        """What it has said, once the word is in it. Raises `DemoFailed`."""
        self._wait(lambda: word in self.said)
        return self.said

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def _wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not is_so():
            self.check_alive()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was not ready after {START_SECONDS_MAX:.0f} s (see {self.log})")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """With all that it has started: Spark has children of its own."""
        stop(self._process, STOP_SECONDS_MAX)
