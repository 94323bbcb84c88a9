"""`headrace bench …` as a user runs it: a real process, with everything it starts below one directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_SECONDS_MAX = 120


def command(*arguments: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "headrace", "bench", *arguments, "--dir", str(directory)]


def bench(*arguments: str, directory: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end. `path` replaces the search path for programs."""
    environment = dict(os.environ) if path is None else {**os.environ, "PATH": path}
    return subprocess.run(
        command(*arguments, directory=directory), capture_output=True, text=True, timeout=RUN_SECONDS_MAX, env=environment, check=False
    )


def measured(*arguments: str, directory: Path) -> dict[str, Any]:
    """The JSON report of a run that has to succeed and to leave nothing behind."""
    done = bench(*arguments, "--repeat", "1", "-o", "json", directory=directory)
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == [], "the run left files behind"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def values(told: dict[str, Any]) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in told["figures"]}


def processes_below(directory: Path) -> list[int]:
    """Processes that were started with a path below the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if bytes(directory) in words:
                found.append(int(entry.name))
    return found
