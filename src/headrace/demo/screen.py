"""Progress display of the demo: a live view on a terminal, otherwise plain lines."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.demo.orders import TOTALS_TOPIC, Total
from headrace.demo.traffic import Traffic

PLAIN_SECONDS: Final = 5.0
MINUTES_SHOWN: Final = 6


@dataclass(slots=True)
class DemoState:
    """Current state of the demo."""

    traffic: Traffic
    phase: str = ""
    """Description of the current phase."""
    totals: dict[str, Total] = field(default_factory=dict)
    dead_letters: int = 0
    hints: tuple[str, ...] = ()

    @property
    def counted(self) -> int:
        return sum(total.orders for total in self.totals.values())


class Screen:
    """Progress display. `show` limits its own rate."""

    def __init__(self, console: Console, state: DemoState) -> None:
        self._console, self._state = console, state
        # A dumb terminal cannot move its cursor and would show nothing of a live display.
        is_live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, refresh_per_second=4, transient=True) if is_live else None
        self._printed_at = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        elif self._state.hints:
            self._console.print("\n".join(["try next, in another terminal:", *(f"  {hint}" for hint in self._state.hints)]), soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        if self._live is not None:
            self._live.update(live_view(self._state, time.monotonic() - self._began))
        elif time.monotonic() - self._printed_at >= PLAIN_SECONDS:
            self._printed_at = time.monotonic()
            self._console.print(line(self._state, time.monotonic() - self._began), highlight=False, soft_wrap=True)


def line(state: DemoState, seconds: float) -> str:
    protocols = "  ".join(f"{name} {protocol.acknowledged:,}" for name, protocol in state.traffic.protocols.items())
    latest = f", latest minute {state.totals[max(state.totals)].orders:,}" if state.totals else ""
    counted = f"{state.counted:,} counted by the pipeline{latest}, {state.dead_letters:,} dead letters"
    return f"{seconds:4.0f} s  {state.phase}  |  {state.traffic.acknowledged:,} orders: {protocols}  |  {counted}"


def live_view(state: DemoState, seconds: float) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{seconds:.0f} s  {state.phase}", style="bold"), _protocols(state.traffic)]
    if state.totals:
        parts.append(_totals(state))
    parts.append(Text(f"{state.counted:,} orders counted, {state.dead_letters:,} malformed ones dead-lettered"))
    if state.hints:
        parts.append(Text("\nTry next, in another terminal:", style="bold"))
        parts += [Text(f"  {hint}", style="cyan") for hint in state.hints]
    return Group(*parts)


def _protocols(traffic: Traffic) -> Table:
    table = Table("protocol", "address", title="orders published through five protocols", title_justify="left")
    table.add_column("acknowledged, on disk", justify="right")
    table.add_column("per second", justify="right")
    for name, protocol in traffic.protocols.items():
        table.add_row(name, protocol.url, f"{protocol.acknowledged:,}", f"{protocol.rate:,.0f}")
    return table


def _totals(state: DemoState) -> Table:
    table = Table("minute (UTC)", title=f"Totals by minute, written by Spark to {TOTALS_TOPIC} and a Delta table", title_justify="left")
    table.add_column("orders", justify="right")
    table.add_column("amount", justify="right")
    for minute in sorted(state.totals)[-MINUTES_SHOWN:]:
        total = state.totals[minute]
        table.add_row(minute, f"{total.orders:,}", f"{total.amount_cents / 100:,.2f}")
    return table
