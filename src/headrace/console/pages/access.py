"""Access: users, roles, rules and keys, and whether a user may do something, and why."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.responses import Response

from headrace.console.logins import Notice
from headrace.console.visits import BadForm, Form, Visit
from headrace.server.units import parse_duration

KINDS: Final = ("topic", "group", "transaction", "writer", "schema", "broker")
ACTIONS: Final = ("publish", "read", "create", "delete", "alter", "describe", "commit", "admin")


def shown(grant: dict[str, Any]) -> str:
    """Return a resource in the syntax of the command line."""
    name = str(grant["name"])
    if grant["kind"] == "*":
        return "everything"
    if grant["match"] == "prefix":
        return f"{grant['kind']}:{name}*"
    return f"{grant['kind']}:{name[:-1]}\\*" if name.endswith("*") else f"{grant['kind']}:{name}"


def resource_of(text: str) -> dict[str, str]:
    """Parse KIND:NAME; a * at the end makes it a prefix. Raises `BadForm`."""
    kind, colon, name = text.strip().partition(":")
    if not colon or kind not in KINDS:
        raise BadForm(f"{text[:60]!r} is not KIND:NAME, with KIND one of {', '.join(KINDS)}")
    if name.endswith("\\*"):
        return {"kind": kind, "match": "literal", "name": name[:-2] + "*"}
    return {"kind": kind, "match": "prefix", "name": name[:-1]} if name.endswith("*") else {"kind": kind, "match": "literal", "name": name}


def actions_of(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return list(ACTIONS)
    for word in words:
        if word not in ACTIONS:
            raise BadForm(f"{word[:40]!r} is no action; expected some of {', '.join(ACTIONS)}")
    if not words:
        raise BadForm("choose at least one action")
    return words


def scopes_of(text: str) -> list[dict[str, object]]:
    """Parse lines of ACTIONS@KIND:NAME. Raises `BadForm`."""
    found: list[dict[str, object]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        actions, at, resource = line.partition("@")
        if not at:
            raise BadForm(f"{line[:60]!r} is not ACTIONS@KIND:NAME, such as read@topic:orders")
        found.append({"actions": actions_of(actions), **resource_of(resource)})
    return found


def _scope_words(option: str, text: str) -> list[str]:
    return [word for line in filter(None, map(str.strip, text.splitlines())) for word in (option, line)]


async def _do(visit: Visit, works: dict[str, Callable[[Form], Awaitable[None]]]) -> str:
    """Do the action that the form names. Return the error of its fields."""
    form = await visit.form()
    work = works.get(form["do"])
    if work is None:
        raise BadForm(f"unknown action {form['do'][:40]!r}")
    try:
        await work(form)
    except BadForm as failure:
        return str(failure)
    return ""


# Users.


async def users(visit: Visit) -> Response:
    found = await visit.ask(visit.client.list_users())
    status = await visit.call("status")
    return visit.show(
        "access_users.html",
        users=found,
        roles=[role["name"] for role in await visit.manage("role.list")],
        access=status["access"],
        fields=Form({}, {}),
        error="",
        command=visit.command("user", "list"),
        create_command=visit.command("user", "create", "NAME", "--role", "consumer"),
    )


async def user(visit: Visit) -> Response:
    """Show a user; create, alter or delete one."""
    if visit.request.method == "POST":
        works = {"create": _create, "alter": _alter, "password": _password, "delete": _delete}

        def bound(work: Callable[[Visit, Form], Awaitable[None]]) -> Callable[[Form], Awaitable[None]]:
            return lambda form: work(visit, form)

        error = await _do(visit, {name: bound(work) for name, work in works.items()})
        if error:
            visit.login.notices.append(Notice(error, is_error=True))
        return visit.go("/access")
    name = visit.given("name")
    found = await visit.ask(visit.client.describe_user(name))
    return visit.show(
        "access_user.html",
        user=found,
        roles=[role["name"] for role in await visit.manage("role.list")],
        command=visit.command("user", "describe", name),
        alter_command=visit.command("user", "alter", name, *(word for role in found.roles for word in ("--role", role))),
        password_command=visit.command("user", "password", name),
        delete_command=visit.command("user", "delete", name, "--yes"),
    )


async def _create(visit: Visit, form: Form) -> None:
    name, roles = form["name"].strip(), form.all("role")
    if form["password"] != form["again"]:
        raise BadForm("the passwords differ")
    words = [word for role in roles for word in ("--role", role)] + ([] if form["password"] else ["--no-password"])
    await visit.act(
        f"Create user {name}", visit.command("user", "create", name, *words), visit.client.create_user(name, form["password"], roles)
    )


async def _alter(visit: Visit, form: Form) -> None:
    name, roles, is_enabled = form["name"], form.all("role"), form["enabled"] == "yes"
    words = [word for role in roles for word in ("--role", role)] or ["--no-roles"]
    command = visit.command("user", "alter", name, *words, "--enable" if is_enabled else "--disable")
    await visit.act(f"Alter user {name}", command, visit.client.alter_user(name, roles, enabled=is_enabled))


async def _password(visit: Visit, form: Form) -> None:
    name = form["name"]
    if not form["password"] or form["password"] != form["again"]:
        raise BadForm("the passwords differ, or are empty")
    work = visit.client.change_password(name, form["password"], form["old"])
    await visit.act(f"Change the password of {name}", visit.command("user", "password", name), work)


async def _delete(visit: Visit, form: Form) -> None:
    name = form["name"]
    if form["confirm"] != name:
        raise BadForm("the name does not match: nothing was deleted")
    await visit.act(f"Delete user {name}", visit.command("user", "delete", name, "--yes"), visit.client.delete_user(name))


# Roles.


async def roles(visit: Visit) -> Response:
    error = ""
    if visit.request.method == "POST":

        async def put(form: Form) -> None:
            name, grants = form["name"].strip(), scopes_of(form["grants"])
            words = [*_scope_words("--grant", form["grants"]), *(["--description", form["description"]] if form["description"] else [])]
            work = visit.client.manage("role.put", name=name, grants=grants, description=form["description"])
            await visit.act(f"Put role {name}", visit.command("acl", "role", name, *words), work)

        async def delete(form: Form) -> None:
            name = form["name"]
            await visit.act(
                f"Delete role {name}", visit.command("acl", "delete-role", name, "--yes"), visit.client.manage("role.delete", name=name)
            )

        error = await _do(visit, {"put": put, "delete": delete})
        if not error:
            return visit.go("/access/roles")
    rows = [
        {**role, "grants": [f"{','.join(grant['actions'])}@{shown(grant)}" for grant in role["grants"]]}
        for role in await visit.manage("role.list")
    ]
    return visit.show(
        "access_roles.html",
        400 if error else 200,
        rows=rows,
        error=error,
        command=visit.command("acl", "roles"),
        put_command=visit.command("acl", "role", "NAME", "--grant", "read,describe@topic:orders.*"),
    )


# Rules.


def _subject(form: Form) -> tuple[str, list[str]]:
    whom, name = form["whom"], form["name"].strip()
    if whom == "everybody":
        return "*", ["--for-everybody"]
    if whom not in ("user", "role") or not name:
        raise BadForm("name a user or a role")
    return f"{whom}:{name}", [f"--for-{whom}", name]


async def rules(visit: Visit) -> Response:
    error = ""
    if visit.request.method == "POST":

        async def add(form: Form) -> None:
            subject, words = _subject(form)
            actions = [action for action in ACTIONS if action in form.all("action")]
            if not actions:
                raise BadForm("choose at least one action")
            resource = resource_of(f"{form['kind']}:{form['resource']}")
            deny = ["--deny"] if form["effect"] == "deny" else []
            command = visit.command("acl", "create", ",".join(actions), shown(resource), *words, *deny)
            effect = "deny" if deny else "allow"
            work = visit.client.manage("rule.add", subject=subject, effect=effect, actions=actions, **resource)
            await visit.act(f"Add a rule for {subject}", command, work)

        async def remove(form: Form) -> None:
            actions, subject = actions_of(form["actions"]), form["subject"]
            grant = {"kind": form["kind"], "match": form["match"], "name": form["name"]}
            of, _, name = subject.partition(":")
            words = ["--for-everybody"] if subject == "*" else [f"--for-{of}", name]
            deny = ["--deny"] if form["effect"] == "deny" else []
            command = visit.command("acl", "delete", ",".join(actions), shown(grant), *words, *deny, "--yes")
            work = visit.client.manage("rule.remove", subject=subject, effect=form["effect"], actions=actions, **grant)
            await visit.act(f"Remove a rule of {subject}", command, work)

        error = await _do(visit, {"add": add, "remove": remove})
        if not error:
            return visit.go("/access/rules")
    rows = [{**rule, "resource": shown(rule)} for rule in await visit.manage("rule.list")]
    return visit.show(
        "access_rules.html",
        400 if error else 200,
        rows=rows,
        kinds=KINDS,
        actions=ACTIONS,
        error=error,
        command=visit.command("acl", "list"),
        add_command=visit.command("acl", "create", "read,describe", "topic:orders.*", "--for-user", "NAME"),
    )


# Keys.


async def keys(visit: Visit) -> Response:
    error, made = "", None
    if visit.request.method == "POST":
        created: list[dict[str, str]] = []

        async def create(form: Form) -> None:
            owner, scopes = form["owner"].strip(), scopes_of(form["scopes"])
            try:
                lasting = parse_duration(form["expires_in"]) if form["expires_in"].strip() else 0
            except ValueError as failure:
                raise BadForm(f"validity: {failure}") from None
            words = [*_scope_words("--scope", form["scopes"]), *(["--expires-in", form["expires_in"]] if lasting else [])]
            words += ["--description", form["description"]] if form["description"] else []
            expires_ms = time.time_ns() // 1_000_000 + lasting if lasting else 0

            async def work() -> None:
                created.append(
                    await visit.client.manage(
                        "key.create", owner=owner, scopes=scopes, expires_ms=expires_ms, description=form["description"]
                    )
                )

            await visit.act(f"Create a key of {owner}", visit.command("key", "create", owner, *words), work())

        def ending(operation: str, word: str) -> Callable[[Form], Awaitable[None]]:
            async def end(form: Form) -> None:
                id = form["id"]
                command = visit.command("key", operation, id, "--yes")
                await visit.act(f"{word} key {id}", command, visit.client.manage(f"key.{operation}", id=id))

            return end

        error = await _do(visit, {"create": create, "revoke": ending("revoke", "Revoke"), "delete": ending("delete", "Delete")})
        # A new key is shown in the reply itself and nowhere else.
        made = created[0] if created else None
        if not error and made is None:
            return visit.go("/access/keys")
    rows = [
        {**key, "scopes": [f"{','.join(scope['actions'])}@{shown(scope)}" for scope in key["scopes"]]}
        for key in await visit.manage("key.list")
    ]
    return visit.show(
        "access_keys.html",
        400 if error else 200,
        rows=rows,
        made=made,
        error=error,
        command=visit.command("key", "list"),
        create_command=visit.command("key", "create", "OWNER", "--scope", "read@topic:orders", "--expires-in", "90d"),
    )


# May X do Y on Z, and why.


async def check(visit: Visit) -> Response:
    name, action, kind, resource = (visit.given(one) for one in ("user", "action", "kind", "resource"))
    reply = None
    if name and action in ACTIONS and kind in KINDS:
        reply = await visit.manage(
            "rule.check", user=name, action=action, kind=kind, name=resource or ("headrace" if kind == "broker" else "")
        )
    return visit.show(
        "access_check.html",
        user=name,
        action=action,
        kind=kind or "topic",
        resource=resource,
        reply=reply,
        kinds=KINDS,
        actions=ACTIONS,
        command=visit.command("acl", "check", name or "USER", action or "read", f"{kind or 'topic'}:{resource or 'NAME'}"),
    )
