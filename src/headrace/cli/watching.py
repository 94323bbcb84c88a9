"""Progress of a running pipeline: a live table on a terminal, otherwise one line per batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import click

from headrace.cli import one_line

if TYPE_CHECKING:
    from headrace.spark.pipelines.progress import QueryState

_LINE_SECONDS: Final = 1.0


class Watch:
    """Progress display on stderr. Console sinks use stdout."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self._name, self._quiet = name, quiet
        self._live: Any = None
        self._printed: dict[str, tuple[int | None, str]] = {}
        self._times: dict[str, float] = {}

    def __enter__(self) -> Watch:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(one_line(text), markup=False)
        else:
            click.echo(one_line(text), err=True)

    def show(self, states: Sequence[QueryState]) -> None:
        """Show the state of all queries."""
        if self._live is not None:
            self._live.update(_table(states), refresh=True)
        elif not self._quiet:
            for state in states:
                self._line(state)

    def _line(self, state: QueryState) -> None:
        current = (state.batch, state.state)
        before = self._printed.get(state.name)
        if current == before:
            return
        is_same_state = before is not None and before[1] == state.state
        if is_same_state and time.monotonic() - self._times.get(state.name, 0.0) < _LINE_SECONDS:
            return
        self._printed[state.name], self._times[state.name] = current, time.monotonic()
        click.echo(line_of(state), err=True)


def line_of(state: QueryState) -> str:
    """Return the state of a query as one line."""
    if state.state == "waiting":
        return one_line(f"{state.name}: failed ({state.failures}), will restart: {state.error}")
    text = f"{state.name}: {state.state}"
    if state.batch is None:
        return text
    text += f", batch {state.batch}, {state.rows_total:,} rows, in {state.input_rate:,.0f}/s, processed {state.processing_rate:,.0f}/s"
    text += f", {state.batch_ms:,} ms, lag {'-' if state.lag is None else f'{state.lag:,}'}"
    if state.state_rows:
        text += f", state {state.state_rows:,} rows in {size_text(state.state_bytes)}"
    return text


def size_text(size_bytes: int) -> str:
    """Return a human-readable size."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _table(states: Sequence[QueryState]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("sink")
    table.add_column("state")
    for column in ("batch", "rows", "in/s", "done/s", "batch ms", "lag", "state rows", "state"):
        table.add_column(column, justify="right")
    for state in states:
        numbers = [
            "-" if state.batch is None else str(state.batch),
            f"{state.rows_total:,}",
            f"{state.input_rate:,.0f}",
            f"{state.processing_rate:,.0f}",
            f"{state.batch_ms:,}",
            "-" if state.lag is None else f"{state.lag:,}",
            f"{state.state_rows:,}",
            size_text(state.state_bytes),
        ]
        table.add_row(Text(state.name), Text(state.state, style="red" if state.error else ""), *numbers)
        if state.error:
            table.add_row("", Text(one_line(state.error), style="red"))
    return table
