"""The house keeps its word: verbs are listed, scripts can be run, constraints cover what is installed."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_make_without_a_verb_lists_every_verb_with_a_text() -> None:
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, timeout=60, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()[1:] if len(line.split()) > 1}
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.split())
    assert {"help", "run", "test", "lint", "format", "bench", "clean"} <= listed


def test_a_duration_reaches_the_story() -> None:
    command = ["make", "-C", str(ROOT), "-n", "--assume-old=.venv/.installed-run", "run", "DURATION=60", "DEMO_ARGS=--rate 7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "headrace demo examples/orders/pipeline.toml --data data --duration 60 --rate 7" in done.stdout


@pytest.mark.parametrize("script", [".ci/run", "tools/setup"])
def test_a_script_is_executable_and_parses(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].rpartition("/")[2].split()[-1]
    subprocess.run([shell, "-n", str(path)], timeout=60, check=True)


def test_every_library_of_the_core_and_of_the_checks_is_constrained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["bench"], *extras["test"], *extras["lint"], "hatchling"]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {re.split(r"[><=;\s\[]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names <= pinned


def test_the_system_setup_names_the_command_when_it_may_not_install(tmp_path: Path) -> None:
    # A PATH with an `id` that is nobody: as for a user without the right to install.
    for program in ("sh", "printf"):
        (tmp_path / program).symlink_to(Path("/bin") / program)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "tools" / "setup"), "system", "sh", "no-such-program"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "setup: missing: no-such-program; install with:  sudo apt-get install no-such-program\n"
