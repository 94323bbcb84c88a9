"""`headrace key`: API keys, for protocols with keys instead of passwords."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from headrace.cli.administration import DURATION, Admin, Row, admin_options, confirm, moment, yes_option
from headrace.cli.grants import RESOURCE_HELP, SCOPE, shown
from headrace.clients.flymq.client import FlyMqClient

_COLUMNS = ("id", "owner", "in_force", "scopes", "expires", "used", "description")


@click.group()
def key() -> None:
    """Manage API keys."""


@key.command("list")
@click.option("--owner", metavar="USER", help="Only keys of this user.")
@admin_options
def list_keys(owner: str | None, admin: Admin) -> int:
    """List API keys, without their secrets."""

    async def work(client: FlyMqClient) -> int:
        keys = [found for found in await client.manage("key.list") if owner in (None, found["owner"])]
        return admin.show([_row(found) for found in keys], columns=_COLUMNS)

    return admin.run(work)


@key.command("describe")
@click.argument("id")
@admin_options
def describe_key(id: str, admin: Admin) -> int:
    """Show an API key, without its secret."""

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(await client.manage("key.get", id=id))], columns=(*_COLUMNS, "created", "revoked"))

    return admin.run(work)


@key.command("create", epilog=RESOURCE_HELP)
@click.argument("owner")
@click.option(
    "--scope", "scopes", multiple=True, type=SCOPE, help="Scope of the key, such as read@topic:orders; may be repeated. Default: all."
)
@click.option("--expires-in", type=DURATION, default=0, help="Validity period; default: until revoked.")
@click.option("--description", default="", help="Description of the key.")
@admin_options
def create_key(owner: str, scopes: Sequence[dict[str, object]], expires_in: int, description: str, admin: Admin) -> int:
    """Create an API key of the user OWNER. The key is printed once and cannot be shown again.

    It has the rights of its owner, limited to its scopes.
    """

    async def work(client: FlyMqClient) -> int:
        made = await client.manage("key.create", owner=owner, scopes=list(scopes), expires_ms=_expiry(expires_in), description=description)
        return admin.show([{"id": made["id"], "owner": owner, "key": made["key"]}], columns=("id", "owner", "key"))

    return admin.run(work)


@key.command("alter", epilog=RESOURCE_HELP)
@click.argument("id")
@click.option("--expires-in", type=DURATION, help="Validity period from now; 0: until revoked.")
@click.option("--description", help="Description of the key.")
@click.option("--scope", "scopes", multiple=True, type=SCOPE, help="New scope, replacing the current scopes; may be repeated.")
@click.option("--no-scopes", is_flag=True, help="Remove all scopes: the key has the rights of its owner.")
@admin_options
def alter_key(
    id: str, expires_in: int | None, description: str | None, scopes: Sequence[dict[str, object]], no_scopes: bool, admin: Admin
) -> int:
    """Change expiry, scopes or description of an API key, effective immediately on open connections."""
    if expires_in is None and description is None and not scopes and not no_scopes:
        raise click.UsageError("nothing to alter: give --expires-in, --scope, --no-scopes or --description")
    if scopes and no_scopes:
        raise click.UsageError("give either --scope or --no-scopes")

    async def work(client: FlyMqClient) -> int:
        altered = await client.manage(
            "key.alter",
            id=id,
            expires_ms=None if expires_in is None else _expiry(expires_in),
            description=description,
            scopes=list(scopes) if scopes or no_scopes else None,
        )
        return admin.show_changed(_row(altered), columns=_COLUMNS)

    return admin.run(work)


@key.command("revoke")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@yes_option
@admin_options
def revoke_keys(ids: Sequence[str], yes: bool, admin: Admin) -> int:
    """Revoke API keys permanently, including on open connections. They stay in the list."""
    return _end_keys(admin, "revoke", "revoked", ids, yes)


@key.command("delete")
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@yes_option
@admin_options
def delete_keys(ids: Sequence[str], yes: bool, admin: Admin) -> int:
    """Revoke API keys and remove them from the list."""
    return _end_keys(admin, "delete", "deleted", ids, yes)


def _end_keys(admin: Admin, operation: str, done: str, ids: Sequence[str], yes: bool) -> int:
    confirm(f"{operation.capitalize()} {', '.join(ids)}?", yes)

    async def work(client: FlyMqClient) -> int:
        for id in ids:
            await client.manage(f"key.{operation}", id=id)
            admin.message(f"{id}: {done}")
        return 0

    return admin.run(work)


def _expiry(expires_in: int) -> int:
    return time.time_ns() // 1_000_000 + expires_in if expires_in else 0


def _row(found: dict[str, Any]) -> Row:
    return {
        "id": found["id"],
        "owner": found["owner"],
        "in_force": found["in_force"],
        "scopes": [f"{','.join(scope['actions'])}@{shown(scope)}" for scope in found["scopes"]],
        "created": moment(found["created_ms"]),
        "expires": _moment(found["expires_ms"]),
        "used": _moment(found["used_ms"]),
        "revoked": _moment(found["revoked_ms"]),
        "description": found["description"],
    }


def _moment(unix_ms: int) -> str | None:
    return moment(unix_ms) if unix_ms else None
