"""`headrace acl`: rules that allow or deny, and roles with their grants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from headrace.cli import NOT_ALLOWED
from headrace.cli.administration import Admin, Row, admin_options, confirm, yes_option
from headrace.cli.grants import ACTION_LIST, ACTIONS, RESOURCE, RESOURCE_HELP, SCOPE, shown
from headrace.clients.flymq.client import FlyMqClient

_COLUMNS = ("effect", "subject", "actions", "resource")


@click.group()
def acl() -> None:
    """Manage rules and roles: who may do what."""


def _subject(user: str | None, role: str | None, everybody: bool) -> str:
    if [user is not None, role is not None, everybody].count(True) != 1:
        raise click.UsageError("give one of --for-user, --for-role and --for-everybody")
    return "*" if everybody else f"user:{user}" if user is not None else f"role:{role}"


_for_user = click.option("--for-user", metavar="NAME", help="Apply the rule to this user; anonymous means without a login.")
_for_role = click.option("--for-role", metavar="ROLE", help="Apply the rule to users with this role.")
_for_everybody = click.option("--for-everybody", is_flag=True, help="Apply the rule to all users, including anonymous.")
_deny = click.option("--deny", is_flag=True, help="Deny instead of allow. A deny rule overrides all allow rules.")


@acl.command("list")
@click.option("--for-user", metavar="NAME", help="Only rules for this user.")
@admin_options
def list_rules(for_user: str | None, admin: Admin) -> int:
    """List rules."""

    async def work(client: FlyMqClient) -> int:
        rules = [rule for rule in await client.manage("rule.list") if for_user is None or rule["subject"] == f"user:{for_user}"]
        return admin.show([_row(rule) for rule in rules], columns=_COLUMNS)

    return admin.run(work)


@acl.command("create", epilog=RESOURCE_HELP)
@click.argument("actions", type=ACTION_LIST)
@click.argument("resource", type=RESOURCE)
@_for_user
@_for_role
@_for_everybody
@_deny
@admin_options
def create_rule(
    actions: list[str], resource: dict[str, str], for_user: str | None, for_role: str | None, for_everybody: bool, deny: bool, admin: Admin
) -> int:
    """Add a rule that allows or denies ACTIONS (read,publish or all) on RESOURCE."""
    rule = {"subject": _subject(for_user, for_role, for_everybody), "effect": "deny" if deny else "allow", "actions": actions, **resource}

    async def work(client: FlyMqClient) -> int:
        await client.manage("rule.add", **rule)
        return admin.show_changed(_row(rule), columns=_COLUMNS)

    return admin.run(work)


@acl.command("delete", epilog=RESOURCE_HELP)
@click.argument("actions", type=ACTION_LIST)
@click.argument("resource", type=RESOURCE)
@_for_user
@_for_role
@_for_everybody
@_deny
@yes_option
@admin_options
def delete_rule(
    actions: list[str],
    resource: dict[str, str],
    for_user: str | None,
    for_role: str | None,
    for_everybody: bool,
    deny: bool,
    yes: bool,
    admin: Admin,
) -> int:
    """Remove ACTIONS from a rule. A rule without actions is deleted."""
    rule = {"subject": _subject(for_user, for_role, for_everybody), "effect": "deny" if deny else "allow", "actions": actions, **resource}
    confirm(f"Delete the rule that {rule['effect']}s {','.join(actions)} on {shown(resource)} to {rule['subject']}?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.manage("rule.remove", **rule)
        admin.message("rule deleted")
        return 0

    return admin.run(work)


@acl.command("check", epilog=RESOURCE_HELP)
@click.argument("name", metavar="USER")
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument("resource", type=RESOURCE)
@admin_options
def check(name: str, action: str, resource: dict[str, str], admin: Admin) -> int:
    """Check whether USER may do ACTION on RESOURCE, and why. Exits with 0 if allowed, 4 if not."""
    if resource["match"] == "prefix":
        raise click.UsageError("check requires one resource, not a prefix")

    async def work(client: FlyMqClient) -> int:
        reply = await client.manage("rule.check", user=name, action=action, kind=resource["kind"], name=resource["name"])
        allowed = bool(reply["allowed"])
        admin.show(
            [{"user": name, "action": action, "resource": shown(resource), "allowed": allowed, "why": reply.get("why", "")}],
            columns=("user", "action", "resource", "allowed", "why"),
        )
        return 0 if allowed else NOT_ALLOWED

    return admin.run(work)


@acl.command("roles")
@admin_options
def list_roles(admin: Admin) -> int:
    """List roles and their grants."""

    async def work(client: FlyMqClient) -> int:
        roles = await client.manage("role.list")
        rows = [
            {
                "name": role["name"],
                "grants": [f"{','.join(grant['actions'])}@{_kind(grant)}" for grant in role["grants"]],
                "description": role["description"],
            }
            for role in roles
        ]
        return admin.show(rows, columns=("name", "grants", "description"))

    return admin.run(work)


@acl.command("role", epilog=RESOURCE_HELP)
@click.argument("name")
@click.option("--grant", "grants", multiple=True, type=SCOPE, help="Granted actions, such as read,publish@topic:orders.*; may be repeated.")
@click.option("--description", default="", help="Description of the role.")
@admin_options
def put_role(name: str, grants: Sequence[dict[str, object]], description: str, admin: Admin) -> int:
    """Create a role or replace its grants."""

    async def work(client: FlyMqClient) -> int:
        await client.manage("role.put", name=name, grants=list(grants), description=description)
        admin.message(f"{name}: {len(grants)} grants")
        return 0

    return admin.run(work)


@acl.command("delete-role")
@click.argument("name")
@yes_option
@admin_options
def delete_role(name: str, yes: bool, admin: Admin) -> int:
    """Delete a role and its rules. Users with the role lose its grants."""
    confirm(f"Delete the role {name}?", yes)

    async def work(client: FlyMqClient) -> int:
        await client.manage("role.delete", name=name)
        admin.message(f"{name}: deleted")
        return 0

    return admin.run(work)


def _kind(grant: dict[str, str]) -> str:
    return "*" if grant["kind"] == "*" else shown(grant)


def _row(rule: dict[str, Any]) -> Row:
    return {"effect": rule["effect"], "subject": rule["subject"], "actions": rule["actions"], "resource": shown(rule)}
