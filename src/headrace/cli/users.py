"""`headrace user`: users with passwords and roles."""

from __future__ import annotations

from collections.abc import Sequence

import click

from headrace.cli.administration import Admin, Row, admin_options, confirm, moment, yes_option
from headrace.cli.servers import password_of
from headrace.clients.flymq.client import FlyMqClient
from headrace.wire.flymq.access_messages import UserEntry

_COLUMNS = ("name", "roles", "enabled", "updated")


@click.group()
def user() -> None:
    """Manage users, their roles and passwords."""


@user.command("list")
@admin_options
def list_users(admin: Admin) -> int:
    """List users."""

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(found) for found in await client.list_users()], columns=_COLUMNS)

    return admin.run(work)


@user.command("describe")
@click.argument("name")
@admin_options
def describe_user(name: str, admin: Admin) -> int:
    """Show a user."""

    async def work(client: FlyMqClient) -> int:
        return admin.show([_row(await client.describe_user(name))], columns=(*_COLUMNS, "permissions", "created"))

    return admin.run(work)


@user.command("create")
@click.argument("name")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Role: admin, producer, consumer, guest or a custom role; repeatable.")
@click.option("--new-password-file", metavar="PATH", help="File with the password; - is standard input. Default: prompt.")
@click.option("--no-password", is_flag=True, help="The user needs a certificate or an API key.")
@click.option("--disabled", is_flag=True, help="Create the user disabled.")
@admin_options
def create_user(name: str, roles: Sequence[str], new_password_file: str | None, no_password: bool, disabled: bool, admin: Admin) -> int:
    """Create a user."""
    if no_password and new_password_file:
        raise click.UsageError("give either --new-password-file or --no-password")
    password = "" if no_password else password_of(new_password_file, f"New password of {name}", option="--new-password-file", twice=True)

    async def work(client: FlyMqClient) -> int:
        return admin.show_changed(_row(await client.create_user(name, password, roles, enabled=not disabled)), columns=_COLUMNS)

    return admin.run(work)


@user.command("alter")
@click.argument("name")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="New role, replacing the current roles; may be repeated.")
@click.option("--no-roles", is_flag=True, help="Remove all roles.")
@click.option("--enable/--disable", "enabled", default=None, help="Enable or disable the user, effective immediately on open connections.")
@admin_options
def alter_user(name: str, roles: Sequence[str], no_roles: bool, enabled: bool | None, admin: Admin) -> int:
    """Change the roles of a user, enable or disable it. Other properties stay."""
    if roles and no_roles:
        raise click.UsageError("give either --role or --no-roles")
    if not roles and not no_roles and enabled is None:
        raise click.UsageError("nothing to alter: give --role, --no-roles, --enable or --disable")

    async def work(client: FlyMqClient) -> int:
        before = await client.describe_user(name)
        after = list(roles) if roles or no_roles else before.roles
        await client.alter_user(name, after, enabled=before.enabled if enabled is None else enabled)
        return admin.show_changed(_row(await client.describe_user(name)), columns=_COLUMNS)

    return admin.run(work)


@user.command("password")
@click.argument("name")
@click.option("--new-password-file", metavar="PATH", help="File with the new password; - is standard input. Default: prompt.")
@click.option("--old-password-file", metavar="PATH", help="File with the old password, required for your own unless you are an admin.")
@admin_options
def change_password(name: str, new_password_file: str | None, old_password_file: str | None, admin: Admin) -> int:
    """Change a password. Ends all logins with the old password."""
    old = "" if old_password_file is None else password_of(old_password_file, "", option="--old-password-file")
    new = password_of(new_password_file, f"New password of {name}", option="--new-password-file", twice=True)

    async def work(client: FlyMqClient) -> int:
        await client.change_password(name, new, old)
        admin.message(f"{name}: password changed")
        return 0

    return admin.run(work)


@user.command("delete")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@yes_option
@admin_options
def delete_users(names: Sequence[str], yes: bool, admin: Admin) -> int:
    """Delete users with their API keys and rules."""
    confirm(f"Delete {', '.join(names)}, with their keys and rules?", yes)

    async def work(client: FlyMqClient) -> int:
        for name in names:
            await client.delete_user(name)
            admin.message(f"{name}: deleted")
        return 0

    return admin.run(work)


def _row(found: UserEntry) -> Row:
    return {
        "name": found.user,
        "roles": found.roles,
        "permissions": found.permissions,
        "enabled": found.enabled,
        "created": moment(found.created * 1000),
        "updated": moment(found.updated * 1000),
    }
