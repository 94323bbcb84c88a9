"""Shared options of the benchmarks, and their common frame: workspace, progress bar, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.bench.children import Address, Broker, broker, parse_address, workspace
from headrace.bench.report import NoteValue, Report

if TYPE_CHECKING:
    from headrace.bench.facts import Steps

WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""
CONNECTIONS_MAX = 2_000
TOPICS_MAX = 10_000

Command = TypeVar("Command", bound=Callable[..., Any])


def _parse_size(_ctx: click.Context, _param: click.Parameter, text: str) -> int:
    from headrace.server.units import parse_size

    try:
        size_bytes = parse_size(text)
    except ValueError as failure:
        raise click.BadParameter(f"{text!r}: {failure}") from None
    if size_bytes < 1:
        raise click.BadParameter(f"{text!r}: a size is at least 1")
    return size_bytes


def parse_numbers(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    """Parse comma-separated numbers of connections."""
    return _numbers(text, CONNECTIONS_MAX)


def parse_topics(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    """Parse comma-separated numbers of topics."""
    return _numbers(text, TOPICS_MAX)


def _numbers(text: str, number_max: int) -> list[int]:
    numbers = [int(word) if word.strip().isdigit() else 0 for word in text.split(",")]
    if min(numbers) < 1 or max(numbers) > number_max:
        raise click.BadParameter(f"{text!r}: expected comma-separated numbers from 1 to {number_max}")
    return numbers


def common(command: Command) -> Command:
    """Add the options of every benchmark."""
    directory = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
    return _with(
        command,
        click.option(
            "--repeat",
            type=click.IntRange(1, 100),
            default=3,
            show_default=True,
            help="Repetitions of each measurement; the median is reported.",
        ),
        click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."),
        click.option(
            "--dir", "parent", type=directory, help="Directory for the benchmark's files (default: the system's temporary directory)."
        ),
    )


def protocol(names: list[str]) -> Callable[[Command], Command]:
    """Add the options of every benchmark of a protocol."""

    def decorate(command: Command) -> Command:
        return _with(
            common(command),
            click.option("--protocol", "protocol_name", type=click.Choice(names), default="figg", show_default=True, help="Wire protocol."),
            size(),
            ack(),
            click.option("--server", metavar="HOST:PORT", help="Measure this running broker instead of starting one."),
            click.option("--blipmq-key", "key", metavar="file:PATH|env:NAME", help="BlipMQ API key for --server."),
            profile(),
        )

    return decorate


def ack() -> Callable[[Command], Command]:
    levels = click.Choice(["durable", "written", "none"])
    return click.option("--ack", type=levels, default="durable", show_default=True, help="What an acknowledgement guarantees.")


def profile() -> Callable[[Command], Command]:
    path = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(
        "--profile", type=path, help="Run the broker under cProfile, which slows it down, and write the profile to this file."
    )


def records(default: int) -> Callable[[Command], Command]:
    return click.option("--records", type=click.IntRange(1), default=default, show_default=True, help="Records of one repetition.")


def size(
    flag: str = "--size", name: str = "value_bytes", default: str = "100", help: str = "Bytes of a value."
) -> Callable[[Command], Command]:
    """Add an option for a size with an optional unit, such as `100` or `64 KiB`."""
    return click.option(flag, name, metavar="SIZE", default=default, show_default=True, callback=_parse_size, help=help)


def connections() -> Callable[[Command], Command]:
    return click.option(
        "--connections", type=click.IntRange(1, CONNECTIONS_MAX), default=1, show_default=True, help="Concurrent connections."
    )


def duration(default: float, help: str) -> Callable[[Command], Command]:
    return click.option("--duration", type=click.FloatRange(0.01, 3_600), default=default, show_default=True, help=help)


def streams() -> Callable[[Command], Command]:
    return click.option(
        "--streams", type=click.IntRange(1, 1_000), default=1, show_default=True, help="Streams per connection (QUIC only)."
    )


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Chosen:
    """Broker chosen by the options."""

    ack: str
    server: str | None
    key: str | None
    profile: Path | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Broker under load. `process` is None for a broker named with --server."""

    address: Address
    key: bytes
    """BlipMQ API key; empty if none was given."""
    process: Broker | None

    def cpu_seconds(self) -> float:
        """Return the CPU time of the broker's process so far; 0 for a broker named with --server."""
        return 0.0 if self.process is None else self.process.cpu_seconds()


@dataclass(frozen=True, slots=True)
class Bench:
    """State of one running benchmark command."""

    report: Report
    directory: Path
    steps: Steps
    repeat: int

    @contextmanager
    def broker(self, chosen: Chosen) -> Iterator[Measured]:
        """Yield the broker to measure: the one named with --server, or a new one on an empty directory."""
        if chosen.server is not None:
            if chosen.ack != "durable" or chosen.profile is not None:
                raise click.UsageError("--ack and --profile cannot be used with --server: they apply to a broker that the benchmark starts")
            yield Measured(parse_address(chosen.server), _read_key(chosen.key), None)
            return
        if chosen.key is not None:
            raise click.UsageError("--blipmq-key needs --server: a broker that the benchmark starts has its own key")
        with (
            TemporaryDirectory(dir=self.directory) as directory,
            broker(Path(directory), ack=chosen.ack, profile=chosen.profile) as running,
        ):
            yield Measured(running.address, running.key, running)


def _read_key(text: str | None) -> bytes:
    from headrace.server.api_keys import configured

    return b"" if text is None else next(iter(configured((), [text], os.environ))).encode()


@contextmanager
def measuring(name: str, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue]) -> Iterator[Bench]:
    """Yield a workspace with a progress bar, then print the report. The workspace is removed in every case."""
    from rich.console import Console

    from headrace.bench.facts import Steps, gather

    terminal = Console(stderr=True)
    config["repeat"] = repeat
    config |= {variable: text for variable, text in os.environ.items() if variable.startswith("HEADRACE__")}
    with workspace(parent) as directory:
        report = Report(name, gather(directory), config)
        with Steps(terminal) as steps:
            yield Bench(report, directory, steps, repeat)
    if output == "json":
        click.echo(report.to_json())
        if terminal.is_terminal:
            report.show(terminal)
    else:
        report.show(Console() if sys.stdout.isatty() else Console(width=WIDTH))
