"""The programs of the story, each a process of its own: the broker and the pipeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.errors import HeadraceError

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
_POLL_SECONDS: Final = 0.05


class StoryFailed(HeadraceError):
    """A part of the story died or did not come up; the text says which, and where its log is."""


class Program:
    """A `headrace` command that runs in a session of its own, so that a Ctrl-C in the terminal reaches only us."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def check_alive(self) -> None:
        """Raises `StoryFailed`."""
        if self._process.poll() is not None:
            raise StoryFailed(f"{self.name} ended with exit code {self._process.returncode}: {self._last_words()} (see {self.log})")

    def wait_for_file(self, ready: Path) -> Any:
        """The content of the ready file, once it is there. Raises `StoryFailed`."""
        self._wait(ready.exists)
        return json.loads(ready.read_text("utf-8"))

    def wait_for_word(self, word: str) -> str:
        """What it has said, once the word is in it. Raises `StoryFailed`."""
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
                raise StoryFailed(f"{self.name} was not ready after {START_SECONDS_MAX:.0f} s (see {self.log})")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ask; kill the whole session if it does not listen: Spark has children of its own."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _last_words(self) -> str:
        lines = self.said.strip().splitlines()
        return lines[-1] if lines else "it said nothing"
