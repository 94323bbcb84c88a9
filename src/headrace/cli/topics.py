"""`headrace topic`: topics of a running broker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from headrace.cli.administration import DURATION, SIZE, Admin, Row, confirm, admin_options, yes_option
from headrace.clients.flymq.client import FlyMqClient

_COLUMNS = ("name", "partitions", "records", "end")


@click.group()
def topic() -> None:
    """Manage topics: list, describe, create, alter, delete."""


def _shape_options(command: Callable[..., int]) -> Callable[..., int]:
    """What a topic may be told; what is not said stays, or takes the broker's default. The command gets it as `config`."""

    @click.option("--ack", type=click.Choice(["durable", "written", "none"]), help="What an acknowledgement promises.")
    @click.option("--cleanup", type=click.Choice(["delete", "compact"]), help="What happens to old records.")
    @click.option("--retention", "retention_ms", type=DURATION, help="How long records are kept; 0 for ever.")
    @click.option("--retention-size", "retention_bytes", type=SIZE, help="How much a partition keeps; 0 without bound.")
    @click.option("--segment-size", "segment_bytes", type=SIZE, help="When a new segment file is begun.")
    @click.option("--ttl", "ttl_ms", type=DURATION, help="Records expire so long after they were written; 0 never.")
    @click.option("--dead-letter-expired/--drop-expired", "dead_letter_expired", default=None, help="Whether expired records are kept.")
    @click.option("--compress/--no-compress", "compress", default=None, help="Whether batches are compressed on disk.")
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
        said = {
            "ack": ack,
            "cleanup": cleanup,
            "retention_ms": retention_ms,
            "retention_bytes": retention_bytes,
            "segment_bytes": segment_bytes,
            "ttl_ms": ttl_ms,
            "dead_letter_expired": dead_letter_expired,
            "compress": compress,
        }
        return command(*arguments, config={name: value for name, value in said.items() if value is not None}, **rest)

    return shaped


@topic.command("list")
@admin_options
def list_topics(admin: Admin) -> int:
    """List topics."""

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(found) for found in await client.call("topic.list")], columns=_COLUMNS)

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
@click.option("--partitions", type=click.IntRange(min=1), default=1, show_default=True, help="How many partitions it has.")
@_shape_options
@admin_options
def create_topic(name: str, partitions: int, config: dict[str, object], admin: Admin) -> int:
    """Create a topic. It is an error if there is one."""

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(await client.call("topic.create", topic=name, partitions=partitions, config=config))], columns=_COLUMNS)

    return admin.run(work)


@topic.command("alter")
@click.argument("name")
@click.option("--partitions", type=click.IntRange(min=1), help="How many partitions it has from now on: never fewer than before.")
@_shape_options
@admin_options
def alter_topic(name: str, partitions: int | None, config: dict[str, object], admin: Admin) -> int:
    """Add partitions to a topic, or change its settings. What is not named stays."""
    if partitions is None and not config:
        raise click.UsageError("nothing to alter: name a setting")

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(await client.call("topic.alter", topic=name, partitions=partitions, config=config))], columns=_COLUMNS)

    return admin.run(work)


@topic.command("delete")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@yes_option
@admin_options
def delete_topics(names: Sequence[str], yes: bool, admin: Admin) -> int:
    """Delete topics with all their records, and what groups have committed in them."""
    confirm(f"Delete {', '.join(names)} and all their records?", yes)

    async def work(client: FlyMqClient) -> int:
        for name in names:
            await client.call("topic.delete", topic=name)
            admin.tell(f"{name}: deleted")
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
