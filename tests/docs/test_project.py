"""Project files: make targets are listed, scripts parse, constraints cover all requirements."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_make_without_a_target_lists_every_target_with_a_text() -> None:
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, timeout=300, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()[1:] if len(line.split()) > 1}
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.split())
    assert {"help", "run", "test", "lint", "format", "bench", "clean"} <= listed


def test_a_duration_reaches_the_demo() -> None:
    command = ["make", "-C", str(ROOT), "-n", "--assume-old=.venv/.installed-run", "run", "DURATION=60", "DEMO_ARGS=--rate 7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "headrace demo examples/orders/pipeline.toml --data data --duration 60 --rate 7" in done.stdout


SCRIPTS = [".ci/run", *sorted(f"tools/{path.name}" for path in (ROOT / "tools").iterdir() if path.is_file())]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_and_parses(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    interpreter = path.read_text().splitlines()[0].rpartition("/")[2].split()[-1]
    if interpreter == "python3":
        compile(path.read_text(), script, "exec")
    else:
        subprocess.run([interpreter, "-n", str(path)], timeout=300, check=True)


def test_the_hashes_cover_the_constraints_and_nothing_else() -> None:
    constrained = {line.lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    hashed = re.findall(r"^(\S+==\S+) .*\\$", (ROOT / "hashes.txt").read_text(), re.MULTILINE)
    assert {requirement.lower().replace("_", "-") for requirement in hashed} == constrained


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    [accepted] = re.findall(r'^SUPPORTED="(.*)"$', (ROOT / "tools" / "setup").read_text(), re.MULTILINE)
    [locked] = re.findall(r"^PYTHONS = \((.*)\)$", (ROOT / "tools" / "lock").read_text(), re.MULTILINE)
    assert accepted.split() == classified
    assert set(classified) <= set(re.findall(r"[\d.]+", locked))


def setup(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tools" / "setup"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env={"PATH": os.environ["PATH"], **environment}
    )


def test_an_unsupported_python_fails_with_the_supported_ones(tmp_path: Path) -> None:
    newer = tmp_path / "python"
    newer.write_text("#!/bin/sh\necho 3.99\n")
    newer.chmod(0o755)
    done = setup("install", str(tmp_path / "venv"), "run", cwd=ROOT, PYTHON=str(newer))
    assert done.returncode == 1
    assert done.stderr == f"setup: PYTHON={newer} is Python 3.99; supported are: 3.11 3.12 3.13\n"


def test_an_interrupted_installation_is_started_over(tmp_path: Path) -> None:
    # A Python whose `venv` creates an environment without packages; its pip is a stub that records its calls.
    calls, venv = tmp_path / "calls", tmp_path / "venv"
    stub = tmp_path / "python"
    stub.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*version_info*) echo 3.11 ;;\n"
        f'"-m venv "*) mkdir -p "$3/bin" && cp "{stub}" "$3/bin/python" ;;\n'
        f'*) echo "$*" >>"{calls}" ;;\n'
        "esac\n"
    )
    stub.chmod(0o755)
    (venv / "lib").mkdir(parents=True)
    (venv / "lib" / "half").write_text("half a file")
    (venv / ".installing").touch()
    done = setup("install", str(venv), "run", cwd=ROOT, PYTHON=str(stub))
    assert done.returncode == 0, done.stderr
    assert "the last installation was interrupted; starting over" in done.stderr
    assert not (venv / "lib").exists()
    assert not (venv / ".installing").exists()
    assert sum("--require-hashes" in call for call in calls.read_text().splitlines()) == 2


def test_a_bare_environment_has_no_home_no_caches_and_no_secrets() -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "PYTHONPATH": "/secret", "PIP_CACHE_DIR": "/cache", "PIP_CERT": "/cert"}
    done = subprocess.run(
        [str(ROOT / "tools" / "bare-env"), "env"], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert seen.keys() == {"PATH", "HOME", "PYTHONNOUSERSITE", "PIP_CERT"}
    assert not Path(seen["HOME"]).exists(), "the home directory is removed with the command"


def test_every_library_of_the_core_and_of_the_checks_is_constrained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["bench"], *extras["test"], *extras["lint"], "hatchling"]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {re.split(r"[><=;\s\[]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names <= pinned


def test_the_system_setup_names_the_command_when_it_may_not_install(tmp_path: Path) -> None:
    # A PATH whose `id` reports an ordinary user, who may not install packages.
    for program in ("sh", "printf"):
        (tmp_path / program).symlink_to(Path("/bin") / program)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "tools" / "setup"), "system", "sh", "no-such-program"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "setup: missing: no-such-program; install with:  sudo apt-get install no-such-program\n"
