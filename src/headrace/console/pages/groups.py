"""Groups: members, assignment and lag, reset with a preview, deletion."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import Response

from headrace.console.charts import line_chart
from headrace.console.reading import parse_positions, parse_time
from headrace.console.text import moment
from headrace.console.visits import BadForm, Visit
from headrace.errors import HeadraceError, UnknownPartition


async def groups(visit: Visit) -> Response:
    names = await visit.call("group.list")
    wanted = visit.given("q").strip().lower()
    chosen = [name for name in names if wanted in name.lower()][:500]
    found = await asyncio.gather(*(visit.call("group.lag", group=name) for name in chosen), return_exceptions=True)
    rows = []
    for name, lags in zip(chosen, found, strict=True):
        if isinstance(lags, BaseException):
            continue  # deleted meanwhile
        rows.append(
            {
                "name": name,
                "topics": sorted({row["topic"] for row in lags}),
                "partitions": len(lags),
                "lag": sum(row["lag"] for row in lags),
                "moved_at": max((row["moved_at"] or 0 for row in lags), default=0),
            }
        )
    order = visit.given("sort", "name")
    rows.sort(key=(lambda row: -row["lag"]) if order == "-lag" else lambda row: row["name"])
    return visit.show("groups.html", rows=rows, total=len(names), q=visit.given("q"), sort=order, command=visit.command("group", "list"))


async def group(visit: Visit) -> Response:
    name = visit.given("name")
    lags = await visit.call("group.lag", group=name)
    members = await visit.call("group.members", group=name)
    samples = visit.login.account.samples
    chart = line_chart(samples.lag_of(name), "Lag", span_seconds=samples.span_seconds, now=time.time(), unit=" records")
    return visit.show(
        "group.html",
        name=name,
        lags=[{**row, "member": _owner(row, members)} for row in lags],
        members=members,
        mode=members[0]["mode"] if members else "",
        lag=sum(row["lag"] for row in lags),
        topics=sorted({row["topic"] for row in lags}),
        chart=chart,
        command=visit.command("group", "describe", name),
    )


def _owner(row: dict[str, Any], members: list[dict[str, Any]]) -> str:
    owners = [member for member in members if member["topic"] == row["topic"] and row["partition"] in member["partitions"]]
    if not owners:
        return ""
    return f"{owners[0]['protocol']} {owners[0]['address']}" if owners[0]["mode"] == "ordered" else "all"


async def reset(visit: Visit) -> Response:
    """Show what a reset would change, then do it."""
    name, topic, to, value = visit.given("name"), visit.given("topic"), visit.given("to", "earliest"), visit.given("value").strip()
    partition = visit.number("partition", -1) if visit.given("partition") else None
    lags = await visit.call("group.lag", group=name)
    rows = await _changes(visit, name, topic, to, value, partition) if topic else []
    words: list[object] = ["group", "reset", name, topic]
    words += [] if partition is None else ["--partition", partition]
    words += {"offset": ["--to-offset", value], "time": ["--to-datetime", moment(parse_time(value)) if to == "time" else ""]}.get(
        to, [f"--to-{to}"]
    )
    command = visit.command(*words)
    if visit.request.method == "POST":
        form = await visit.form()
        # What was previewed is done, not what the same words mean now.
        offsets = parse_positions(",".join(form.all("offset")))
        if not offsets:
            raise BadForm("nothing to reset")
        is_forced = bool(form["force"])
        command = visit.command(*words, *(["--force"] if is_forced else []), "--yes")
        work = visit.client.call("group.reset", group=name, topic=topic, offsets=offsets, force=is_forced)
        if await visit.act(f"Reset group {name} in {topic}", command, work):
            return visit.go("/group", name=name)
    return visit.show(
        "group_reset.html",
        name=name,
        topic=topic,
        topics=sorted({row["topic"] for row in lags}),
        to=to,
        value=value,
        partition="" if partition is None else partition,
        rows=rows,
        command=command,
    )


async def _changes(visit: Visit, name: str, topic: str, to: str, value: str, partition: int | None) -> list[dict[str, Any]]:
    client = visit.client
    bounds = await visit.ask(client.describe_topic(topic))
    if partition is not None and partition not in bounds:
        raise UnknownPartition(topic, partition)
    rows = []
    for number, held in bounds.items():
        if partition not in (None, number):
            continue
        before = await visit.ask(client.committed(topic, group=name, partition=number))
        if to == "time":
            after = await visit.ask(client.offset_for_time(topic, parse_time(value), partition=number))
        elif to == "offset":
            if not value.isascii() or not value.isdigit():
                raise BadForm(f"offset {value[:40]!r}: expected a number")
            after = min(max(int(value), held.first), held.end)
        else:
            after = held.first if to == "earliest" else held.end
        rows.append({"partition": number, "before": before, "after": after, "lag": held.end - after})
    return rows


async def delete(visit: Visit) -> Response:
    name = visit.given("name")
    lags = await visit.call("group.lag", group=name)
    error = ""
    command = visit.command("group", "delete", name, "--yes")
    if visit.request.method == "POST":
        form = await visit.form()
        if form["confirm"] == name:
            if await visit.act(f"Delete group {name}", command, visit.client.call("group.delete", group=name, force=False)):
                return visit.go("/groups")
            error = visit.login.notices.pop().text
        else:
            error = "The name does not match: nothing was deleted."
    count = len({row["topic"] for row in lags})
    return visit.show(
        "confirm.html",
        400 if error else 200,
        title="Delete a group",
        text=f"This deletes the group and its committed offsets. Topics that it reads: {count}. It fails while the group has members.",
        name=name,
        button="Delete group",
        action_path="/group/delete",
        action_query={"name": name},
        back_path="/group",
        back_query={"name": name},
        error=error,
        command=command,
    )


__all__ = ["HeadraceError", "delete", "group", "groups", "reset"]
