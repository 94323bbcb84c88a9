"""`headrace sub` and `fetch`: read records of one topic or of several, through any protocol.

Data goes to stdout, messages to stderr. A pipe or file receives raw bytes; a terminal receives no control characters (`terminal.py`).
On an interrupt, `sub` commits printed records.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import click

from headrace.cli.interrupts import run
from headrace.cli.printed import FORMAT_TEXT, OUTPUTS, OUTPUTS_TEXT
from headrace.cli.servers import Server, server_options
from headrace.cli.template import Template
from headrace.clients.connect import supports
from headrace.clients.messages import GroupMode, Start
from headrace.server.units import parse_duration

_TIME_TEXT: Final = "TIME: 2026-11-15T07:49 in the local zone, 2026-11-15T07:49Z in UTC, or 5m for 5 minutes ago. -N: the last N records."


@dataclass(frozen=True, slots=True)
class Last:
    """Start position: the last `count` records of all partitions."""

    count: int


def _parse_start(context: click.Context, parameter: click.Parameter, text: str | None) -> Start | Last | None:
    if text is None:
        return None
    if text in ("earliest", "latest"):
        return "earliest" if text == "earliest" else "latest"
    if re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"-[1-9][0-9]{0,6}", text, re.ASCII):
        return Last(int(text[1:]))
    at = _parse_time(text)
    if at is None:
        raise click.BadParameter(f"{text!r} is invalid; expected earliest, latest, an offset, -N or a time")
    return at


def _parse_time(text: str) -> datetime | None:
    """Parse a date with optional time (local zone by default), or a duration before now."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        pass
    try:
        return datetime.now(UTC) - timedelta(milliseconds=parse_duration(text))
    except (ValueError, OverflowError):
        return None


def _check_start(server: Server, start: Start | Last | None, group: str | None) -> None:
    if isinstance(start, datetime) and not supports(server.protocol, "offset_for_time"):
        raise click.UsageError(f"the {server.protocol} protocol does not support times; use earliest, latest or an offset")
    if isinstance(start, Last) and server.protocol != "flymq":
        raise click.UsageError(f"the {server.protocol} protocol does not support --from -{start.count}; use --protocol flymq")
    if isinstance(start, Last) and group is not None:
        raise click.UsageError("--from -N and --group exclude one another: a group has its own position")


class Output(NamedTuple):
    """Chosen output: a name of `OUTPUTS`, or a template."""

    name: str
    template: Template | None

    @property
    def needs_details(self) -> bool:
        """Whether timestamps and headers are printed."""
        return self.template.needs_details if self.template is not None else self.name in ("json", "jsonl", "table")


def _output_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add -o and --format; the command receives them as `output`."""

    @click.option("-o", "--output", type=click.Choice(OUTPUTS), default="raw", show_default=True, help=OUTPUTS_TEXT)
    @click.option("--format", "template", metavar="TEMPLATE", help=FORMAT_TEXT)
    @functools.wraps(command)
    def with_output(*arguments: object, output: str, template: str | None, **rest: object) -> int:
        try:
            parsed = None if template is None else Template(template)
        except ValueError as failure:
            raise click.BadParameter(str(failure), param_hint="--format") from None
        return command(*arguments, output=Output(output, parsed), **rest)

    return with_output


_partition = click.option("--partition", type=click.IntRange(min=0), help="Only this partition. Default: all.")


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="earliest|latest|OFFSET|-N|TIME",
    callback=_parse_start,
    help=f"Start position. latest (the default of most protocols): only new records. {_TIME_TEXT}",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after this number of records of all partitions.")
@click.option("--group", help="Share the records with the other members of this group, resume where it was, and commit printed records.")
@click.option(
    "--mode",
    type=click.Choice(["ordered", "shared"]),
    help="How the members of the group share the records: by partition, or one by one. Default: as the group does, or the protocol.",
)
@_partition
@_output_options
@server_options
def sub(
    topic: str,
    start: Start | Last | None,
    count: int | None,
    group: str | None,
    mode: GroupMode | None,
    partition: int | None,
    output: Output,
    server: Server,
) -> int:
    """Print records of a topic and follow it.

    TOPIC may be a pattern such as 'orders.*': * is any text, ? one character. It matches topics that are created later too, and no
    dead letters unless it ends with .dlq. A topic that does not exist is an error.
    """
    from headrace.cli.following import Following

    _check_start(server, start, group)
    if mode is not None and group is None:
        raise click.UsageError("--mode needs --group")
    return run(Following(server, topic, start, count, group, mode, partition, output).run())


@click.command()
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="earliest|OFFSET|-N|TIME",
    default="earliest",
    show_default=True,
    callback=_parse_start,
    help=f"Start position. {_TIME_TEXT}",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Print at most this number of records of all partitions.",
)
@click.option("--group", help="Begin at the committed offset of this group if it is higher than --from. Does not commit.")
@_partition
@_output_options
@server_options
def fetch(topic: str, start: Start | Last, count: int, group: str | None, partition: int | None, output: Output, server: Server) -> int:
    """Print records of a topic and exit.

    Records of several partitions are printed in the order of their timestamps. TOPIC may be a pattern such as 'orders.*': * is any text,
    ? one character. With -o json, the records are one array.
    """
    from headrace.cli.fetching import fetch_records

    if not supports(server.protocol, "fetch"):
        raise click.UsageError(f"the {server.protocol} protocol does not support fetch; use --protocol flymq or rustlog, or headrace sub")
    _check_start(server, start, group)
    return run(fetch_records(server, topic, start, count, group, partition, output))
