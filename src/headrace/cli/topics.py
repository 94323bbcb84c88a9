"""`headrace topic`: topics of a running broker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from headrace.cli.administration import DURATION, SIZE, Admin, Row, admin_options, confirm, yes_option
from headrace.clients.flymq.client import FlyMqClient

_COLUMNS = ("name", "partitions", "records", "end")


@click.group()
def topic() -> None:
    """Manage topics: list, describe, create, alter, delete."""


def _shape_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of topic settings; the command receives those given as `config`."""

    @click.option("--ack", type=click.Choice(["durable", "written", "none"]), help="Guarantee of an acknowledgement.")
    @click.option("--cleanup", type=click.Choice(["delete", "compact"]), help="Cleanup policy of old records.")
    @click.option("--retention", "retention_ms", type=DURATION, help="Retention time; 0 is unlimited.")
    @click.option("--retention-size", "retention_bytes", type=SIZE, help="Retention size per partition; 0 is unlimited.")
    @click.option("--segment-size", "segment_bytes", type=SIZE, help="Size of a segment file.")
    @click.option("--ttl", "ttl_ms", type=DURATION, help="Time to live of records; 0 is unlimited.")
    @click.option("--dead-letter-expired/--drop-expired", "dead_letter_expired", default=None, help="Dead-letter expired records.")
    @click.option("--compress/--no-compress", "compress", default=None, help="Compress batches on disk.")
    @functools.wraps(command)
    def shaped(
        *arguments: object,
        ack: str | None,
        cleanup: str | None,
        retention_ms: int | None,
        retention_bytes: int | None,
        segment_bytes: int | None,
        ttl_ms: int | None,
        dead_letter_expired: bool | None,
        compress: bool | None,
        **rest: object,
    ) -> int:
        given = {
            "ack": ack,
            "cleanup": cleanup,
            "retention_ms": retention_ms,
            "retention_bytes": retention_bytes,
            "segment_bytes": segment_bytes,
            "ttl_ms": ttl_ms,
            "dead_letter_expired": dead_letter_expired,
            "compress": compress,
        }
        return command(*arguments, config={name: value for name, value in given.items() if value is not None}, **rest)

    return shaped


@topic.command("list")
@admin_options
def list_topics(admin: Admin) -> int:
    """List topics."""

    async def work(client: FlyMqClient) -> int:
        rows = [_row(found) for found in await client.call("topic.list")]
        return await admin.show_visible(client, rows, "topic", columns=_COLUMNS)

    return admin.run(work)


@topic.command("describe")
@click.argument("name")
@admin_options
def describe_topic(name: str, admin: Admin) -> int:
    """Show the partitions and the settings of a topic."""

    async def work(client: FlyMqClient) -> int:
        found = await client.call("topic.describe", topic=name)
        if admin.output != "table":
            return admin.show([found], columns=list(found))
        admin.show(
            [
                {"partition": number, "first": held["first"], "end": held["end"], "records": held["end"] - held["first"]}
                for number, held in enumerate(found["partitions"])
            ],
            columns=("partition", "first", "end", "records"),
        )
        click.echo()
        return admin.show([{"setting": key, "value": value} for key, value in found["config"].items()], columns=("setting", "value"))

    return admin.run(work)


@topic.command("create")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(min=1), default=1, show_default=True, help="Number of partitions.")
@_shape_options
@admin_options
def create_topic(name: str, partitions: int, config: dict[str, object], admin: Admin) -> int:
    """Create a topic. Fails if it exists."""

    async def work(client: FlyMqClient) -> int:
        made = await client.call("topic.create", topic=name, partitions=partitions, config=config)
        return admin.show_changed(_row(made), columns=_COLUMNS)

    return admin.run(work)


@topic.command("alter")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(min=1), help="New number of partitions; cannot decrease.")
@_shape_options
@admin_options
def alter_topic(name: str, partitions: int | None, config: dict[str, object], admin: Admin) -> int:
    """Add partitions to a topic or change its settings. Other settings stay."""
    if partitions is None and not config:
        raise click.UsageError("nothing to alter: give --partitions or a setting")

    async def work(client: FlyMqClient) -> int:
        altered = await client.call("topic.alter", topic=name, partitions=partitions, config=config)
        return admin.show_changed(_row(altered), columns=_COLUMNS)

    return admin.run(work)


@topic.command("delete")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@yes_option
@admin_options
def delete_topics(names: Sequence[str], yes: bool, admin: Admin) -> int:
    """Delete topics with their records and committed offsets."""
    confirm(f"Delete {', '.join(names)} and all their records?", yes)

    async def work(client: FlyMqClient) -> int:
        for name in names:
            await client.call("topic.delete", topic=name)
            admin.message(f"{name}: deleted")
        return 0

    return admin.run(work)


def _row(found: dict[str, Any]) -> Row:
    partitions = found["partitions"]
    return {
        "name": found["name"],
        "partitions": len(partitions),
        "records": sum(held["end"] - held["first"] for held in partitions),
        "end": sum(held["end"] for held in partitions),
        "config": found["config"],
    }
