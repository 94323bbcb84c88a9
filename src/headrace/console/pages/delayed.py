"""Delayed messages: list and cancel."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from headrace.console.visits import Visit

_LIMIT: Final = 1_000


async def delayed(visit: Visit) -> Response:
    topic = visit.given("topic").strip()
    rows = await visit.call("delayed.list", topic=topic or None, limit=_LIMIT)
    command = visit.command("delayed", "list", *([topic] if topic else []))
    return visit.show("delayed.html", rows=rows, topic=topic, limit=_LIMIT, command=command)


async def cancel(visit: Visit) -> Response:
    form = await visit.form()
    id, topic = form["id"], form["topic"]
    command = visit.command("delayed", "cancel", id, "--topic", topic, "--yes")
    await visit.act(f"Cancel delayed message {id}", command, visit.client.cancel_delayed(id, topic=topic))
    return visit.go("/delayed", topic=form["filter"])
