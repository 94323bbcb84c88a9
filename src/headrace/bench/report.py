"""Report of a benchmark: a table, or one JSON object.

    {"command": "publish", "facts": {…}, "config": {…}, "figures": [{"name": "figg publish, durable", "value": 812345.6,
     "unit": "records/s", "runs": […], "target": {"at_least": 600000, "met": true}, "notes": {…}}]}

`value` is the median of `runs`; `notes` holds further values (percentiles, sizes, counts).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.bench.facts import Facts

NoteValue = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Target:
    """Bound that a figure must meet."""

    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return f"≥ {human(self.at_least)}" if self.at_least is not None else f"≤ {human(self.at_most or 0.0)}"


@dataclass(slots=True)
class Figure:
    """One value with its unit: the median of its runs."""

    name: str
    unit: str
    runs: list[float]
    target: Target | None = None
    notes: dict[str, NoteValue] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return statistics.median(self.runs)

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.target.met_by(self.value)

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit, "runs": self.runs}
        if self.target is not None:
            bounds = {name: bound for name, bound in asdict(self.target).items() if bound is not None}
            shown["target"] = bounds | {"met": self.met}
        if self.notes:
            shown["notes"] = self.notes
        return shown


@dataclass(slots=True)
class Report:
    """All figures of one command."""

    command: str
    facts: Facts
    config: dict[str, NoteValue]
    figures: list[Figure] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    def to_json(self) -> str:
        return json.dumps(
            {
                "command": self.command,
                "facts": asdict(self.facts),
                "config": self.config,
                "figures": [figure.to_json() for figure in self.figures],
            },
            indent=2,
            ensure_ascii=False,
        )

    def show(self, console: Console) -> None:
        """Print the table."""
        from rich.table import Table

        table = Table(title=f"benchmark: {self.command}", title_justify="left", show_edge=False, pad_edge=False)
        for heading, side in (
            ("figure", "left"),
            ("median", "right"),
            ("unit", "left"),
            ("min – max", "right"),
            ("target", "left"),
            ("notes", "left"),
        ):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]  # rich's literal type is not exported
        for figure in self.figures:
            table.add_row(
                figure.name,
                human(figure.value),
                figure.unit,
                f"{human(min(figure.runs))} – {human(max(figure.runs))}" if len(figure.runs) > 1 else "",
                "" if figure.target is None else f"{figure.target} {'✓' if figure.met else '✗'}",
                ", ".join(
                    f"{name} {human(note) if isinstance(note, float) else note}"
                    for name, note in figure.notes.items()
                    if not _json_only(note)
                ),
            )
        console.print(table)
        facts = self.facts
        console.print(
            f"{facts.cores} × {facts.cpu}, {facts.memory_bytes / 2**30:.0f} GiB, {facts.kernel}, {facts.filesystem}, "
            f"fdatasync p50 {facts.fdatasync_p50_ms} ms p99 {facts.fdatasync_p99_ms} ms, load {facts.load_average}, "
            f"{facts.python}, headrace {facts.headrace}{' compiled' if facts.is_compiled else ''}, {facts.date}",
            style="dim",
            highlight=False,
        )
        if not facts.keeps_files:
            console.print(
                f"{facts.directory} is in memory ({facts.filesystem}): durable figures are meaningless there; choose a disk with --dir.",
                style="yellow",
            )


def _json_only(note: NoteValue) -> bool:
    """Return whether a note is shown in the JSON only, such as an encoded histogram."""
    return isinstance(note, str) and len(note) > 60


def human(value: float) -> str:
    """Format with three or four significant digits: 1.24 M, 83.1 k, 0.352."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.2f} G"
    if size >= 1e6:
        return f"{value / 1e6:.2f} M"
    if size >= 1e4:
        return f"{value / 1e3:.1f} k"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest of the sorted values that `percent` of them do not exceed."""
    index = max(0, -(-len(ordered) * percent // 100) - 1)
    return ordered[int(index)]


def cpu_note(seconds: float, records: int) -> dict[str, NoteValue]:
    """Return the broker's CPU time per record. It depends less on other work of the machine than a rate does."""
    return {"broker CPU µs/record": round(seconds / records * 1e6, 3)} if seconds else {}
