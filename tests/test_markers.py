"""Markers of slow tests: registered, excluded from the quick suite, and first under xdist; groups and files in one worker."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scheduling import ALONE, LONGEST_FIRST, in_turns

ROOT = Path(__file__).parent.parent


def test_every_marker_is_registered_and_explained() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["markers"]
    explained = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in LONGEST_FIRST:
        assert any(line.startswith(f"{name}: ") for line in known)
        assert f"| `{name}` |" in explained


def test_the_quick_suite_leaves_out_what_takes_long_and_nothing_else() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntest-quick:")[2].partition("\n\n")[0]
    [chosen] = re.findall(r'-m "(.*)"', recipe)
    assert chosen == " and ".join(f"not {name}" for name in LONGEST_FIRST)


def test_what_takes_long_comes_first_and_the_rest_stays_in_order(request: pytest.FixtureRequest) -> None:
    def item(name: str, *markers: str) -> pytest.Item:
        made = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for marker in markers:
            made.add_marker(marker)
        return made

    items = [item("a"), item("b", "crash_images"), item("c", "kill_loop", "spark"), item("d"), item("e", "kill_loop"), item("f", "spark")]
    assert [one.name for one in in_turns(items)] == ["c", "f", "e", "b", "a", "d"]


def test_the_largest_groups_come_before_all_others(request: pytest.FixtureRequest) -> None:
    def item(name: str, *markers: pytest.MarkDecorator) -> pytest.Item:
        made = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for marker in markers:
            made.add_marker(marker)
        return made

    of_kafka, of_spark = pytest.mark.xdist_group("kafka"), pytest.mark.xdist_group("spark")
    items = [item("a"), item("b", pytest.mark.spark), item("c", pytest.mark.kafka, of_kafka), item("d", pytest.mark.spark, of_spark)]
    assert [one.name for one in in_turns(items)] == ["d", "c", "b", "a"]


def test_a_group_and_a_file_run_in_one_worker_each(tmp_path: Path) -> None:
    for name, mark in (("grouped", "@pytest.mark.xdist_group('g')"), ("again", "@pytest.mark.xdist_group('g')"), ("plain", "")):
        (tmp_path / f"test_{name}.py").write_text(
            f"""import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent
{mark}
@pytest.mark.parametrize("number", range(4))
def test_it(number):
    (HERE / f"{name}-{{number}}").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""
        )
    command = [sys.executable, "-m", "pytest", "-p", "tests.scheduling", "-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    workers = {name: {path.read_text() for path in tmp_path.glob(f"{name}-?")} for name in ("grouped", "again", "plain")}
    assert len(workers["grouped"] | workers["again"]) == 1, "a group is in one worker"
    assert len(workers["plain"]) == 1, "a file is in one worker"


def test_what_runs_alone_exists() -> None:
    for name in ALONE:
        assert list(ROOT.glob(f"{name}*")), f"{name} is in ALONE and matches no file"
