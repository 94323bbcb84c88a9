"""`headrace audit`: audit events with user, time, protocol and result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import click

from headrace.cli import terminal
from headrace.cli.administration import MOMENT, Admin, Row, admin_options, moment
from headrace.clients.flymq.client import FlyMqClient
from headrace.limits import AUDIT_QUERY_EVENTS_MAX
from headrace.wire.flymq.access_messages import AuditEvent, AuditQuery

_COLUMNS = ("time", "type", "action", "user", "protocol", "address", "resource", "result")


@click.group()
def audit() -> None:
    """Read the audit log: who did what."""


def _query_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that select events; the command receives them as `query`."""

    @click.option(
        "--from",
        "start",
        type=MOMENT,
        default=0,
        help="Only events at or after this date and time, in the local zone unless it ends with Z or +HH:MM.",
    )
    @click.option("--to", "end", type=MOMENT, default=0, help="Only events before this date and time.")
    @click.option("--type", "types", multiple=True, help="Only this type: login, denial, topic, group, user, role, acl, key, audit.")
    @click.option("--by", metavar="NAME", default="", help="Only events of this user.")
    @click.option("--resource", default="", help="Only events on this resource, such as user:ann.")
    @click.option("--result", type=click.Choice(["success", "failure", "allowed", "denied"]), help="Only events with this result.")
    @click.option("--search", default="", help="Only events that contain this text.")
    @click.option(
        "-n", "--limit", type=click.IntRange(1, AUDIT_QUERY_EVENTS_MAX), default=100, show_default=True, help="Number of newest events."
    )
    @functools.wraps(command)
    def with_query(
        *arguments: object,
        start: int,
        end: int,
        types: Sequence[str],
        by: str,
        resource: str,
        result: str | None,
        search: str,
        limit: int,
        **rest: object,
    ) -> int:
        query = AuditQuery(start // 1000, -(-end // 1000), list(types), by, resource, result or "", search, limit)
        return command(*arguments, query=query, **rest)

    return with_query


@audit.command("list")
@_query_options
@admin_options
def list_events(query: AuditQuery, admin: Admin) -> int:
    """Print events, oldest first."""

    async def work(client: FlyMqClient) -> int:
        page = await client.audit(query)
        if page.more:
            admin.message(f"the newest {len(page.events)} of {page.total}")
        return admin.show([_row(event) for event in reversed(page.events)], columns=_COLUMNS)

    return admin.run(work)


@audit.command("export")
@click.option("--format", type=click.Choice(["json", "csv"]), default="json", show_default=True, help="Format of the file.")
@_query_options
@admin_options
def export(format: str, query: AuditQuery, admin: Admin) -> int:
    """Write events to standard output as one file, newest first."""

    async def work(client: FlyMqClient) -> int:
        terminal.write(await client.export_audit(query, format))
        return 0

    return admin.run(work)


def _row(event: AuditEvent) -> Row:
    details = {detail.name: detail.value for detail in event.details}
    return {
        "time": moment(event.time),
        "type": event.type,
        "action": event.action,
        "user": event.user,
        "protocol": details.pop("protocol", ""),
        "address": event.address,
        "resource": event.resource,
        "result": event.result,
        "details": details,
        "id": event.id,
    }
