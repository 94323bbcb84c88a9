"""Schemas: versions with their differences, and registration after a compatibility check."""

from __future__ import annotations

import base64
import difflib
import json
from typing import Any, Final

from starlette.responses import Response

from headrace.console.visits import BadForm, Form, Visit

_TYPES: Final = ("json", "avro", "protobuf")
_MODES: Final = ("none", "backward", "forward", "full")
_SUFFIXES: Final = {"json": "json", "avro": "avsc", "protobuf": "proto"}


async def schemas(visit: Visit) -> Response:
    return visit.show("schemas.html", rows=await visit.call("schema.list"), command=visit.command("schema", "list"))


def _text(found: dict[str, Any]) -> str:
    """Return a definition as text; a binary one in base64."""
    definition = found.get("definition")
    return str(definition) if definition is not None else str(found.get("binary") or "")


def difference(old: str, new: str) -> list[tuple[str, str]]:
    """Return the lines of a unified difference, each with its kind: same, added, removed or place."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    lines = difflib.unified_diff(_pretty(old).splitlines(), _pretty(new).splitlines(), lineterm="", n=3)
    return [(kinds.get(line[:1], "same"), line) for line in lines if not line.startswith(("+++", "---"))]


def _pretty(text: str) -> str:
    """Indent JSON, so that the difference of one-line definitions can be read."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


async def schema(visit: Visit) -> Response:
    name, version, against = visit.given("name"), visit.number("version", 0), visit.number("against", 0)
    found = await visit.call("schema.describe", name=name, version=version)
    versions = sorted(found["versions"])
    older = [one for one in versions if one < found["version"]]
    if against == 0 and older:
        against = older[-1]
    lines: list[tuple[str, str]] = []
    if against and against != found["version"]:
        lines = difference(_text(await visit.call("schema.describe", name=name, version=against)), _text(found))
    return visit.show(
        "schema.html",
        schema=found,
        definition=_pretty(_text(found)),
        versions=versions,
        against=against,
        lines=lines,
        command=visit.command("schema", "describe", name, "--version", found["version"]),
    )


async def new(visit: Visit) -> Response:
    """Check a definition, and register it if it is compatible."""
    fields = {"name": visit.given("name"), "type": visit.given("type", "json"), "definition": "", "compatibility": ""}
    conflicts: list[str] | None = None
    error = ""
    if visit.request.method == "GET" and fields["name"]:
        found = await visit.call("schema.describe", name=fields["name"], version=0)
        fields |= {"type": str(found["type"]).lower(), "definition": _pretty(_text(found))}
    elif visit.request.method == "POST":
        form = await visit.form()
        fields = {name: form[name] for name in fields}
        try:
            conflicts = await _conflicts(visit, form)
            if form["do"] == "register" and not conflicts and await _register(visit, form):
                return visit.go("/schema", name=form["name"])
            if visit.login.notices and visit.login.notices[-1].is_error:
                error = visit.login.notices.pop().text
        except BadForm as failure:
            error = str(failure)
    file = f"FILE.{_SUFFIXES.get(fields['type'], 'json')}"
    words = ("--type", fields["type"], *(("--compatibility", fields["compatibility"]) if fields["compatibility"] else ()))
    return visit.show(
        "schema_form.html",
        400 if error else 200,
        fields=fields,
        types=_TYPES,
        modes=_MODES,
        conflicts=conflicts,
        error=error,
        command=visit.command("schema", "check", fields["name"] or "NAME", file, *words),
        register_command=visit.command("schema", "register", fields["name"] or "NAME", file, *words),
    )


def _definition(form: Form) -> bytes:
    return form.files.get("file") or form["definition"].replace("\r\n", "\n").encode()


async def _conflicts(visit: Visit, form: Form) -> list[str]:
    if form["type"] not in _TYPES or (form["compatibility"] and form["compatibility"] not in _MODES) or not form["name"].strip():
        raise BadForm("give a name, a type and a definition")
    binary = base64.b64encode(_definition(form)).decode()
    reply = await visit.call(
        "schema.check", name=form["name"].strip(), type=form["type"], binary=binary, compatibility=form["compatibility"]
    )
    found: list[str] = reply["conflicts"]
    return found


async def _register(visit: Visit, form: Form) -> bool:
    name, type = form["name"].strip(), form["type"]
    words = ["--compatibility", form["compatibility"]] if form["compatibility"] else []
    command = visit.command("schema", "register", name, f"FILE.{_SUFFIXES[type]}", "--type", type, *words)
    work = visit.client.register_schema(name, type, _definition(form), compatibility=form["compatibility"])
    return await visit.act(f"Register schema {name}", command, work, note=lambda version: f"version {version}")


async def delete(visit: Visit) -> Response:
    name, version = visit.given("name"), visit.number("version", 0)
    found = await visit.call("schema.describe", name=name, version=version)
    words = ["--version", version] if version else []
    command = visit.command("schema", "delete", name, *words, "--yes")
    error = ""
    if visit.request.method == "POST":
        form = await visit.form()
        if form["confirm"] == name:
            if await visit.act(f"Delete schema {name}", command, visit.client.delete_schema(name, version)):
                return visit.go("/schemas")
            error = visit.login.notices.pop().text
        else:
            error = "The name does not match: nothing was deleted."
    what = f"version {version}" if version else f"all {len(found['versions'])} versions"
    return visit.show(
        "confirm.html",
        400 if error else 200,
        title="Delete a schema",
        text=f"This deletes {what} of the schema. A schema that a topic requires cannot be deleted.",
        name=name,
        button="Delete schema",
        action_path="/schema/delete",
        action_query={"name": name, "version": version or ""},
        back_path="/schema",
        back_query={"name": name},
        error=error,
        command=command,
    )
