"""The options that benchmarks share, and the run around each of them: workspace, progress, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.bench.children import Address, Broker, broker, parse_address, workspace
from headrace.bench.report import NoteValue, Report

if TYPE_CHECKING:
    from headrace.bench.progress import Steps

WIDTH = 160
"""Of a table that goes to a file or a pipe, which have no width of their own."""

Command = TypeVar("Command", bound=Callable[..., Any])


def _parse_size(_ctx: click.Context, _param: click.Parameter, text: str) -> int:
    from headrace.server.units import parse_size

    try:
        size_bytes = parse_size(text)
    except ValueError as failure:
        raise click.BadParameter(f"{text!r}: {failure}") from None
    if size_bytes < 1:
        raise click.BadParameter("a size is at least 1")
    return size_bytes


def common(command: Command) -> Command:
    """What every benchmark takes."""
    directory = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
    return _with(
        command,
        click.option(
            "--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each measurement; the median counts."
        ),
        click.option(
            "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="What goes to stdout."
        ),
        click.option("--dir", "parent", type=directory, help="Where the run keeps its files (default: the directory for temporary files)."),
    )


def protocol(names: list[str]) -> Callable[[Command], Command]:
    """What every benchmark of a protocol takes."""

    def decorate(command: Command) -> Command:
        promise = click.Choice(["durable", "written", "none"])
        profile = click.Path(dir_okay=False, writable=True, path_type=Path)
        return _with(
            common(command),
            click.option(
                "--protocol", "protocol_name", type=click.Choice(names), default="figg", show_default=True, help="The wire protocol."
            ),
            size(),
            click.option("--ack", type=promise, default="durable", show_default=True, help="What an acknowledgement promises."),
            click.option("--server", metavar="HOST:PORT", help="Measure this running broker instead of starting one."),
            click.option("--blipmq-key", "key", metavar="file:PATH|env:NAME", help="The API key of the BlipMQ protocol of --server."),
            click.option("--profile", type=profile, help="Run the broker under cProfile, which slows it down, and write the profile here."),
        )

    return decorate


def records(default: int) -> Callable[[Command], Command]:
    return click.option("--records", type=click.IntRange(1), default=default, show_default=True, help="Records of a run.")


def size(
    flag: str = "--size", name: str = "value_bytes", default: str = "100", help: str = "Bytes of a value."
) -> Callable[[Command], Command]:
    """A size with an optional unit: `100`, `64 KiB`."""
    return click.option(flag, name, metavar="SIZE", default=default, show_default=True, callback=_parse_size, help=help)


def connections() -> Callable[[Command], Command]:
    return click.option("--connections", type=click.IntRange(1, 2_000), default=1, show_default=True, help="Connections at once.")


def streams() -> Callable[[Command], Command]:
    return click.option(
        "--streams", type=click.IntRange(1, 1_000), default=1, show_default=True, help="Streams of each connection, over QUIC."
    )


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Chosen:
    """The broker that the options ask for."""

    ack: str
    server: str | None
    key: str | None
    profile: Path | None


@dataclass(frozen=True, slots=True)
class Measured:
    """The broker under load; its process is known if it was started here."""

    address: Address
    key: bytes
    """Of its BlipMQ protocol; empty if nobody said."""
    process: Broker | None

    def cpu_seconds(self) -> float:
        """Of the broker's process so far; 0 if that is not ours to look at."""
        return 0.0 if self.process is None else self.process.cpu_seconds()


@dataclass(frozen=True, slots=True)
class Bench:
    """One command at work."""

    report: Report
    directory: Path
    steps: Steps
    repeat: int

    @contextmanager
    def broker(self, chosen: Chosen) -> Iterator[Measured]:
        """The broker to measure: the one named, or a new one on an empty directory."""
        if chosen.server is not None:
            if chosen.ack != "durable" or chosen.profile is not None:
                raise click.UsageError("--ack and --profile need a broker that is started here: not together with --server")
            yield Measured(parse_address(chosen.server), _read_key(chosen.key), None)
            return
        if chosen.key is not None:
            raise click.UsageError("--blipmq-key is for --server: a broker that is started here has a key of its own")
        with broker(self.directory, ack=chosen.ack, profile=chosen.profile) as running:
            yield Measured(running.address, running.key, running)


def _read_key(text: str | None) -> bytes:
    from headrace.server.api_keys import configured

    return b"" if text is None else next(iter(configured((), [text], os.environ))).encode()


@contextmanager
def measuring(name: str, repeat: int, output: str, parent: Path | None, config: dict[str, NoteValue]) -> Iterator[Bench]:
    """A workspace, a progress bar on a terminal, and at the end the report; all of it cleaned up however the run ends."""
    from rich.console import Console

    from headrace.bench.facts import gather
    from headrace.bench.progress import Steps

    talk = Console(stderr=True)
    config["repeat"] = repeat
    config |= {variable: text for variable, text in os.environ.items() if variable.startswith("HEADRACE__")}
    with workspace(parent) as directory:
        report = Report(name, gather(directory), config)
        with Steps(talk) as steps:
            yield Bench(report, directory, steps, repeat)
    if output == "json":
        click.echo(report.to_json())
        if talk.is_terminal:
            report.show(talk)
    else:
        report.show(Console() if sys.stdout.isatty() else Console(width=WIDTH))
