"""Syntax of resources and actions: `topic:orders`, `topic:orders.*` (a prefix), `read,publish`."""

from __future__ import annotations

from typing import Final

import click

KINDS: Final = ("topic", "group", "transaction", "writer", "schema", "broker")
ACTIONS: Final = ("publish", "read", "create", "delete", "alter", "describe", "commit", "admin")
RESOURCE_HELP: Final = (
    "RESOURCE is KIND:NAME (topic, group, transaction, writer, schema or broker); a * at the end of NAME makes it a prefix."
)


class Resources(click.ParamType[dict[str, str]]):
    """Parameter type `KIND:NAME`. A backslash escapes a literal * at the end."""

    name = "RESOURCE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        kind, colon, name = str(value).partition(":")
        if not colon or kind not in KINDS:
            self.fail(f"{value!r} is not KIND:NAME, with KIND one of {', '.join(KINDS)}", param, ctx)
        if name.endswith("\\*"):
            return {"kind": kind, "match": "literal", "name": name[:-2] + "*"}
        if name.endswith("*"):
            return {"kind": kind, "match": "prefix", "name": name[:-1]}
        return {"kind": kind, "match": "literal", "name": name}


class Actions(click.ParamType[list[str]]):
    """Parameter type `read`, `read,publish` or `all`."""

    name = "ACTIONS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        if isinstance(value, list):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if words == ["all"]:
            return list(ACTIONS)
        for word in words:
            if word not in ACTIONS:
                self.fail(f"{word!r} is invalid; expected one of {', '.join(ACTIONS)}", param, ctx)
        return words


class Scopes(click.ParamType[dict[str, object]]):
    """Parameter type `ACTIONS@RESOURCE`."""

    name = "ACTIONS@RESOURCE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        if isinstance(value, dict):
            return value
        actions, at, resource = str(value).partition("@")
        if not at:
            self.fail(f"{value!r} is not ACTIONS@RESOURCE, such as read@topic:orders", param, ctx)
        return {"actions": Actions().convert(actions, param, ctx), **Resources().convert(resource, param, ctx)}


RESOURCE: Final = Resources()
ACTION_LIST: Final = Actions()
SCOPE: Final = Scopes()


def shown(grant: dict[str, str]) -> str:
    """Return a resource in command-line syntax."""
    name = grant["name"]
    if grant["match"] == "prefix":
        return f"{grant['kind']}:{name}*"
    return f"{grant['kind']}:{name[:-1]}\\*" if name.endswith("*") else f"{grant['kind']}:{name}"
