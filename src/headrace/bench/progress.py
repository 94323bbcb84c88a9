"""Progress bar on a terminal; silent elsewhere.

The measuring loop redraws the bar. No thread does, because it would take CPU time from the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.bench.load import Tick


class Steps:
    """Progress bar of a command with one line per measurement."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    @contextmanager
    def step(self, name: str, total: int) -> Iterator[Tick]:
        """Show one measurement of `total` records (or bytes, or rounds)."""
        task = self._bar.add_task(name, total=total)
        self._bar.refresh()

        def tick(done: int) -> None:
            self._bar.update(task, completed=done, refresh=True)

        yield tick
        self._bar.remove_task(task)
