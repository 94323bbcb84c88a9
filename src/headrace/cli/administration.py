"""Shared parts of the administration commands: connection, output of rows, confirmation.

They use FlyMQ, the protocol with the most operations.
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
from headrace.cli.topic_names import suggesting
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import NotAuthorized
from headrace.server.units import parse_duration, parse_size

__all__ = ["DURATION", "MOMENT", "SIZE", "Admin", "Row", "admin_options", "confirm", "moment", "yes_option"]

ANONYMOUS: Final = "anonymous"
"""Name of a user who is not logged in."""


@dataclass(frozen=True, slots=True)
class Admin:
    """Broker and output format of an administration command."""

    server: Server
    output: str
    timeout_seconds: float

    def run(self, work: Callable[[FlyMqClient], Awaitable[int]]) -> int:
        """Connect, run `work`, and close. Raises `TimeoutError`."""

        async def connected() -> int:
            client = cast(FlyMqClient, await self.server.connect())
            try:
                async with suggesting(client):
                    return await work(client)
            finally:
                client.abandon()

        async def in_time() -> int:
            async with asyncio.timeout(self.timeout_seconds):
                return await connected()

        try:
            return asyncio.run(in_time())
        except TimeoutError:
            raise TimeoutError(f"the broker did not reply within {self.timeout_seconds:g} s") from None

    def show(self, rows: Sequence[Row], *, columns: Sequence[str]) -> int:
        """Print rows: the given columns in a table, all columns in other formats."""
        return show_rows(rows, self.output, columns=columns)

    def show_changed(self, row: Row, *, columns: Sequence[str]) -> int:
        """Print an entry that the command created or changed, unless quiet."""
        return 0 if self.server.quiet else self.show([row], columns=columns)

    async def show_visible(self, client: FlyMqClient, rows: Sequence[Row], what: str, *, columns: Sequence[str]) -> int:
        """Print a list. An empty one says so where rules may hide entries, and is an error for a user who is not logged in."""
        if not rows:
            status = await client.call("status")
            if status["access"] != "open" and status["principal"] == ANONYMOUS:
                denied = NotAuthorized(principal=ANONYMOUS, action="describe", resource=what)
                raise click.ClickException(f"no {what} is visible to {ANONYMOUS}: log in with --user or --api-key") from denied
            if status["access"] != "open":
                self.message(f"no {what} is visible to {status['principal']}")
        return self.show(rows, columns=columns)

    def message(self, text: str) -> None:
        """Print a message to stderr unless quiet."""
        if not self.server.quiet:
            click.echo(one_line(text), err=True)


def admin_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of administration commands; the command receives them as `admin`."""

    @flymq_options
    @click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format.")
    @click.option("--timeout", type=DURATION, default="10s", show_default=True, help="Longest wait for the broker.")
    @functools.wraps(command)
    def with_admin(*arguments: object, server: Server, output: str, timeout: int, **rest: object) -> int:
        return command(*arguments, admin=Admin(server, output, timeout / 1000), **rest)

    return with_admin


yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation. Without a terminal, --yes is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Give --yes to confirm without a prompt")
    click.confirm(question, abort=True, err=True)


class _Unit(click.ParamType[int]):
    """Parameter type: a number with a unit, as in the configuration."""

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
    """Parameter type: a date and time as Unix ms, in the local zone by default."""

    name = "DATETIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return int(datetime.fromisoformat(str(value)).timestamp() * 1000)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a date and time such as 2026-11-15T07:49 or 2026-11-15T07:49:00Z", param, ctx)


MOMENT: Final = _Moment()
