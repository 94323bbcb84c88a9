"""Topics: the list, one topic, and its creation, change and deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.responses import HTMLResponse, Response

from headrace.console.logins import Notice
from headrace.console.samples import FRESH_SECONDS
from headrace.console.visits import BadForm, Form, Visit
from headrace.errors import HeadraceError
from headrace.server.units import parse_duration, parse_size

PAGE_SIZE: Final = 100
_GROUPS_MAX: Final = 200
"""Groups that the page of a topic looks at."""
_SORTS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "name": lambda row: row["name"],
    "partitions": lambda row: row["partitions"],
    "records": lambda row: row["records"],
    "size": lambda row: row["size_bytes"],
    "rate": lambda row: row["rate"] or 0.0,
}
_SETTINGS: Final = (
    ("ack", "--ack", "Guarantee of an acknowledgement", ("durable", "written", "none")),
    ("cleanup", "--cleanup", "Cleanup of old records", ("delete", "compact")),
    ("retention_ms", "--retention", "Retention time, such as 7d; 0 is unlimited", None),
    ("retention_bytes", "--retention-size", "Retention size per partition, such as 10GiB; 0 is unlimited", None),
    ("segment_bytes", "--segment-size", "Size of a segment file, such as 64MiB", None),
    ("ttl_ms", "--ttl", "Time to live of records, such as 1h; 0 is unlimited", None),
)
_SWITCHES: Final = (
    ("dead_letter_expired", "--dead-letter-expired", "--drop-expired", "Expired records"),
    ("compress", "--compress", "--no-compress", "Compression on disk"),
)


def row_of(counters: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    return {**counters, "name": counters["topic"], "rate": rates.get(counters["topic"])}


async def topics(visit: Visit) -> Response:
    is_part = bool(visit.given("part"))
    found = await visit.login.account.samples.topics(fresh_seconds=FRESH_SECONDS if is_part else 0.0)
    wanted, sort = visit.given("q").strip().lower(), visit.given("sort", "name")
    order, is_reversed = sort.lstrip("-"), sort.startswith("-")
    rows = [row_of(topic, found.rates) for topic in found.topics if wanted in topic["topic"].lower()]
    rows.sort(key=_SORTS.get(order, _SORTS["name"]), reverse=is_reversed)
    pages = max(1, -(-len(rows) // PAGE_SIZE))
    page = visit.number("page", 1, 1, pages)
    context: dict[str, Any] = {
        "rows": rows[(page - 1) * PAGE_SIZE : page * PAGE_SIZE],
        "count": len(rows),
        "total": len(found.topics),
        "page": page,
        "pages": pages,
        "q": visit.given("q"),
        "sort": sort,
        "command": visit.command("topic", "list"),
    }
    if is_part:
        return HTMLResponse(visit.part("_topics.html", **context))
    return visit.show("topics.html", **context)


async def topic(visit: Visit) -> Response:
    name = visit.given("name")
    found = await visit.call("topic.describe", topic=name)
    try:
        required = await visit.call("schema.requirement", topic=name)
    except HeadraceError:
        required = None
    letters = {row["topic"]: row["waiting"] for row in await visit.call("dlq.list")}
    listed = await visit.login.account.samples.topics()
    row = next(
        (row_of(one, listed.rates) for one in listed.topics if one["topic"] == name), {"records": None, "size_bytes": None, "rate": None}
    )
    return visit.show(
        "topic.html",
        topic=found,
        row={**row, "records": _records(found)},
        required=required,
        schemas=await _schemas(visit),
        groups=await _groups_of(visit, name),
        dead_letters=letters.get(name, 0),
        command=visit.command("topic", "describe", name),
        require_command=visit.command("schema", "require", name, "SCHEMA"),
    )


def _records(found: dict[str, Any]) -> int:
    return sum(held["end"] - held["first"] for held in found["partitions"])


async def _schemas(visit: Visit) -> list[str]:
    try:
        return [row["name"] for row in await visit.call("schema.list")]
    except HeadraceError:
        return []


async def _groups_of(visit: Visit, name: str) -> list[dict[str, Any]]:
    """Return the groups that read the topic, with their lag."""
    names = (await visit.call("group.list"))[:_GROUPS_MAX]
    lags = await asyncio.gather(*(visit.call("group.lag", group=group) for group in names), return_exceptions=True)
    rows = []
    for group, found in zip(names, lags, strict=True):
        if isinstance(found, BaseException):
            continue  # deleted meanwhile
        here = [row for row in found if row["topic"] == name]
        if here:
            rows.append({"group": group, "lag": sum(row["lag"] for row in here), "moved_at": max(row["moved_at"] or 0 for row in here)})
    return rows


def _settings_of(form: Form) -> tuple[dict[str, object], list[object]]:
    """Return the settings that the form names, for the broker and for the command line. Raises `BadForm`."""
    config: dict[str, object] = {}
    words: list[object] = []
    for key, option, label, choices in _SETTINGS:
        given = form[key].strip()
        if not given:
            continue
        if choices is not None and given not in choices:
            raise BadForm(f"{label}: expected one of {', '.join(choices)}")
        try:
            config[key] = given if choices is not None else parse_duration(given) if key.endswith("_ms") else parse_size(given)
        except ValueError as failure:
            raise BadForm(f"{label}: {failure}") from None
        words += [option, given]
    for key, on, off, _ in _SWITCHES:
        if form[key] in ("yes", "no"):
            config[key] = form[key] == "yes"
            words.append(on if form[key] == "yes" else off)
    return config, words


def _form_page(
    visit: Visit, title: str, *, name: str, is_new: bool, config: dict[str, Any], form: Form | None, error: str, command: str
) -> Response:
    return visit.show(
        "topic_form.html",
        400 if error else 200,
        title=title,
        name=name,
        is_new=is_new,
        config=config,
        settings=_SETTINGS,
        switches=_SWITCHES,
        form=form or Form({}, {}),
        error=error,
        command=command,
    )


async def new(visit: Visit) -> Response:
    command = visit.command("topic", "create", "NAME", "--partitions", "1")
    form: Form | None = None
    error = ""
    if visit.request.method == "POST":
        form = await visit.form()
        try:
            config, words = _settings_of(form)
            name, partitions = form["name"].strip(), form.number("partitions") or 1
            command = visit.command("topic", "create", name, "--partitions", partitions, *words)
            work = visit.client.call("topic.create", topic=name, partitions=partitions, config=config)
            if await visit.act(f"Create topic {name}", command, work):
                visit.login.account.samples.list.at = 0.0
                return visit.go("/topic", name=name)
            error = _taken_notice(visit)
        except BadForm as failure:
            error = str(failure)
    return _form_page(visit, "Create a topic", name="", is_new=True, config={}, form=form, error=error, command=command)


def _taken_notice(visit: Visit) -> str:
    """Return the error of the action, to be shown at its form instead of as a notice."""
    notice: Notice = visit.login.notices.pop()
    return notice.text


async def alter(visit: Visit) -> Response:
    name = visit.given("name")
    found = await visit.call("topic.describe", topic=name)
    command = visit.command("topic", "alter", name, "--retention", "7d")
    form: Form | None = None
    error = ""
    if visit.request.method == "POST":
        form = await visit.form()
        try:
            config, words = _settings_of(form)
            partitions = form.number("partitions")
            if not config and partitions is None:
                raise BadForm("nothing to alter: fill in a field")
            more = [] if partitions is None else ["--partitions", partitions]
            command = visit.command("topic", "alter", name, *more, *words)
            if await visit.act(
                f"Alter topic {name}", command, visit.client.call("topic.alter", topic=name, partitions=partitions, config=config)
            ):
                return visit.go("/topic", name=name)
            error = _taken_notice(visit)
        except BadForm as failure:
            error = str(failure)
    return _form_page(visit, f"Alter {name}", name=name, is_new=False, config=found["config"], form=form, error=error, command=command)


async def delete(visit: Visit) -> Response:
    name = visit.given("name")
    found = await visit.call("topic.describe", topic=name)
    command = visit.command("topic", "delete", name, "--yes")
    error = ""
    if visit.request.method == "POST":
        form = await visit.form()
        if form["confirm"] == name:
            if await visit.act(f"Delete topic {name}", command, visit.client.call("topic.delete", topic=name)):
                visit.login.account.samples.list.at = 0.0
                return visit.go("/topics")
            error = _taken_notice(visit)
        else:
            error = "The name does not match: nothing was deleted."
    return visit.show(
        "confirm.html",
        400 if error else 200,
        title="Delete a topic",
        text=f"This deletes the topic, the committed offsets of its groups, and its records: {_records(found):,}.",
        name=name,
        button="Delete topic",
        action_path="/topic/delete",
        action_query={"name": name},
        back_path="/topic",
        back_query={"name": name},
        error=error,
        command=command,
    )


async def schema(visit: Visit) -> Response:
    """Require a schema, or none."""
    form = await visit.form()
    name, wanted = form["topic"], form["schema"]
    if wanted:
        is_diverting = form["on_invalid"] == "dead_letter"
        command = visit.command("schema", "require", name, wanted, *(["--dead-letter"] if is_diverting else []))
        work = visit.client.require_schema(name, wanted, on_invalid="dead_letter" if is_diverting else "reject")
        await visit.act(f"Require schema {wanted} for {name}", command, work)
    else:
        await visit.act(f"Require no schema for {name}", visit.command("schema", "release", name), visit.client.release_schema(name))
    return visit.go("/topic", name=name)
