"""`headrace schema`: schema registry of a running broker and the requirements of topics."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, BinaryIO, Final

import click

from headrace.cli import CONFLICT, terminal
from headrace.cli.administration import Admin, admin_options, confirm, moment, yes_option
from headrace.clients.flymq.client import FlyMqClient

_COLUMNS = ("name", "version", "type", "compatibility", "created")
_TYPES: Final = ("json", "avro", "protobuf")
_MODES: Final = ("none", "backward", "forward", "full")
_BY_SUFFIX: Final = {".json": "json", ".avsc": "avro", ".proto": "protobuf", ".desc": "protobuf", ".binpb": "protobuf"}

_type_option = click.option("--type", type=click.Choice(_TYPES), help="Schema language; default: by the file's suffix.")
_mode_option = click.option("--compatibility", type=click.Choice(_MODES), help="Mode for further versions; initially backward.")
_version_option = click.option("--version", type=click.IntRange(min=0), default=0, help="Schema version; default: the latest.")


@click.group()
def schema() -> None:
    """Manage schemas: list, describe, register, check, delete."""


def _language(type: str | None, file: BinaryIO) -> str:
    found = type or _BY_SUFFIX.get(PurePath(str(getattr(file, "name", ""))).suffix)
    if found is None:
        raise click.UsageError("the schema language is unknown from the file's suffix: give --type")
    return found


def _row(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "created": moment(found["created"])}


@schema.command("list")
@admin_options
def list_schemas(admin: Admin) -> int:
    """List schemas, each with its latest version."""

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(found) for found in await client.call("schema.list")], columns=_COLUMNS)

    return admin.run(work)


@schema.command("describe")
@click.argument("name")
@_version_option
@admin_options
def describe_schema(name: str, version: int, admin: Admin) -> int:
    """Show the versions, requiring topics and definition of a schema."""

    async def work(client: FlyMqClient) -> int:
        found = _row(await client.call("schema.describe", name=name, version=version))
        if admin.output != "table":
            return admin.show([found], columns=list(found))
        definition = found.pop("definition", None)
        binary = found.pop("binary", None)
        admin.show([found], columns=(*_COLUMNS, "versions", "topics"))
        click.echo()
        terminal.echo(definition if definition is not None else f"(binary, in base64) {binary}")
        return 0

    return admin.run(work)


@schema.command("register")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@_type_option
@_mode_option
@admin_options
def register_schema(name: str, file: BinaryIO, type: str | None, compatibility: str | None, admin: Admin) -> int:
    """Register the definition in FILE as the next version of a schema. - is standard input."""
    language, definition = _language(type, file), file.read()

    async def work(client: FlyMqClient) -> int:
        version = await client.register_schema(name, language, definition, compatibility=compatibility or "")
        return admin.show_changed(_row(await client.call("schema.describe", name=name, version=version)), columns=_COLUMNS)

    return admin.run(work)


@schema.command("check")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@_type_option
@_mode_option
@admin_options
def check_schema(name: str, file: BinaryIO, type: str | None, compatibility: str | None, admin: Admin) -> int:
    """Check whether FILE could be the next version of a schema, without registering it."""
    language, definition = _language(type, file), file.read()
    binary = base64.b64encode(definition).decode()

    async def work(client: FlyMqClient) -> int:
        found = await client.call("schema.check", name=name, type=language, binary=binary, compatibility=compatibility or "")
        admin.show([{"conflict": text} for text in found["conflicts"]], columns=("conflict",))
        admin.message(f"{name}: {'not compatible' if found['conflicts'] else 'compatible'}")
        return CONFLICT if found["conflicts"] else 0

    return admin.run(work)


@schema.command("validate")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@admin_options
def validate_value(name: str, file: BinaryIO, admin: Admin) -> int:
    """Check whether the content of FILE is valid under the latest version of a schema."""
    value = file.read()

    async def work(client: FlyMqClient) -> int:
        faults = await client.validate(name, value)
        admin.show([{"fault": text} for text in faults], columns=("fault",))
        return CONFLICT if faults else 0

    return admin.run(work)


@schema.command("require")
@click.argument("topic")
@click.argument("name")
@_version_option
@click.option("--dead-letter", is_flag=True, help="Dead-letter invalid records instead of rejecting them.")
@admin_options
def require_schema(topic: str, name: str, version: int, dead_letter: bool, admin: Admin) -> int:
    """Require a schema for the records of a topic, through every protocol."""

    async def work(client: FlyMqClient) -> int:
        await client.require_schema(topic, name, version=version, on_invalid="dead_letter" if dead_letter else "reject")
        admin.message(f"{topic}: requires {name}{f' v{version}' if version else ''}")
        return 0

    return admin.run(work)


@schema.command("release")
@click.argument("topic")
@admin_options
def release_schema(topic: str, admin: Admin) -> int:
    """Remove the schema requirement of a topic."""

    async def work(client: FlyMqClient) -> int:
        await client.release_schema(topic)
        admin.message(f"{topic}: requires no schema")
        return 0

    return admin.run(work)


@schema.command("delete")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--version", type=click.IntRange(min=0), default=0, help="Schema version; default: all.")
@yes_option
@admin_options
def delete_schemas(names: Sequence[str], version: int, yes: bool, admin: Admin) -> int:
    """Delete schemas or one version. A required schema cannot be deleted."""
    confirm(f"Delete {f'version {version}' if version else 'all versions'} of {', '.join(names)}?", yes)

    async def work(client: FlyMqClient) -> int:
        for name in names:
            await client.delete_schema(name, version)
            admin.message(f"{name}: deleted")
        return 0

    return admin.run(work)
