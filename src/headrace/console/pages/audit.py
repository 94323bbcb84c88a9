"""Audit log of the broker with filters, and the actions done in this console."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from headrace.console.reading import parse_time
from headrace.console.text import moment
from headrace.console.visits import Visit
from headrace.wire.flymq.access_messages import AuditQuery

TYPES: Final = ("login", "denial", "topic", "group", "user", "role", "acl", "key", "audit")
RESULTS: Final = ("success", "failure", "allowed", "denied")
_LIMIT: Final = 200


async def audit(visit: Visit) -> Response:
    fields = {name: visit.given(name).strip() for name in ("from", "to", "type", "by", "resource", "result", "search")}
    start, end = (parse_time(fields[name]) if fields[name] else 0 for name in ("from", "to"))
    limit = visit.number("limit", _LIMIT, 1, 1_000)
    types = [fields["type"]] if fields["type"] in TYPES else []
    query = AuditQuery(start // 1000, -(-end // 1000), types, fields["by"], fields["resource"], fields["result"], fields["search"], limit)
    page = await visit.ask(visit.client.audit(query))
    words: list[object] = ["audit", "list", "-n", limit]
    for name in ("from", "to", "type", "by", "resource", "result", "search"):
        if fields[name]:
            words += [f"--{name}", moment(start if name == "from" else end) if name in ("from", "to") else fields[name]]
    return visit.show(
        "audit.html",
        events=page.events,
        total=page.total,
        fields=fields,
        types=TYPES,
        results=RESULTS,
        limit=limit,
        command=visit.command(*words),
    )


async def console(visit: Visit) -> Response:
    """Show what was done in this console: everything to administrators, the own actions to others."""
    own = visit.login.user
    may_see_all = not own or (await visit.manage("rule.check", user=own, action="admin", kind="broker", name="headrace"))["allowed"]
    entries = [entry for entry in visit.console.trail.entries if may_see_all or entry.user == own]
    return visit.show("audit_console.html", entries=entries[:500], is_all=may_see_all)
