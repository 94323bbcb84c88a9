"""`headrace group`: members and progress of groups in the topics of a running broker, and moving them."""

from __future__ import annotations

import json
from typing import Any

import click

from headrace.cli import terminal
from headrace.cli.administration import MOMENT, Admin, Row, admin_options, confirm, moment, yes_option
from headrace.clients.errors import UnknownGroup
from headrace.clients.flymq.client import FlyMqClient


@click.group()
def group() -> None:
    """Manage groups: list, describe, lag, reset, delete."""


@group.command("list")
@admin_options
def list_groups(admin: Admin) -> int:
    """List groups with their topics and their lag."""

    async def work(client: FlyMqClient) -> int:
        rows: list[Row] = []
        for name in await client.call("group.list"):
            rows += await _by_topic(client, name)
        return admin.show(rows, columns=("group", "topic", "partitions", "lag"))

    return admin.run(work)


@group.command("describe")
@click.argument("name", metavar="GROUP")
@admin_options
def describe_group(name: str, admin: Admin) -> int:
    """Show the mode and the members of a group, and its lag by partition.

    JSON has one object with mode, members and partitions. CSV and JSON Lines have the partitions.
    """

    async def work(client: FlyMqClient) -> int:
        lags = await client.call("group.lag", group=name)
        members = await client.call("group.members", group=name)
        partitions = [_partition_row(name, row, members) for row in lags]
        mode = members[0]["mode"] if members else None
        moved = max((row["last_movement"] or "" for row in partitions), default="") or None
        if admin.output == "json":
            described = {"group": name, "mode": mode, "last_movement": moved, "members": members, "partitions": partitions}
            terminal.echo(json.dumps(described, ensure_ascii=False, indent=2))
            return 0
        if admin.output == "table":
            count = f"{len(members)} {'member' if len(members) == 1 else 'members'}"
            terminal.echo(f"{name}: {mode or 'idle'}, {count}, last movement {moved or 'never'}")
            if members:
                admin.show([_member_row(member) for member in members], columns=_MEMBER_COLUMNS)
                terminal.echo("")
        return admin.show(partitions, columns=("topic", "partition", "member", "committed", "end", "lag", "last_movement"))

    return admin.run(work)


_MEMBER_COLUMNS = ("topic", "protocol", "user", "address", "partitions", "unsettled", "credit", "state")


def _member_row(member: Row) -> Row:
    partitions = member["partitions"]
    assert isinstance(partitions, list)
    shown = "all" if member["mode"] == "shared" else ",".join(map(str, partitions)) or "none"
    return {**member, "partitions": shown, "state": "stalled" if member["is_stalled"] else "active"}


def _partition_row(group: str, row: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a partition with its member, if the group is ordered, and the time of the last commit."""
    owners = [member for member in members if member["topic"] == row["topic"] and row["partition"] in member["partitions"]]
    owner = f"{owners[0]['protocol']} {owners[0]['address']}" if owners and owners[0]["mode"] == "ordered" else None
    moved_at = row.pop("moved_at")
    return {"group": group, **row, "member": owner, "last_movement": None if moved_at is None else moment(moved_at)}


@group.command("lag")
@click.argument("name", metavar="GROUP")
@click.option("--topic", help="Only this topic.")
@admin_options
def lag(name: str, topic: str | None, admin: Admin) -> int:
    """Show how many records a group has not read, by topic."""

    async def work(client: FlyMqClient) -> int:
        rows = [row for row in await _by_topic(client, name) if topic in (None, row["topic"])]
        if not rows:
            raise UnknownGroup(f"consumer group not found: {topic}:{name}")
        return admin.show(rows, columns=("topic", "partitions", "lag"))

    return admin.run(work)


@group.command("reset")
@click.argument("name", metavar="GROUP")
@click.argument("topic")
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option("--to-offset", type=click.IntRange(min=0), help="Move to this offset.")
@click.option("--to-datetime", type=MOMENT, help="Move to the first record at or after a date and time.")
@click.option("--to-earliest", is_flag=True, help="Move to the first record.")
@click.option("--to-latest", is_flag=True, help="Move to the end: only new records.")
@click.option("--dry-run", is_flag=True, help="Show the changes without making them.")
@click.option("--force", is_flag=True, help="Move the group even if it has active members. They continue at the new offsets.")
@yes_option
@admin_options
def reset(
    name: str,
    topic: str,
    partition: int | None,
    to_offset: int | None,
    to_datetime: int | None,
    to_earliest: bool,
    to_latest: bool,
    dry_run: bool,
    force: bool,
    yes: bool,
    admin: Admin,
) -> int:
    """Set the committed offsets of a group in a topic. Fails while the group has active members in it."""
    chosen = [to_offset is not None, to_datetime is not None, to_earliest, to_latest]
    if sum(chosen) != 1:
        raise click.UsageError("give one of --to-offset, --to-datetime, --to-earliest, --to-latest")
    where = f"offset {to_offset}" if to_offset is not None else moment(to_datetime) if to_datetime is not None else ""
    where = where or ("the earliest record" if to_earliest else "the end")
    if not dry_run:
        confirm(f"Move group {name} in topic {topic} to {where}?", yes)

    async def target(client: FlyMqClient, number: int, first: int, end: int) -> int:
        if to_datetime is not None:
            return await client.offset_for_time(topic, to_datetime, partition=number)
        if to_offset is not None:
            return min(max(to_offset, first), end)
        return first if to_earliest else end

    async def work(client: FlyMqClient) -> int:
        bounds = await client.describe_topic(topic)
        if partition is not None and partition not in bounds:
            raise click.UsageError(f"topic {topic} has no partition {partition}")
        rows: list[Row] = []
        for number, held in bounds.items():
            if partition not in (None, number):
                continue
            before = await client.committed(topic, group=name, partition=number)
            after = await target(client, number, held.first, held.end)
            rows.append({"group": name, "topic": topic, "partition": number, "before": before, "after": after})
        if not dry_run:
            offsets = {str(row["partition"]): row["after"] for row in rows}
            await client.call("group.reset", group=name, topic=topic, offsets=offsets, force=force)
        return admin.show(rows, columns=("topic", "partition", "before", "after"))

    return admin.run(work)


@group.command("delete")
@click.argument("name", metavar="GROUP")
@click.option("--force", is_flag=True, help="Delete the group even if it has active members. They are disconnected from it.")
@yes_option
@admin_options
def delete_group(name: str, force: bool, yes: bool, admin: Admin) -> int:
    """Delete a group and its committed offsets. Fails while the group has active members."""
    confirm(f"Delete group {name} and its offsets in all topics?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.call("group.delete", group=name, force=force)
        admin.message(f"{name}: deleted")
        return 0

    return admin.run(work)


async def _by_topic(client: FlyMqClient, name: str) -> list[Row]:
    totals: dict[str, dict[str, Any]] = {}
    for row in await client.call("group.lag", group=name):
        total = totals.setdefault(row["topic"], {"group": name, "topic": row["topic"], "partitions": 0, "lag": 0})
        total["partitions"] += 1
        total["lag"] += row["lag"]
    return list(totals.values())
