"""Output of rows as a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, TypeAlias

from headrace.cli import one_line, terminal

OUTPUTS: Final = ("table", "json", "jsonl", "csv")
Row: TypeAlias = Mapping[str, object]
_PIPE_COLUMNS: Final = 1_000
"""Width of a table in a pipe or file."""


def show_rows(rows: Sequence[Row], output: str, *, columns: Sequence[str]) -> int:
    """Print rows: the given columns in a table, all columns in other formats. Zero rows are not an error."""
    if output == "json":
        terminal.echo(json.dumps(list(rows), ensure_ascii=False, indent=2))
    elif output == "jsonl":
        for row in rows:
            terminal.echo(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
    elif output == "csv":
        terminal.echo(_as_csv(rows, columns), nl=False)
    elif rows or sys.stdout.isatty():
        _print_table(rows, columns)
    return 0


def moment(unix_ms: int) -> str:
    """Return a time in ISO 8601, UTC."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _as_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    names = list(rows[0]) if rows else list(columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return text.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = bool(rows) and all(isinstance(row.get(column), int) for row in rows)
        table.add_column(column.replace("_", " "), overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(one_line(_cell(row.get(column)))) for column in columns))
    # Without a terminal Rich assumes 80 columns and folds cells: `grep` would find parts of a row.
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(table)
