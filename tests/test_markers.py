"""Markers of slow tests: registered, excluded from the quick suite, and first under xdist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.conftest import LONGEST_FIRST, in_turns

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
