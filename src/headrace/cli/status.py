"""`headrace status`: the state of a broker on one screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import click

from headrace.cli import FAILED, one_line, terminal
from headrace.cli.administration import ANONYMOUS, DURATION, Admin
from headrace.cli.servers import Server, flymq_options
from headrace.cli.watching import size_text
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import NotAuthorized

_SHOWN_MAX: Final = 8
"""Groups and topics with dead letters on the screen. JSON has all of them."""
_PROMISES: Final = {
    "sync_per_append": ("a durable append is synced to disk", "a durable append is on all in-sync replicas or in memory"),
    "dense_offsets": ("offsets without gaps", "offsets with gaps"),
    "cheap_atomic_append": ("atomic batches over partitions", "batches atomic within a partition"),
    "forced_compaction": ("compaction by the broker", "compaction when the log likes"),
}
"""Capabilities of an engine that users notice, with and without."""
_LIVE: Final = ("starting", "running", "stopping")


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format.")
@click.option("--timeout", type=DURATION, default="10s", show_default=True, help="Longest wait for the broker.")
@flymq_options
def status(output: str, timeout: int, server: Server) -> int:
    """Show the state of a broker on one screen.

    Version, uptime, health, engine and its promises, disk, lag of the event loop, listeners, connections, topics, groups with the highest
    lag, dead letters, and the pipelines of this machine. A user sees the topics and groups that rules allow; engine, disk, lag of the event
    loop, listeners and connections need the right to describe the broker. Exits with 1 if writes fail until the broker is restarted.
    """
    found: dict[str, Any] = {}

    async def work(client: FlyMqClient) -> int:
        found.update(await client.call("status"))
        return 0

    Admin(server, output, timeout / 1000).run(work)
    if found["version"] is None:
        denied = NotAuthorized(principal=ANONYMOUS, action="describe", resource="the broker")
        raise click.ClickException(f"nothing is visible to {ANONYMOUS}: log in with --user or --api-key") from denied
    found["pipelines"] = _pipelines()
    if output == "json":
        terminal.echo(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        for title, text in _lines(found, str(server.address)):
            terminal.echo(f"{title:<14}{one_line(text)}")
    return FAILED if found["health"]["state"] == "failed" else 0


def _pipelines() -> list[dict[str, object]]:
    from headrace.spark.pipelines.executions import executions

    return [
        {"name": one["name"], "state": one["state"], "lag": max((q["lag"] for q in one["queries"] if q["lag"] is not None), default=None)}
        for one in executions()
        if one["state"] in _LIVE
    ]


def _lines(found: dict[str, Any], address: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of every line. Titles of continued lines are empty."""
    health, server, topics = found["health"], found["server"], found["topics"]
    yield "broker", f"headrace {found['version']} at {address}, up {_duration(found['uptime_ms'])}"
    yield "health", "; ".join([health["state"], *health["problems"]])
    yield "access", f"{found['access']}, you are {found['principal']}"
    if server is not None:
        yield from _server_lines(server)
    totals = f"{_counted(topics['records'], 'record')}, {size_text(topics['size_bytes'])}"
    yield "topics", f"{topics['count']:,} with {_counted(topics['partitions'], 'partition')}, {totals}"
    groups = [f"{row['group']} on {row['topic']}: lag {row['lag']:,}" for row in found["groups"]]
    yield from _listed("groups", groups, found["groups_count"])
    letters = [f"{row['topic']}: {row['waiting']:,}" for row in found["dead_letters"]]
    yield from _listed("dead letters", letters, len(letters))
    pipelines = [f"{one['name']}: {one['state']}" + ("" if one["lag"] is None else f", lag {one['lag']:,}") for one in found["pipelines"]]
    yield from _listed("pipelines", pipelines, len(pipelines))


def _server_lines(server: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "engine" in server:
        yield "engine", f"{server['engine']}, data in {server['data']}, process {server['pid']}"
    if capabilities := server.get("capabilities"):
        yield "promises", ", ".join(_promises(capabilities))
    if not server.get("is_coordinator", True):
        yield "coordinator", f"another broker, at {server.get('coordinator') or 'an unknown address'}"
    if disk := server.get("disk"):
        free, total, headroom = (size_text(disk[name]) for name in ("free_bytes", "total_bytes", "headroom_bytes"))
        yield "disk", f"{free} free of {total}; publishing stops below {headroom}"
    if lag := server.get("loop_lag"):
        p50, p99, longest = (f"{lag[name]:.3g} ms" for name in ("p50_ms", "p99_ms", "recent_max_ms"))
        turn = f"{server['loop_turns']['recent_max_ms']:.3g} ms"
        yield "loop lag", f"p50 {p50}, p99 {p99}, longest {longest} in the last minute; longest turn {turn} of CPU time"
    title = "listeners"
    for listener in server.get("listeners", []):
        encryption = f" ({listener['encryption']})" if listener["encryption"] else ""
        yield title, f"{listener['kind']} {listener['address']}: {', '.join(listener['protocols'])}{encryption}"
        title = ""
    if connections := server.get("connections"):
        by_protocol = ", ".join(f"{name} {count:,}" for name, count in connections["by_protocol"].items())
        yield "connections", f"{connections['open']:,} of {connections['max']:,}" + (f": {by_protocol}" if by_protocol else "")


def _promises(capabilities: dict[str, Any]) -> Iterator[str]:
    """Yield what the engine does, in words."""
    for name, (yes, no) in _PROMISES.items():
        if name in capabilities:
            yield yes if capabilities[name] else no
    if placement := capabilities.get("placement"):
        yield f"keys placed by {placement}"


def _listed(title: str, texts: list[str], count: int) -> Iterator[tuple[str, str]]:
    if not texts:
        yield title, "none"
    for number, text in enumerate(texts[:_SHOWN_MAX]):
        yield ("" if number else title), text
    if len(texts) > _SHOWN_MAX:
        yield "", f"… {count:,} in all; -o json lists them"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _duration(ms: int) -> str:
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
