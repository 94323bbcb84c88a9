"""`headrace config check|show|explain`: inspect the configuration."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import click

from headrace.cli import FAILED, one_line
from headrace.cli.rows import PIPE_COLUMNS
from headrace.server.config import SETTINGS
from headrace.server.config_check import check_file
from headrace.server.config_sources import Resolved, explain, resolve, toml_of, toml_value
from headrace.server.settings import Setting


@click.group()
def config() -> None:
    """Check, show and explain the configuration."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> int:
    """Check whether FILE is a valid configuration. Ignores the environment.

    Reports every mistake with its line, and named files that do not exist. Relative paths are relative to the directory of FILE.
    """
    mistakes, count = check_file(file)
    for mistake in mistakes:
        place = f"{file}:{mistake.line}" if mistake.line else str(file)
        click.echo(f"headrace: {one_line(f'{place}: {mistake.text}')}", err=True)
    if mistakes:
        return FAILED
    click.echo(f"{file}: ok, {count} of {len(SETTINGS)} keys set")
    return 0


@config.command()
@click.option("--config", "file", type=click.Path(path_type=Path), envvar="HEADRACE_CONFIG", show_envvar=True, help="Configuration file.")
@click.option("-o", "--output", type=click.Choice(["table", "toml", "json"]), default="table", show_default=True, help="Output format.")
def show(file: Path | None, output: str) -> None:
    """Show the effective value of each key and its origin."""
    resolved = resolve(file=file, environment=os.environ)
    if output == "toml":
        click.echo(toml_of(resolved), nl=False)
    elif output == "json":
        rows = {name: {"value": resolved.plain(name), "origin": resolved.origins[name]} for name in SETTINGS}
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_table(resolved)


@config.command("explain")
@click.argument("key", required=False)
def explain_key(key: str | None) -> None:
    """Explain KEY: meaning, default, bounds, environment variable. Without KEY, list all keys."""
    if key is None:
        width = max(map(len, SETTINGS))
        for known in SETTINGS.values():
            click.echo(f"{known.name:<{width}}  {known.text.partition('. ')[0].rstrip('.')}")
        return
    known = explain(key)
    click.echo(_explanation(known))


def _explanation(known: Setting) -> str:
    text = textwrap.fill(known.text, 100, initial_indent="  ", subsequent_indent="  ")
    facts = {
        "default": toml_value(known.kind.plain(known.default)),
        "expected": known.kind.expected,
        "environment": known.variable,
    }
    return "\n".join([known.name, text, "", *(f"  {name + ':':<13}{value}" for name, value in facts.items())])


def _print_table(resolved: Resolved) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "value", "origin"):
        table.add_column(column, overflow="fold")
    for name in SETTINGS:
        style = "dim" if resolved.origins[name] == "default" else ""
        table.add_row(Text(name), Text(toml_value(resolved.plain(name))), Text(resolved.origins[name]), style=style)
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)
