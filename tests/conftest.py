"""What all tests share.

The figures that prove the promises are printed at the end of a run, under `proof`. Secrets are watched. What the caller has set for
their own terminal and their own use of Headrace is removed. Under xdist the longest tests come first, so that no worker ends alone
with one of them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from tests import canaries, kafka_fixtures

HERE: Final = Path(__file__).parent
Proof: TypeAlias = Callable[[str, int], None]
LONGEST_FIRST: Final = ("spark", "kafka", "browser", "kill_loop", "crash_images", "slow")
"""Markers, in the order in which xdist hands out what has them. `make test-quick` leaves them out."""
SLOW: Final = (
    *("access/test_existence", "access/test_flight_matrix", "access/test_login", "access/test_matrix", "bench"),
    *("broker/test_schema_checks", "broker/test_settlement_model", "broker/test_stages_crash", "cli/test_access_commands"),
    *("cli/test_extras", "cli/test_ping", "cli/test_pipelines", "cli/test_pubsub_protocols", "cli/test_terminal", "consistency", "cost"),
    *("crash", "engine/test_exhaustion", "faults", "flight/test_bounds", "flight/test_exhaustion", "flight/test_login", "packaging"),
    *("protocols/test_large_values", "protocols/test_strain", "protocols/test_time", "schemas/test_json_compatibility", "server", "spark"),
    *("storage/test_store_model", "test_canaries", "test_extras"),
)
"""Beginnings of the paths of tests that start programs or search large spaces: a quarter of the tests, three quarters of the time."""
OF_THE_CALLER: Final = frozenset(
    ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES")
    + tuple(
        f"HEADRACE_{name}"
        for name in ("API_KEY", "FLIGHT", "CONFIG", "CONTEXT", "PASSWORD_FILE", "PIPELINES", "SERVER", "TRACEBACK", "USER")
    )
)
"""Variables that change what programs print or whom they talk to. The tests set those they need."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(canaries, "canaries")
    config.pluginmanager.register(kafka_fixtures, "kafka_fixtures")
    for name in list(os.environ):
        if name.startswith("HEADRACE__") or name in OF_THE_CALLER:
            del os.environ[name]
    os.environ["XDG_CONFIG_HOME"] = os.devnull  # the contexts of the caller
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs this way. The programs that tests start and interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        items[:] = in_turns(items)


def in_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the longest first; items of one kind keep their order, so that those of a module share its fixtures."""

    def turn(item: pytest.Item) -> int:
        return next((turn for turn, name in enumerate(LONGEST_FIRST) if item.get_closest_marker(name)), len(LONGEST_FIRST))

    return sorted(items, key=turn)


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
