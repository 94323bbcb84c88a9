"""`headrace pipeline`: run, inspect and stop pipelines on Spark."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from headrace.cli import CONFLICT, TOO_SLOW, one_line, terminal
from headrace.cli.contexts import Context
from headrace.cli.rows import OUTPUTS, Row, moment, show_rows
from headrace.cli.servers import context_of, context_option
from headrace.errors import ConfigError
from headrace.extras import needs

if TYPE_CHECKING:
    from headrace.spark.pipelines.model import Pipeline

_TABLES: Final = ("delta", "iceberg", "parquet")
_QUERY_COLUMNS: Final = {
    "pipeline": "pipeline", "sink": "sink", "state": "state", "batch": "batch", "rows_total": "rows", "input_rate": "in/s",
    "processing_rate": "done/s", "batch_ms": "ms", "lag": "lag", "state_rows": "kept",
}  # fmt: skip
"""Columns of the table by field of a query. Other output formats contain all fields under their names."""

_file = click.argument("file", type=click.Path(path_type=Path))
_output = click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format.")


@click.group()
def pipeline() -> None:
    """Run pipelines on Spark: run, check, list, status, stop, archive."""


def session_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of commands that start Spark."""

    @click.option("--master", metavar="URL", default="local[*]", show_default=True, help="Spark master: local[N], spark://HOST:PORT, …")
    @click.option("--conf", metavar="KEY=VALUE", multiple=True, help="Spark setting; may be repeated.")
    @click.option(
        "--servers",
        metavar="HOST:PORT",
        envvar="HEADRACE_FLIGHT",
        show_envvar=True,
        help="Flight endpoint of the broker; overrides the file.",
    )
    @functools.wraps(command)
    def with_session(*arguments: object, conf: Sequence[str], **rest: object) -> int:
        with needs(click.get_current_context().command_path, "pyspark", "pyarrow", "pandas"):
            return command(*arguments, conf=_settings(conf), **rest)

    return with_session


def _broker_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add --context, whose Flight endpoint is used. A current context does not override the file of a pipeline."""

    @context_option
    @functools.wraps(command)
    def with_context(*arguments: object, context: str | None, servers: str | None, **rest: object) -> int:
        known = context_of(servers, context, option="--servers") if context else Context()
        return command(*arguments, servers=servers or known.flight or None, **rest)

    return with_context


def _run_options(command: Callable[..., int]) -> Callable[..., int]:
    @click.option("--once", is_flag=True, help="Process the records present now, then exit.")
    @click.option("--checkpoint", metavar="DIR", help="Directory of progress and state; overrides the file.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
    @functools.wraps(command)
    def with_run(*arguments: object, **rest: object) -> int:
        return command(*arguments, **rest)

    return with_run


@pipeline.command()
@_file
@_run_options
@session_options
@_broker_options
def run(file: Path, once: bool, checkpoint: str | None, master: str, conf: dict[str, str], servers: str | None, quiet: bool) -> int:
    """Run the pipeline in FILE, a .toml or .py, until it is stopped.

    SIGINT, SIGTERM and `headrace pipeline stop` end it after the current batches.
    """
    from headrace.spark.pipelines.files import load

    return _run(load(file, **_overrides(checkpoint, servers)), str(file.absolute()), master, once, conf, quiet)


@pipeline.command()
@click.argument("topic")
@click.option("--to", "target", metavar="KIND:DIR", required=True, help="delta:DIR, iceberg:DIR or parquet:DIR.")
@click.option("--format", "value_format", metavar="FORMAT", default="raw", show_default=True, help="raw, string, json, avro or protobuf.")
@click.option("--schema", metavar="DDL", help="Columns of a value if the topic requires no schema: 'id long, at timestamp'.")
@click.option("--starting", metavar="WHERE", default="earliest", show_default=True, help="Start of a new archive: earliest or latest.")
@_run_options
@session_options
@_broker_options
def archive(
    topic: str,
    target: str,
    value_format: str,
    schema: str | None,
    starting: str,
    once: bool,
    checkpoint: str | None,
    master: str,
    conf: dict[str, str],
    servers: str | None,
    quiet: bool,
) -> int:
    """Archive a topic to a Delta, Iceberg or Parquet table, exactly once.

    It resumes where it stopped, so it can run continuously or periodically with --once.
    """
    from headrace.spark.pipelines.archive import archive_pipeline

    kind, colon, directory = target.partition(":")
    if kind not in _TABLES or not colon or not directory:
        raise click.UsageError(f"--to {target}: expected one of delta:DIR, iceberg:DIR and parquet:DIR")
    made = archive_pipeline(
        topic, kind, directory, format=value_format, schema=schema or "", starting=starting, **_overrides(checkpoint, servers)
    )
    return _run(made, f"archive of {topic}", master, once, conf, quiet)


@pipeline.command()
@_file
@session_options
@_broker_options
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format.")
def check(file: Path, master: str, conf: dict[str, str], servers: str | None, output: str) -> int:
    """Show topics, offsets, columns of each step and sinks of the pipeline in FILE without running it."""
    from headrace.spark.pipelines.checking import inspect
    from headrace.spark.pipelines.files import load

    found = inspect(load(file, **_overrides(None, servers)), master=master, conf=conf)
    if output == "json":
        terminal.echo(json.dumps(found.plain(), ensure_ascii=False, indent=2))
    else:
        terminal.echo(found.tree())
    return 0


@pipeline.command("list")
@_output
def list_pipelines(output: str) -> int:
    """List running and ended pipelines of this machine."""
    from headrace.spark.pipelines.executions import executions

    rows = [_execution_row(status) for status in executions()]
    return show_rows(rows, output, columns=("name", "state", "pid", "sinks", "lag", "updated", "checkpoint"))


@pipeline.command()
@click.argument("name", metavar="[NAME|FILE|DIR]", required=False)
@_output
def status(name: str | None, output: str) -> int:
    """Show the queries of a pipeline; default: of all running pipelines."""
    from headrace.spark.pipelines.executions import executions, find

    found = [find(name)] if name else [each for each in executions() if each["state"] in ("starting", "running", "stopping")]
    rows: list[Row] = [
        {"pipeline": each["name"], "execution": each["state"], "sink": query.pop("name"), **query}
        for each in found
        for query in each["queries"]
    ]
    if output == "table" and name:
        [one] = found
        click.echo(f"{one['name']}: {one['state']}, pid {one['pid']} on {one['host']}, {one['master']}", err=True)
        if one["error"]:
            click.echo(one_line(one["error"]), err=True)
    if output == "table":
        rows = [{text: _rounded(row[name]) for name, text in _QUERY_COLUMNS.items()} for row in rows]
    return show_rows(rows, output, columns=list(_QUERY_COLUMNS.values()))


@pipeline.command()
@click.argument("name", metavar="NAME|FILE|DIR")
@click.option("--timeout", type=click.FloatRange(min=0), default=90.0, show_default=True, help="Seconds to wait for its end.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
def stop(name: str, timeout: float, quiet: bool) -> int:
    """Stop a running pipeline after its current batches and wait for its end."""
    from headrace.spark.pipelines.executions import ask_to_stop, find

    found = find(name)
    if found["state"] not in ("starting", "running", "stopping"):
        if not quiet:
            click.echo(f"{found['name']}: is not running ({found['state']})", err=True)
        return CONFLICT
    ask_to_stop(found)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        now = find(found["checkpoint"] if Path(found["checkpoint"]).is_dir() else name)
        if now["state"] not in ("starting", "running", "stopping"):
            if not quiet:
                click.echo(f"{found['name']}: {now['state']}", err=True)
            return 0
        time.sleep(0.1)
    click.echo(f"{found['name']}: still running after {timeout:g} s (pid {found['pid']}); it ends after its current batch", err=True)
    return TOO_SLOW


def _run(made: Pipeline, file: str, master: str, once: bool, conf: dict[str, str], quiet: bool) -> int:
    from headrace.cli.watching import Watch
    from headrace.spark.pipelines.runner import run_pipeline

    wanted = _Stop()
    with wanted, Watch(made.name, quiet=quiet) as watch:
        watch.message(f"{made.name}: starting Spark ({master}); its log is {made.checkpoint}/.headrace/spark.log")
        outcome = run_pipeline(made, file=file, master=master, once=once, conf=conf, stop=wanted, on_progress=watch.show)
        watch.message(f"{made.name}: {outcome.state}; " + ", ".join(f"{query.name} {query.rows_total:,} rows" for query in outcome.queries))
    return 0


class _Stop:
    """Stop flag: the first signal sets it, the second ends the process."""

    def __init__(self) -> None:
        self._wanted = False

    def __call__(self) -> bool:
        # Spark replaces the SIGINT handler when it starts.
        if signal.getsignal(signal.SIGINT) != self._on_signal:
            signal.signal(signal.SIGINT, self._on_signal)
        return self._wanted

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wanted:
            os._exit(128 + number)
        self._wanted = True


def _execution_row(status: dict[str, object]) -> Row:
    queries = status["queries"]
    assert isinstance(queries, list), "a status has its queries"
    lags = [query["lag"] for query in queries if query["lag"] is not None]
    shown = {key: status[key] for key in ("name", "state", "pid")}
    return {
        **shown,
        "sinks": len(queries),
        "lag": max(lags, default=None),
        "updated": moment(status["updated"]),  # type: ignore[arg-type]  # the execution wrote it as Unix ms
        "checkpoint": status["checkpoint"],
        "file": status["file"],
        "error": status["error"],
    }


def _rounded(value: object) -> object:
    return round(value) if isinstance(value, float) else value


def _overrides(checkpoint: str | None, servers: str | None) -> dict[str, object]:
    found: dict[str, object] = {}
    if checkpoint:
        # A path on the command line is relative to the current directory.
        found["checkpoint"] = checkpoint if "://" in checkpoint else str(Path(checkpoint).expanduser().absolute())
    if servers:
        found["servers"] = servers
    return found


def _settings(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--conf {setting}: expected KEY=VALUE")
        found[key] = value
    return found
