"""What all tests share: the figures that prove the promises are printed at the end of a run, under `proof`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

Proof: TypeAlias = Callable[[str, int], None]


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Add to a figure of the summary: `proof("crash images", 1_312)`. Figures of the same name are summed over all tests."""

    def add(what: str, count: int) -> None:
        request.node.user_properties.append(("proof", (what, count)))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures: dict[str, tuple[int, int, float]] = {}
    for what, count, seconds in _figures(terminalreporter):
        total, tests, duration = figures.get(what, (0, 0, 0.0))
        figures[what] = total + count, tests + 1, duration + seconds
    if figures:
        terminalreporter.section("proof")
    for what, (total, tests, duration) in sorted(figures.items()):
        terminalreporter.write_line(f"{total:>10,} {what} ({tests} test{'s' if tests > 1 else ''}, {duration:.1f} s)")


def _figures(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, int, float]]:
    """Reports cross process borders when tests run in parallel; that is why the figures ride on them."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call":
                yield from ((*figure, report.duration) for name, figure in report.user_properties if name == "proof")
