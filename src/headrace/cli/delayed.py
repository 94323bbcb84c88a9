"""`headrace delayed`: delayed messages of a running broker."""

from __future__ import annotations

import time

import click

from headrace.cli.administration import DURATION, MOMENT, Admin, admin_options, confirm, moment, yes_option
from headrace.clients.flymq.client import FlyMqClient
from headrace.limits import DELAYED_LIST_MAX


@click.group()
def delayed() -> None:
    """Manage delayed messages: list, publish, cancel."""


@delayed.command("list")
@click.argument("topic", required=False)
@click.option("--limit", type=click.IntRange(1, DELAYED_LIST_MAX), default=1_000, show_default=True, help="Show at most this number.")
@admin_options
def list_delayed(topic: str | None, limit: int, admin: Admin) -> int:
    """List delayed messages of one topic or of all, the next one first."""

    async def work(client: FlyMqClient) -> int:
        rows = [{**row, "due": moment(row["due"])} for row in await client.call("delayed.list", topic=topic, limit=limit)]
        return admin.show(rows, columns=("id", "topic", "due", "key", "size", "owner"))

    return admin.run(work)


@delayed.command("publish")
@click.argument("topic")
@click.argument("message")
@click.option("--in", "delay_ms", type=DURATION, help="Delay.")
@click.option("--at", "at", type=MOMENT, help="Date and time of publication, in the local zone unless it ends with Z or +HH:MM.")
@click.option("--key", help="Key of the record.")
@click.option("--partition", type=click.IntRange(min=0), help="Partition; default: by the key, or chosen by the broker.")
@admin_options
def publish(topic: str, message: str, delay_ms: int | None, at: int | None, key: str | None, partition: int | None, admin: Admin) -> int:
    """Publish a record later. Prints its id, which `cancel` accepts."""
    if (delay_ms is None) == (at is None):
        raise click.UsageError("give either --in or --at")

    async def work(client: FlyMqClient) -> int:
        delay = delay_ms if at is None else at - int(time.time() * 1000)
        receipt = await client.publish_delayed(
            topic,
            message.encode("utf-8", "surrogateescape"),
            delay_ms=delay or 0,
            key=None if key is None else key.encode("utf-8", "surrogateescape"),
            partition=partition,
        )
        return admin.show([{"id": receipt.id, "topic": topic, "due": moment(receipt.deliver_at)}], columns=("id", "topic", "due"))

    return admin.run(work)


@delayed.command("cancel")
@click.argument("id")
@click.option("--topic", default="", help="Only if the message is for this topic.")
@yes_option
@admin_options
def cancel(id: str, topic: str, yes: bool, admin: Admin) -> int:
    """Cancel a delayed message. The broker never publishes it."""
    confirm(f"Cancel delayed message {id}?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.cancel_delayed(id, topic=topic)
        admin.message(f"{id}: cancelled")
        return 0

    return admin.run(work)
