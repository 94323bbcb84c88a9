"""Dead letters: reason and origin, replay and purge of one, several or all, with a preview."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.responses import Response

from headrace.clients.flymq.advanced import DeadLetter
from headrace.clients.flymq.client import FlyMqClient
from headrace.console.reading import decoder_of
from headrace.console.text import show_value
from headrace.console.visits import BadForm, Visit

PAGE_SIZE: Final = 50
_STEP: Final = 500
_ALL_MAX: Final = 10_000
"""Dead letters that one action on all of them takes."""
_LIST_BYTES_MAX: Final = 4 << 10


async def summary(visit: Visit) -> Response:
    rows = [row for row in await visit.call("dlq.list") if row["waiting"] or visit.given("all")]
    return visit.show("dead_letters.html", rows=sorted(rows, key=lambda row: -row["waiting"]), command=visit.command("dlq", "list"))


async def letters(visit: Visit) -> Response:
    topic, after, is_all = visit.given("topic"), visit.given("after"), bool(visit.given("replayed"))
    found = await visit.ask(visit.client.dead_letters(topic, records_max=PAGE_SIZE, after=after, replayed=is_all))
    decode = await visit.ask(decoder_of(visit.client, topic))
    waiting = {row["topic"]: row["waiting"] for row in await visit.call("dlq.list")}
    return visit.show(
        "dead_letters_of.html",
        topic=topic,
        rows=[(letter, show_value(letter.value, "auto", decode, bytes_max=_LIST_BYTES_MAX)) for letter in found],
        waiting=waiting.get(topic, 0),
        next=found[-1].id if len(found) == PAGE_SIZE else "",
        is_all=is_all,
        after=after,
        command=visit.command("dlq", "fetch", topic),
    )


async def _everything(client: FlyMqClient, topic: str) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    while len(found) < _ALL_MAX and (page := await client.dead_letters(topic, records_max=_STEP, after=found[-1].id if found else "")):
        found += page
    return found[:_ALL_MAX]


async def preview(visit: Visit) -> Response:
    """Show what an action would change."""
    form = await visit.form()
    topic, what = form["topic"], form["what"]
    if what not in ("replay", "discard", "replay-all", "purge-all"):
        raise BadForm(f"unknown action {what[:40]!r}")
    is_all = what.endswith("-all")
    every = await visit.ask(_everything(visit.client, topic))
    chosen = every if is_all else [letter for letter in every if letter.id in form.all("id")]
    if not chosen:
        raise BadForm("no dead letter is chosen, or they are gone: go back and choose again")
    return visit.show(
        "dead_letters_preview.html",
        topic=topic,
        what=what,
        rows=chosen[:PAGE_SIZE],
        ids=[letter.id for letter in chosen],
        count=len(chosen),
        command=_command(visit, topic, what, [letter.id for letter in chosen]),
    )


def _command(visit: Visit, topic: str, what: str, ids: list[str]) -> str:
    if what == "purge-all":
        return visit.command("dlq", "purge", topic, "--yes")
    if what == "replay-all":
        return visit.command("dlq", "replay", topic, "--all", "--yes")
    if what == "discard":
        return visit.command("dlq", "discard", topic, *ids[:20], "--yes")
    return visit.command("dlq", "replay", topic, *ids[:20])


async def do(visit: Visit) -> Response:
    form = await visit.form()
    topic, what, ids = form["topic"], form["what"], form.all("id")
    command, count = _command(visit, topic, what, ids), f"{len(ids):,} dead letter{'' if len(ids) == 1 else 's'}"
    client = visit.client

    async def in_steps(operation: str) -> None:
        for start in range(0, len(ids), _STEP):
            await client.call(operation, topic=topic, ids=ids[start : start + _STEP])

    works: dict[str, tuple[str, Callable[[], Awaitable[Any]]]] = {
        "replay": (f"Replay {count} of {topic}", lambda: in_steps("dlq.replay")),
        "replay-all": (f"Replay {count} of {topic}", lambda: in_steps("dlq.replay")),
        "discard": (f"Purge {count} of {topic}", lambda: in_steps("dlq.discard")),
        "purge-all": (f"Purge all dead letters of {topic}", lambda: client.purge_dead_letters(topic)),
    }
    if what not in works or (not ids and what != "purge-all"):
        raise BadForm("nothing to do")
    action, work = works[what]
    await visit.act(action, command, work())
    return visit.go("/dead-letters/of", topic=topic)
