"""Run `headrace bench …` and `python -m benchmarks.…` as real processes with their files below one directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_SECONDS_MAX = 300


ROOT = Path(__file__).parent.parent.parent


def command(*arguments: str, directory: Path) -> list[str]:
    """Return the command line. A first argument `benchmarks.NAME` runs that module instead of `headrace bench`."""
    if arguments[0].startswith("benchmarks."):
        return [sys.executable, "-m", *arguments, "--dir", str(directory)]
    return [sys.executable, "-m", "headrace", "bench", *arguments, "--dir", str(directory)]


def bench(*arguments: str, directory: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command. `path` replaces PATH."""
    environment = dict(os.environ) if path is None else {**os.environ, "PATH": path}
    line = command(*arguments, directory=directory)
    return subprocess.run(line, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, env=environment, check=False, cwd=ROOT)


def measured(*arguments: str, directory: Path) -> dict[str, Any]:
    """Return the JSON report of a command that must succeed and remove its files."""
    done = bench(*arguments, "--repeat", "1", "-o", "json", directory=directory)
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == [], "the benchmark left files"
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def values(report: dict[str, Any]) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in report["figures"]}


def processes_below(directory: Path) -> list[int]:
    """Return the processes whose command line contains the directory."""
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
