"""What the terminal shows while the story runs: a picture that is drawn anew, or plain lines where nobody looks."""

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
    """What is going on."""

    traffic: Traffic
    phase: str = ""
    """In words: what is being done or waited for."""
    totals: dict[str, Total] = field(default_factory=dict)
    dead_letters: int = 0
    hints: tuple[str, ...] = ()

    @property
    def counted(self) -> int:
        return sum(total.orders for total in self.totals.values())


class Screen:
    """Call `show` as often as you like."""

    def __init__(self, console: Console, scene: DemoState) -> None:
        self._console, self._scene = console, scene
        # A dumb terminal cannot move its cursor: nothing of a live display would appear on it.
        is_live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, refresh_per_second=4, transient=True) if is_live else None
        self._said_at = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        elif self._scene.hints:
            self._console.print("\n".join(["try next, in another terminal:", *(f"  {hint}" for hint in self._scene.hints)]), soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        if self._live is not None:
            self._live.update(picture(self._scene, time.monotonic() - self._began))
        elif time.monotonic() - self._said_at >= PLAIN_SECONDS:
            self._said_at = time.monotonic()
            self._console.print(line(self._scene, time.monotonic() - self._began), highlight=False, soft_wrap=True)


def line(scene: DemoState, seconds: float) -> str:
    protocols = "  ".join(f"{name} {protocol.acknowledged:,}" for name, protocol in scene.traffic.protocols.items())
    latest = f", latest minute {scene.totals[max(scene.totals)].orders:,}" if scene.totals else ""
    counted = f"{scene.counted:,} counted by the pipeline{latest}, {scene.dead_letters:,} dead letters"
    return f"{seconds:4.0f} s  {scene.phase}  |  {scene.traffic.acknowledged:,} orders: {protocols}  |  {counted}"


def picture(scene: DemoState, seconds: float) -> RenderableType:
    parts: list[RenderableType] = [Text(f"{seconds:.0f} s  {scene.phase}", style="bold"), _protocols(scene.traffic)]
    if scene.totals:
        parts.append(_totals(scene))
    parts.append(Text(f"{scene.counted:,} orders counted, {scene.dead_letters:,} malformed ones among the dead letters"))
    if scene.hints:
        parts.append(Text("\nTry next, in another terminal:", style="bold"))
        parts += [Text(f"  {hint}", style="cyan") for hint in scene.hints]
    return Group(*parts)


def _protocols(traffic: Traffic) -> Table:
    table = Table("protocol", "address", title="orders go in through five protocols", title_justify="left")
    table.add_column("acknowledged, on disk", justify="right")
    table.add_column("a second", justify="right")
    for name, protocol in traffic.protocols.items():
        table.add_row(name, protocol.url, f"{protocol.acknowledged:,}", f"{protocol.rate:,.0f}")
    return table


def _totals(scene: DemoState) -> Table:
    table = Table("minute (UTC)", title=f"Spark counts them by minute into {TOTALS_TOPIC} and a Delta table", title_justify="left")
    table.add_column("orders", justify="right")
    table.add_column("amount", justify="right")
    for minute in sorted(scene.totals)[-MINUTES_SHOWN:]:
        total = scene.totals[minute]
        table.add_row(minute, f"{total.orders:,}", f"{total.amount_cents / 100:,.2f}")
    return table
