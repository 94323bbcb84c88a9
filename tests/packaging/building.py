"""Builds distributions of a source tree with the backend that pyproject.toml names, as pip does, but with that of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def build(kind: str, tree: Path, directory: Path, **variables: str) -> tuple[Path, str]:
    """Return the distribution and the output of the build. No network is needed."""
    done = attempt(kind, tree, directory, **variables)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "warning" not in printed.lower(), printed
    [made] = directory.iterdir()
    return made, printed


def attempt(kind: str, tree: Path, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "HEADRACE_COMPILE")} | variables
    command = [sys.executable, "-W", "error", "-m", "hatchling", "build", "-t", kind, "-d", str(directory)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1_000, check=False)


def sources(tree: Path) -> set[str]:
    """Return the paths below src/ of everything that is not compiled."""
    below = tree / "src"
    found = (path for path in below.glob("**/*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so")
    return {str(path.relative_to(below)) for path in found}
