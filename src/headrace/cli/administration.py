"""What the commands that look after a running broker share: how to reach it, how to print rows, how to ask before destroying.

They speak FlyMQ, the protocol with the widest vocabulary. Rows go to stdout as a table for people, or as JSON or CSV for programs.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, cast

import click

from headrace.cli import one_line
from headrace.cli.rows import OUTPUTS, Row, moment, show_rows
from headrace.cli.servers import Server, flymq_options
from headrace.clients.flymq.client import FlyMqClient
from headrace.server.units import parse_duration, parse_size

__all__ = ["DURATION", "MOMENT", "SIZE", "Admin", "Row", "confirm", "admin_options", "moment", "yes_option"]


@dataclass(frozen=True, slots=True)
class Admin:
    """The broker to look after, and how to print what it says."""

    server: Server
    output: str
    timeout_seconds: float

    def run(self, work: Callable[[FlyMqClient], Awaitable[int]]) -> int:
        """Connect, do it, close. Raises `TimeoutError` when the broker takes too long."""

        async def all_of_it() -> int:
            client = cast(FlyMqClient, await self.server.connect())
            try:
                return await work(client)
            finally:
                client.abandon()

        async def in_time() -> int:
            async with asyncio.timeout(self.timeout_seconds):
                return await all_of_it()

        try:
            return asyncio.run(in_time())
        except TimeoutError:
            raise TimeoutError(f"the broker did not answer within {self.timeout_seconds:g} s") from None

    def show(self, rows: Sequence[Row], *, columns: Sequence[str]) -> int:
        """All columns for programs, in the table those named."""
        return show_rows(rows, self.output, columns=columns)

    def tell(self, text: str) -> None:
        """Talk, for people."""
        if not self.server.quiet:
            click.echo(one_line(text), err=True)


def admin_options(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the options; the command gets what they mean as `admin`."""

    @flymq_options
    @click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="How to print it.")
    @click.option("--timeout", type=DURATION, default="10s", show_default=True, help="How long the broker may take.")
    @functools.wraps(command)
    def with_admin(*arguments: object, server: Server, output: str, timeout: int, **rest: object) -> int:
        return command(*arguments, admin=Admin(server, output, timeout / 1000), **rest)

    return with_admin


yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(question: str, yes: bool) -> None:
    """Ask before something is destroyed. Without a terminal there is nobody to ask: then only --yes will do."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Say --yes to do it without being asked")
    click.confirm(question, abort=True, err=True)


class _Unit(click.ParamType[int]):
    """A number with a unit, as in the configuration."""

    def __init__(self, name: str, parse: Callable[[str], int]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return self._parse(str(value))
        except ValueError as failure:
            self.fail(str(failure), param, ctx)


DURATION: Final = _Unit("DURATION", parse_duration)
SIZE: Final = _Unit("SIZE", parse_size)


class _Moment(click.ParamType[int]):
    """A date and time as Unix ms; in the zone of this machine unless it names one."""

    name = "DATETIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return int(datetime.fromisoformat(str(value)).timestamp() * 1000)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no date and time such as 2026-11-15T07:49 or 2026-11-15T07:49:00Z", param, ctx)


MOMENT: Final = _Moment()
