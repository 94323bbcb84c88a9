"""What all tests share: the figures that prove the promises are printed at the end of a run, under `proof`; a watch over secrets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from tests import canaries

Proof: TypeAlias = Callable[[str, int], None]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(canaries, "canaries")


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Add to a figure of the summary: `proof("crash images", 1_312)`. Figures of the same name are summed over all tests."""

    def add(what: str, count: int) -> None:
        request.node.user_properties.append(("proof", (what, count)))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    totals: Counter[str] = Counter()
    seconds: dict[str, dict[str, float]] = {}
    for what, count, report in _figures(terminalreporter):
        totals[what] += count
        seconds.setdefault(what, {})[report.nodeid] = report.duration
    if totals:
        terminalreporter.section("proof")
    for what, total in sorted(totals.items()):
        tests = seconds[what]
        terminalreporter.write_line(f"{total:>10,} {what} ({len(tests)} test{'s' * (len(tests) > 1)}, {sum(tests.values()):.1f} s)")


def _figures(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, int, pytest.TestReport]]:
    """Reports cross process borders when tests run in parallel; that is why the figures ride on them."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call":
                yield from ((what, count, report) for name, (what, count) in report.user_properties if name == "proof")
