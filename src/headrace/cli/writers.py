"""`headrace writer` and `headrace stage`: exactly-once writers of a running broker, and what they have staged."""

from __future__ import annotations

import click

from headrace.cli.administration import Admin, confirm, admin_options, moment, yes_option
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import UnknownStage


@click.group()
def writer() -> None:
    """Manage exactly-once writers: list, forget."""


@writer.command("list")
@admin_options
def list_writers(admin: Admin) -> int:
    """List the writers that have published, with the last version of each."""

    async def work(client: FlyMqClient) -> int:
        rows = [{**row, "at": moment(row["at"])} for row in await client.call("writer.list")]
        return admin.show(rows, columns=("writer", "version", "at", "epoch", "is_publishing"))

    return admin.run(work)


@writer.command("forget")
@click.argument("name", metavar="WRITER")
@yes_option
@admin_options
def forget(name: str, yes: bool, admin: Admin) -> int:
    """Forget a writer: what it publishes next is published, even if it was before.

    What it has staged is dropped, and a publication that is under way in several appends is given up where it is.
    """
    confirm(f"Forget what {name} has published?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.call("writer.forget", writer=name)
        admin.tell(f"{name}: forgotten")
        return 0

    return admin.run(work)


@click.group()
def stage() -> None:
    """Manage what exactly-once writers have staged: list, drop."""


@stage.command("list")
@admin_options
def list_stages(admin: Admin) -> int:
    """List what waits to be published, by handle."""

    async def work(client: FlyMqClient) -> int:
        return admin.show(await client.call("stage.list"), columns=("handle", "writer", "records", "size_bytes", "age_ms", "is_sealed"))

    return admin.run(work)


@stage.command("drop")
@click.argument("handles", nargs=-1, required=True, metavar="HANDLE...")
@yes_option
@admin_options
def drop(handles: tuple[str, ...], yes: bool, admin: Admin) -> int:
    """Drop what was staged under these handles; its writer will have to stage it again."""
    confirm(f"Drop {len(handles)} stages?" if len(handles) > 1 else f"Drop stage {handles[0]}?", yes)

    async def work(client: FlyMqClient) -> int:
        dropped = (await client.call("stage.drop", handles=list(handles)))["dropped"]
        if not dropped:
            raise UnknownStage(handles[0])
        admin.tell(f"{dropped} dropped")
        return 0

    return admin.run(work)
