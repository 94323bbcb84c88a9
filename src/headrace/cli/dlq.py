"""`headrace dlq`: dead letters of a running broker."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

import click

from headrace.cli.administration import Admin, Row, admin_options, confirm, moment, yes_option
from headrace.clients.flymq.advanced import DeadLetter
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import UnknownMessage

_PAGE: Final = 500


@click.group()
def dlq() -> None:
    """Manage dead letters: list, fetch, replay, discard, purge."""


@dlq.command("list")
@admin_options
def list_dead_letters(admin: Admin) -> int:
    """List topics with their number of dead letters."""

    async def work(client: FlyMqClient) -> int:
        return await admin.show_visible(client, await client.call("dlq.list"), "dead letter", columns=("topic", "waiting"))

    return admin.run(work)


@dlq.command("fetch")
@click.argument("topic")
@click.option("-n", "--count", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this number.")
@click.option("--after", metavar="ID", default="", help="Show dead letters after this one.")
@click.option("--replayed", is_flag=True, help="Include replayed dead letters.")
@admin_options
def fetch(topic: str, count: int, after: str, replayed: bool, admin: Admin) -> int:
    """Show the dead letters of a topic, oldest first."""

    async def work(client: FlyMqClient) -> int:
        rows: list[Row] = []
        last = after
        while len(rows) < count:
            page = await client.dead_letters(topic, records_max=min(_PAGE, count - len(rows)), after=last, replayed=replayed)
            if not page:
                break
            rows += [_row(letter) for letter in page]
            last = page[-1].id
        return admin.show(rows, columns=("id", "reason", "attempts", "source_partition", "source_offset", "last_failure", "key", "value"))

    return admin.run(work)


@dlq.command("replay")
@click.argument("topic")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Replay all dead letters.")
@yes_option
@admin_options
def replay(topic: str, ids: Sequence[str], everything: bool, yes: bool, admin: Admin) -> int:
    """Publish dead letters to their topic again with their keys and headers."""
    if bool(ids) == everything:
        raise click.UsageError("give the ids of dead letters, or --all")
    if everything:
        confirm(f"Replay all dead letters of {topic}?", yes)

    async def work(client: FlyMqClient) -> int:
        rows: list[Row] = []
        wanted = await _waiting(client, topic) if everything else list(ids)
        for start in range(0, len(wanted), _PAGE):
            placements = await client.call("dlq.replay", topic=topic, ids=wanted[start : start + _PAGE])
            rows += [{"id": id, "topic": topic, "partition": place[0], "offset": place[1]} for id, place in placements.items()]
        return admin.show(rows, columns=("id", "topic", "partition", "offset"))

    return admin.run(work)


@dlq.command("discard")
@click.argument("topic")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@yes_option
@admin_options
def discard(topic: str, ids: Sequence[str], yes: bool, admin: Admin) -> int:
    """Mark dead letters as done without publishing them. They stay in the topic of dead letters until its retention removes them."""
    confirm(f"Discard {len(ids)} dead letters of {topic}?", yes)

    async def work(client: FlyMqClient) -> int:
        for start in range(0, len(ids), _PAGE):
            await client.call("dlq.discard", topic=topic, ids=list(ids[start : start + _PAGE]))
        admin.message(f"{topic}: {len(ids)} discarded")
        return 0

    return admin.run(work)


@dlq.command("purge")
@click.argument("topic")
@yes_option
@admin_options
def purge(topic: str, yes: bool, admin: Admin) -> int:
    """Delete all dead letters of a topic."""
    confirm(f"Delete all dead letters of {topic}?", yes)

    async def work(client: FlyMqClient) -> int:
        if topic not in {row["topic"] for row in await client.call("dlq.list")}:
            raise UnknownMessage(f"topic {topic} has no dead letters")
        await client.purge_dead_letters(topic)
        admin.message(f"{topic}: dead letters deleted")
        return 0

    return admin.run(work)


async def _waiting(client: FlyMqClient, topic: str) -> list[str]:
    ids: list[str] = []
    while page := await client.dead_letters(topic, records_max=_PAGE, after=ids[-1] if ids else ""):
        ids += [letter.id for letter in page]
    return ids


def _row(letter: DeadLetter) -> Row:
    return {
        "id": letter.id,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "source_partition": letter.source_partition,
        "source_offset": letter.source_offset,
        "first_failure": moment(letter.first_failure) if letter.first_failure else None,
        "last_failure": moment(letter.last_failure) if letter.last_failure else None,
        "replayed": letter.replayed_at is not None,
        "key": None if letter.key is None else _text(letter.key),
        "value": _text(letter.value),
        "headers": {name: _text(value) for name, value in letter.headers},
    }


def _text(content: bytes) -> str:
    """Return text, or base64 with a prefix."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(content).decode()}"
