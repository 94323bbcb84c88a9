"""`headrace delayed`: records that a running broker is to publish later."""

from __future__ import annotations

import time

import click

from headrace.cli.administration import DURATION, MOMENT, Admin, confirm, admin_options, moment, yes_option
from headrace.clients.flymq.client import FlyMqClient
from headrace.limits import DELAYED_LIST_MAX


@click.group()
def delayed() -> None:
    """Manage delayed messages: list, publish, cancel."""


@delayed.command("list")
@click.argument("topic", required=False)
@click.option("--limit", type=click.IntRange(1, DELAYED_LIST_MAX), default=1_000, show_default=True, help="At most so many.")
@admin_options
def list_delayed(topic: str | None, limit: int, admin: Admin) -> int:
    """List what waits to be published, in one topic or in all, the next one first."""

    async def work(client: FlyMqClient) -> int:
        rows = [{**row, "due": moment(row["due"])} for row in await client.call("delayed.list", topic=topic, limit=limit)]
        return admin.show(rows, columns=("id", "topic", "due", "key", "size", "owner"))

    return admin.run(work)


@delayed.command("publish")
@click.argument("topic")
@click.argument("message")
@click.option("--in", "delay_ms", type=DURATION, help="After so long.")
@click.option("--at", "at", type=MOMENT, help="At a date and time.")
@click.option("--key", help="The key of the record.")
@click.option("--partition", type=click.IntRange(min=0), help="The partition; without it the key decides, or the broker.")
@admin_options
def publish(topic: str, message: str, delay_ms: int | None, at: int | None, key: str | None, partition: int | None, admin: Admin) -> int:
    """Publish a record later. Prints the id by which it can be cancelled."""
    if (delay_ms is None) == (at is None):
        raise click.UsageError("say when: either --in or --at")

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
@click.option("--topic", default="", help="Only if it is meant for this topic.")
@yes_option
@admin_options
def cancel(id: str, topic: str, yes: bool, admin: Admin) -> int:
    """Cancel a delayed message: it will never be published."""
    confirm(f"Cancel delayed message {id}?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.cancel_delayed(id, topic=topic)
        admin.tell(f"{id}: cancelled")
        return 0

    return admin.run(work)
