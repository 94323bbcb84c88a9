"""Every command without each extra: help works, and a command that needs a library names the extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import WRONG_USAGE
from headrace.cli.reference import commands
from headrace.extras import LIBRARIES

ROOT = Path(__file__).parent.parent.parent
EXTRAS = sorted({library.extra for library in LIBRARIES.values()})
EVERYTHING = "all extras"

NEEDED = {
    "flight": {"headrace serve --listen-flight", "headrace sql", "headrace pipeline run", "headrace pipeline check",
               "headrace pipeline archive", "headrace demo", "headrace bench interference", "headrace bench spark", "headrace copy"},
    "spark": {"headrace sql", "headrace pipeline run", "headrace pipeline check", "headrace pipeline archive", "headrace demo",
              "headrace bench spark"},
    "tables": {"headrace demo"},
    "quic": {"headrace serve --listen-quic", "headrace pub --protocol fujin", "headrace sub --protocol fujin",
             "headrace ping --protocol fujin", "headrace bench publish --protocol fujin", "headrace bench consume --protocol fujin",
             "headrace bench latency --protocol fujin", "headrace bench requests", "headrace bench fanout",
             "headrace demo"},
    "schemas": {"headrace serve --set traces.endpoint"},
    "metrics": {"headrace serve --listen-http"},
    "otel": {"headrace serve --set traces.endpoint"},
    "kafka": {"headrace serve --engine kafka", "headrace bench spark"},
    "console": {"headrace console", "headrace demo"},
    "bench": {"headrace bench latency", "headrace bench latency --protocol fujin", "headrace bench compare"},
}  # fmt: skip
"""Commands that fail with the advice to install an extra. The broker reports the extra `schemas`; here it appears because
OpenTelemetry uses protobuf too."""


def without(directory: Path, libraries: list[str]) -> list[tuple[str, int, str]]:
    command = [sys.executable, "-m", "tests.cli.every_command", str(directory), *libraries]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [(line, code, text) for line, code, text in json.loads(done.stdout.splitlines()[-1])]


def kind_of(line: str) -> str:
    """Return the command and the option that makes it import more, without values."""
    path = max((path for path, _ in commands() if line.startswith(f"{path} ") or line == path), key=len)
    known = ("--listen-flight", "--listen-http", "--listen-quic", "--protocol fujin", "--set traces.endpoint", "--engine kafka")
    options = [option for option in known if option in line]
    return " ".join([path, *options])


@pytest.mark.parametrize("extra", [*EXTRAS, EVERYTHING])
def test_a_command_without_its_extra_says_in_one_line_which_one_to_install(tmp_path: Path, extra: str) -> None:
    libraries = [name for name, library in LIBRARIES.items() if extra in (library.extra, EVERYTHING)]
    advised = set()
    for line, code, text in without(tmp_path, libraries):
        assert "ModuleNotFoundError" not in text and "ImportError" not in text and "internal error" not in text, (line, text)
        if line.endswith("--help"):
            assert code == 0, (line, text)
        elif "pip install" in text:
            advised.add(kind_of(line))
            assert code == WRONG_USAGE, (line, text)
            assert text.count("\n") == 1 and text.endswith("]'\n"), (line, text)
            assert extra == EVERYTHING or f"pip install 'headrace[{extra}]'" in text, (line, text)
        else:
            assert code != WRONG_USAGE, f"{line} did not get as far as its imports: {text}"
    assert advised == (set().union(*NEEDED.values()) if extra == EVERYTHING else NEEDED[extra])
