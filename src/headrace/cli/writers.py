"""`headrace writer` and `headrace stage`: exactly-once writers of a running broker and their staged records."""

from __future__ import annotations

import click

from headrace.cli.administration import Admin, admin_options, confirm, moment, yes_option
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import UnknownStage


@click.group()
def writer() -> None:
    """Manage exactly-once writers: list, forget."""


@writer.command("list")
@admin_options
def list_writers(admin: Admin) -> int:
    """List writers with the last published version of each."""

    async def work(client: FlyMqClient) -> int:
        rows = [{**row, "at": moment(row["at"])} for row in await client.call("writer.list")]
        return admin.show(rows, columns=("writer", "version", "at", "epoch", "is_publishing"))

    return admin.run(work)


@writer.command("forget")
@click.argument("name", metavar="WRITER")
@yes_option
@admin_options
def forget(name: str, yes: bool, admin: Admin) -> int:
    """Forget the version of a writer: its next publication is never taken for a repeated one.

    Drops its staged records and aborts an incomplete publication.
    """
    confirm(f"Forget the published version of {name}?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.call("writer.forget", writer=name)
        admin.message(f"{name}: forgotten")
        return 0

    return admin.run(work)


@click.group()
def stage() -> None:
    """Manage staged records of exactly-once writers: list, drop."""


@stage.command("list")
@admin_options
def list_stages(admin: Admin) -> int:
    """List staged records by handle."""

    async def work(client: FlyMqClient) -> int:
        return admin.show(await client.call("stage.list"), columns=("handle", "writer", "records", "size_bytes", "age_ms", "is_sealed"))

    return admin.run(work)


@stage.command("drop")
@click.argument("handles", nargs=-1, required=True, metavar="HANDLE...")
@yes_option
@admin_options
def drop(handles: tuple[str, ...], yes: bool, admin: Admin) -> int:
    """Drop the staged records of these handles. The writer has to stage them again."""
    confirm(f"Drop {len(handles)} stages?" if len(handles) > 1 else f"Drop stage {handles[0]}?", yes)

    async def work(client: FlyMqClient) -> int:
        dropped = (await client.call("stage.drop", handles=list(handles)))["dropped"]
        if not dropped:
            raise UnknownStage(handles[0])
        admin.message(f"{dropped} dropped")
        return 0

    return admin.run(work)
