"""Pipelines of this machine: what runs, the graph from sources to sinks, progress and errors."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from markupsafe import Markup
from starlette.responses import Response

from headrace.console.charts import graph
from headrace.console.logins import Notice
from headrace.console.visits import Visit
from headrace.errors import BrokerError, NotAuthorized
from headrace.spark.pipelines.executions import ask_to_stop, executions

LIVE: Final = ("starting", "running", "stopping")


async def _check_sees(visit: Visit) -> None:
    """Pipelines belong to the machine, not to the broker: users that may describe the broker see them. Raises `NotAuthorized`."""
    if (await visit.call("status"))["server"] is None:
        raise NotAuthorized(principal=visit.login.user or "anonymous", action="describe", resource="the broker")


async def _may_stop(visit: Visit) -> bool:
    if not visit.login.user:
        return True  # access is open
    reply = await visit.manage("rule.check", user=visit.login.user, action="admin", kind="broker", name="headrace")
    return bool(reply["allowed"])


async def pipelines(visit: Visit) -> Response:
    await _check_sees(visit)
    found = await asyncio.to_thread(executions)
    rows = [
        {
            **one,
            "lag": max((query["lag"] for query in one["queries"] if query["lag"] is not None), default=None),
            "rate": sum(query["processing_rate"] for query in one["queries"]),
            "rows": sum(query["rows_total"] for query in one["queries"]),
        }
        for one in found
    ]
    rows.sort(key=lambda row: (row["state"] not in LIVE, row["name"]))
    return visit.show("pipelines.html", rows=rows, live=LIVE, command="headrace pipeline list")


async def _find(visit: Visit, checkpoint: str) -> dict[str, Any]:
    for one in await asyncio.to_thread(executions):
        if one["checkpoint"] == checkpoint:
            return one
    raise NotFound(f"no pipeline with the checkpoint {checkpoint[:200]} has run on this machine")


class NotFound(BrokerError):
    """No such pipeline."""

    code = "no_such_entry"


async def pipeline(visit: Visit) -> Response:
    await _check_sees(visit)
    found = await _find(visit, visit.given("checkpoint"))
    context: dict[str, Any] = {
        "pipeline": found,
        "picture": picture_of(found),
        "is_live": found["state"] in LIVE,
        "may_stop": await _may_stop(visit),
        "command": f"headrace pipeline status {found['name']}",
        "stop_command": f"headrace pipeline stop {found['name']}",
    }
    return visit.show("pipeline.html", **context)


def picture_of(found: dict[str, Any]) -> Markup | None:
    """Return the graph of a pipeline; None if its execution did not write one."""
    tables = found.get("graph") or {}
    if not tables:
        return None
    sources = [{"id": f"table:{one['name']}", "title": one["name"], "text": one["text"], "kind": "source"} for one in tables["sources"]]
    depths: dict[str, int] = {one["name"]: 0 for one in tables["sources"]}
    columns: list[list[dict[str, str]]] = [sources]
    for step in tables["steps"]:
        depth = 1 + max((depths.get(name, 0) for name in step["inputs"]), default=0)
        depths[step["name"]] = depth
        while len(columns) <= depth:
            columns.append([])
        columns[depth].append({"id": f"table:{step['name']}", "title": step["name"], "text": step["text"], "kind": "step"})
    sinks = [{"id": f"sink:{one['name']}", "title": one["name"], "text": one["text"], "kind": "sink"} for one in tables["sinks"]]
    edges = [(f"table:{name}", f"table:{step['name']}") for step in tables["steps"] for name in step["inputs"]]
    edges += [(f"table:{sink['from']}", f"sink:{sink['name']}") for sink in tables["sinks"]]
    return graph([*columns, sinks], edges)


async def stop(visit: Visit) -> Response:
    form = await visit.form()
    await _check_sees(visit)
    found = await _find(visit, form["checkpoint"])
    if not await _may_stop(visit):
        raise NotAuthorized(principal=visit.login.user, action="admin", resource="the broker")
    if found["state"] not in LIVE:
        visit.login.notices.append(Notice(f"{found['name']} is not running", is_error=True))
    else:
        work = asyncio.to_thread(ask_to_stop, found)
        note = "it ends after its current batches"
        await visit.act(f"Stop pipeline {found['name']}", f"headrace pipeline stop {found['name']}", work, note=lambda _: note)
    return visit.go("/pipeline", checkpoint=found["checkpoint"])
