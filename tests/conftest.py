"""What all tests share.

The figures that prove the promises are printed at the end of a run, under `proof`. Secrets are watched. What the caller has set for
their own terminal and their own use of Headrace is removed. `tests/scheduling.py` distributes the tests to the workers of xdist.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import pytest
from hypothesis import HealthCheck, settings

from headrace.compiled import is_compiled
from tests import canaries, kafka_fixtures, scheduling

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # both depend on the machine
settings.load_profile("headrace")

HERE: Final = Path(__file__).parent
Proof: TypeAlias = Callable[[str, int], None]
SLOW: Final = (
    *("access/test_existence", "access/test_flight_matrix", "access/test_login", "access/test_matrix", "bench"),
    *("broker/test_schema_checks", "broker/test_settlement_model", "broker/test_stages_crash", "cli/test_access_commands"),
    *("cli/test_command_line", "cli/test_completion", "cli/test_copy", "cli/test_extras", "cli/test_ping", "cli/test_pipelines"),
    *("cli/test_pubsub", "cli/test_status", "cli/test_terminal", "consistency", "console/test_access", "cost", "docs/test_clients_page"),
    *("crash", "engine/test_exhaustion", "faults", "flight/test_bounds", "flight/test_exhaustion", "flight/test_login", "packaging"),
    *("protocols/test_large_values", "protocols/test_strain", "protocols/test_time", "schemas/test_json_compatibility", "server", "spark"),
    *("storage/test_store_model", "test_canaries", "test_extras"),
)
"""Beginnings of the paths of tests that start programs or search large spaces: a quarter of the tests, three quarters of the time."""
_SLOW_PATHS: Final = tuple(f"{HERE}/{name}" for name in SLOW)
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
    config.pluginmanager.register(scheduling, "scheduling")
    for name in list(os.environ):
        if name.startswith("HEADRACE__") or name in OF_THE_CALLER:
            del os.environ[name]
    os.environ["XDG_CONFIG_HOME"] = os.devnull  # the contexts of the caller
    # Compiling Headrace takes half of the start of each program, and rewriting the assertions more than half of the collection.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs this way. The programs that tests start and interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_on_sources(test: str) -> None:
    """Run the test in a process that does not use the compiled modules, in which nothing can be replaced."""
    assert "tests.plain_sources" not in sys.argv, "the plugin has no effect"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.plain_sources", test]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def pytest_collection_finish() -> None:
    """Leave the collected tests out of garbage collection, which would look at half a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which no test is selected: every worker collects the whole suite."""
    return True if "not slow" in config.option.markexpr and _is_slow(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_compiled() and item.get_closest_marker("replaces_code"):
            # Its fixtures may replace code, too.
            item.setup, item.runtest = lambda: None, partial(_run_on_sources, item.nodeid)  # type: ignore[method-assign]
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)


def _is_slow(path: Path) -> bool:
    return str(path).startswith(_SLOW_PATHS)


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
