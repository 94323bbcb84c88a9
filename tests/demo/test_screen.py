"""The progress display."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.demo.orders import Total
from headrace.demo.screen import DemoState, Screen, line
from headrace.demo.traffic import ProtocolTraffic, Traffic


def state() -> DemoState:
    traffic = Traffic({"figg": ProtocolTraffic("figg://127.0.0.1:9092", 1_200, 99.6)}, [b"x"] * 1_200)
    return DemoState(
        traffic, "orders are sent", {"2025-11-15T12:00Z": Total("2025-11-15T12:00Z", 1_180, 123_456)}, 12, ("headrace sub demo",)
    )


def test_without_a_terminal_plain_lines_show_the_progress() -> None:
    output = io.StringIO()
    with Screen(Console(file=output, width=200), state()) as screen:
        screen.show()
        screen.show()
    assert output.getvalue().startswith("try next, in another terminal:\n  headrace sub demo\n")
    assert output.getvalue().count("\n") == 3
    assert "1,200 orders: figg 1,200" in output.getvalue()
    assert line(state(), 7).startswith("   7 s  orders are sent  |")


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    output = io.StringIO()
    with Screen(Console(file=output, width=200, force_terminal=True, legacy_windows=False), state()) as screen:
        screen.show()
    assert "1,200 orders: figg 1,200" in output.getvalue()


def test_a_terminal_gets_protocols_rates_totals_and_what_to_try_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, legacy_windows=False)
    with Screen(console, state()) as screen:
        screen.show()
    for word in ("figg://127.0.0.1:9092", "1,200", "100", "2025-11-15T12:00Z", "1,234.56", "12 malformed", "headrace sub demo"):
        assert word in output.getvalue()
