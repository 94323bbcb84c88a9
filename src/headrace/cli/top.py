"""`headrace top`: the overview of a broker as a live screen, from the same source as the console."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import click
import msgspec

from headrace.cli import FAILED, one_line, terminal
from headrace.cli.administration import ANONYMOUS, DURATION
from headrace.cli.servers import Server, flymq_options
from headrace.cli.watching import size_text
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import HeadraceError, NotAuthorized
from headrace.overview import Overview, Rates, rates, total

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_GROUPS_MAX: Final = 10
"""Groups on the screen: those with the highest lag."""
_QUIT: Final = ("q", "Q", "\x03", "\x04")


@click.command()
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two readings.")
@click.option("--once", is_flag=True, help="Print one screen and exit. Rates are those of one interval.")
@click.option("--json", "as_json", is_flag=True, help="Print each reading as one line of JSON, with the rates.")
@flymq_options
def top(interval: int, once: bool, as_json: bool, server: Server) -> int:
    """Show a broker as a live screen.

    Records and bytes in and out, connections by protocol, groups with the highest lag, dead letters, disk, lag of the event loop, and
    warnings with the next step. Rates are differences of the broker's counters between two readings. q or Ctrl-C quits. If the broker
    does not answer, the screen says so and continues when it is back. A user sees what rules allow, as with `headrace status`.

    Exits with 1 if `--once` finds that writes fail until the broker is restarted.
    """
    seconds = max(interval, 100) / 1000
    if once or as_json or not sys.stdout.isatty():
        return asyncio.run(_print_readings(server, seconds, once=once or not as_json, as_json=as_json))
    return asyncio.run(_live(server, seconds))


class _Readings:
    """Readings of one broker. Connects again after a failure."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: FlyMqClient | None = None
        self.before: Overview | None = None
        self.now: Overview | None = None

    async def take(self) -> Overview:
        """Raises the errors of the client, and `click.ClickException` for a user to whom nothing is visible."""
        try:
            if self._client is None:
                self._client = cast(FlyMqClient, await self._server.connect())
            found = msgspec.convert(await self._client.call("status"), Overview)
        except (HeadraceError, OSError):
            self.close()
            raise
        if found.version is None:
            denied = NotAuthorized(principal=ANONYMOUS, action="describe", resource="the broker")
            raise click.ClickException(f"nothing is visible to {ANONYMOUS}: log in with --user or --api-key") from denied
        self.before, self.now = self.now, found
        return found

    @property
    def rates(self) -> dict[str, Rates] | None:
        return None if self.before is None or self.now is None else rates(self.before, self.now)

    def close(self) -> None:
        if self._client is not None:
            self._client.abandon()
            self._client = None


async def _print_readings(server: Server, seconds: float, *, once: bool, as_json: bool) -> int:
    readings = _Readings(server)
    try:
        await readings.take()
        while True:
            await asyncio.sleep(seconds)
            found = await readings.take()
            if as_json:
                shown = {**msgspec.to_builtins(found), "rates": msgspec.to_builtins(readings.rates)}
                terminal.echo(json.dumps(shown, ensure_ascii=False))
            else:
                from rich.console import Console

                Console(highlight=False).print(screen(found, readings.rates, str(server.address)))
            if once:
                return FAILED if found.health.state == "failed" else 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    finally:
        readings.close()


async def _live(server: Server, seconds: float) -> int:
    from rich.console import Console
    from rich.live import Live

    readings, stop, loop = _Readings(server), asyncio.Event(), asyncio.get_running_loop()
    await readings.take()  # a broker that is not there is an error, not a screen
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        with _keys(loop, stop), Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            failure = ""
            while not stop.is_set():
                assert readings.now is not None
                live.update(screen(readings.now, readings.rates, str(server.address), failure), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), seconds if readings.before is not None else min(seconds, 0.5))
                    break
                try:
                    await asyncio.wait_for(readings.take(), max(seconds, 5.0))
                    failure = ""
                except (HeadraceError, OSError, TimeoutError) as error:
                    readings.close()
                    failure = f"no answer: {str(error) or 'it takes too long'}"
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        readings.close()
    return 0


@contextlib.contextmanager
def _keys(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` when the user types q. Typed characters are not echoed."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def typed() -> None:
        if sys.stdin.read(1) in (*_QUIT, ""):
            stop.set()

    tty.setcbreak(sys.stdin)
    loop.add_reader(sys.stdin, typed)
    try:
        yield
    finally:
        loop.remove_reader(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def screen(found: Overview, per_second: dict[str, Rates] | None, address: str, failure: str = "") -> Group:
    """Return the overview for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(_safe(line)) for line in _facts(found, address)]
    if failure:
        parts.append(Text(_safe(failure), style="bold red"))
    parts += [Text(""), _traffic(found, per_second)]
    if found.groups:
        parts += [Text(""), _lags(found)]
    parts.append(Text(""))
    for warning in found.warnings:
        parts.append(Text(_safe(f"! {warning.text}: {warning.advice}"), style="yellow"))
    if not found.warnings:
        parts.append(Text("no warnings", style="green"))
    return Group(*parts)


def _facts(found: Overview, address: str) -> Iterator[str]:
    minutes = (found.uptime_ms or 0) // 60_000
    uptime = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    yield f"headrace {found.version} at {address}, up {uptime}, health {found.health.state}, you are {found.principal}"
    topics = found.topics
    yield f"{topics.count:,} topics, {topics.partitions:,} partitions, {topics.records:,} records, {size_text(topics.size_bytes)}"
    letters = sum(row.waiting for row in found.dead_letters)
    yield f"lag {found.lag:,} in {found.groups_count:,} groups, {letters:,} dead letters, {found.delayed:,} delayed"
    if found.server is None:
        return
    disk, activity, lag = found.server.disk, found.server.activity, found.server.loop_lag
    free, size, headroom = size_text(disk.free_bytes), size_text(disk.total_bytes), size_text(disk.headroom_bytes)
    yield f"disk {free} free of {size}; publishing stops below {headroom}"
    connections = found.server.connections
    yield (
        f"{connections.open:,} of {connections.max:,} connections, {activity.flight_calls} Flight calls, "
        f"memory {size_text(activity.memory_bytes)}, {activity.open_files:,} open files"
    )
    sync_ms = 1000 * activity.sync_seconds / activity.syncs_total if activity.syncs_total else 0.0
    yield f"loop lag p99 {lag.p99_ms:.3g} ms, longest {lag.recent_max_ms:.3g} ms in the last minute; sync {sync_ms:.3g} ms on average"


def _traffic(found: Overview, per_second: dict[str, Rates] | None) -> Table:
    table = _table("protocol", "connections", "in/s", "in B/s", "out/s", "out B/s", "in", "out")
    open_now = {} if found.server is None else found.server.connections.by_protocol
    rows = [("all", total(found.traffic)), *((name, found.traffic.get(name)) for name in sorted({*found.traffic, *open_now}))]
    for name, traffic in rows:
        rate = None if per_second is None else per_second.get(name)
        count = str(sum(open_now.values()) if name == "all" else open_now.get(name, 0)) if found.server is not None else "-"
        cells = ["-"] * 4
        if rate is not None:
            cells = [f"{rate.published_records:,.0f}", size_text(round(rate.published_bytes)), f"{rate.delivered_records:,.0f}"]
            cells.append(size_text(round(rate.delivered_bytes)))
        records = ("0", "0") if traffic is None else (f"{traffic.published_records:,}", f"{traffic.delivered_records:,}")
        table.add_row(_cell(name), count, *cells, *records)
    return table


def _lags(found: Overview) -> Table:
    table = _table("group", "topic", "lag")
    for row in found.groups[:_GROUPS_MAX]:
        table.add_row(_cell(row.group), _cell(row.topic), f"{row.lag:,}")
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        is_name = title in ("protocol", "group", "topic")
        table.add_column(title, justify="left" if is_name else "right", overflow="ellipsis", no_wrap=True)
    return table


def _cell(name: str) -> Text:
    """Return a name without markup: names are chosen by clients."""
    from rich.text import Text

    return Text(_safe(name))


def _safe(text: str) -> str:
    return terminal.neutral(one_line(text))
