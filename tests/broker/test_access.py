"""The gate: no verb gets past it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker import Action, Broker, Principal, Resource, SettlementPolicy, authorizer
from headrace.broker.authorizer import Authorizer
from headrace.errors import NotAuthorized, UnknownMessage, UnknownStage
from headrace.records import RecordBatch
from tests.broker.stand import ANN, Stand

BOB = Principal("bob", "figg")


class Rules:
    """Ann may do everything, the others what is listed."""

    def __init__(self) -> None:
        self.allowed: set[tuple[str, Action, Resource]] = set()
        self.asked: list[tuple[str, Action, Resource]] = []

    def __call__(self, who: Principal, action: Action, resource: Resource) -> bool:
        self.asked.append((who.name, action, resource))
        return who == ANN or (who.name, action, resource) in self.allowed


VERBS: dict[str, tuple[Callable[[Broker], Any], Action, str]] = {
    "topic": (lambda broker: broker.topic(BOB, "t"), Action.DESCRIBE, "topic"),
    "create_topic": (lambda broker: broker.create_topic(BOB, "new"), Action.CREATE, "topic"),
    "ensure_topic": (lambda broker: broker.ensure_topic(BOB, "new"), Action.DESCRIBE, "topic"),
    "alter_topic": (lambda broker: broker.alter_topic(BOB, "t", partitions=2), Action.ALTER, "topic"),
    "delete_topic": (lambda broker: broker.delete_topic(BOB, "t"), Action.DELETE, "topic"),
    "publish": (lambda broker: broker.publish(BOB, "t", RecordBatch([b"x"])), Action.PUBLISH, "topic"),
    "check_ready": (lambda broker: broker.check_ready(BOB, "t", [b"x"]), Action.PUBLISH, "topic"),
    "prepare": (lambda broker: broker.prepare(BOB, "t", [b"x"]), Action.DESCRIBE, "topic"),
    "fetch": (lambda broker: broker.fetch(BOB, "t", 0, 0, bytes_max=1), Action.READ, "topic"),
    "check_reads": (lambda broker: broker.check_reads(BOB, "t"), Action.READ, "topic"),
    "bounds": (lambda broker: broker.bounds(BOB, "t", 0), Action.DESCRIBE, "topic"),
    "size_bytes": (lambda broker: broker.size_bytes(BOB, "t", 0), Action.DESCRIBE, "topic"),
    "wait_for_growth": (lambda broker: broker.wait_for_growth(BOB, {"t": {}}, 0), Action.DESCRIBE, "topic"),
    "offset_for_time": (lambda broker: broker.offset_for_time(BOB, "t", 0, 0), Action.DESCRIBE, "topic"),
    "cursor": (lambda broker: broker.cursor(BOB, "t", 0, 0, lambda _: None, credit_bytes=1), Action.READ, "topic"),
    "commit": (lambda broker: broker.commit(BOB, "g", {("t", 0): 1}), Action.COMMIT, "group"),
    "committed": (lambda broker: broker.committed(BOB, "g", "t", 0), Action.DESCRIBE, "group"),
    "lag": (lambda broker: broker.lag(BOB, "g"), Action.DESCRIBE, "group"),
    "delete_group": (lambda broker: broker.delete_group(BOB, "g"), Action.DELETE, "group"),
    "queue": (lambda broker: broker.queue(BOB, "g", "t", policy=SettlementPolicy()), Action.READ, "topic"),
    "begin": (lambda broker: broker.begin(BOB, id="tx"), Action.PUBLISH, "transaction"),
    "dead_letters": (lambda broker: broker.dead_letters(BOB, "t", records_max=1), Action.READ, "topic"),
    "move_to_dead_letters": (lambda broker: broker.move_to_dead_letters(BOB, "t", 0, 0), Action.READ, "topic"),
    "move_many_to_dead_letters": (lambda broker: broker.move_many_to_dead_letters(BOB, "t", [(0, 0, "")]), Action.READ, "topic"),
    "replay": (lambda broker: broker.replay(BOB, "t", ["0-0"]), Action.READ, "topic"),
    "purge_dead_letters": (lambda broker: broker.purge_dead_letters(BOB, "t"), Action.DELETE, "topic"),
    "publish_delayed": (lambda broker: broker.publish_delayed(BOB, "t", b"x", delay_ms=1), Action.PUBLISH, "topic"),
    "stage": (lambda broker: broker.stage(BOB, "i", "t", RecordBatch([b"x"]), writer="q"), Action.PUBLISH, "transaction"),
    "publish_staged": (lambda broker: broker.publish_staged(BOB, "q", 0, ["h"]), Action.PUBLISH, "transaction"),
    "last_version": (lambda broker: broker.last_version(BOB, "q"), Action.DESCRIBE, "transaction"),
    "forget_writer": (lambda broker: broker.forget_writer(BOB, "q"), Action.DELETE, "transaction"),
    "status": (lambda broker: broker.status(BOB), Action.DESCRIBE, "broker"),
}
AS_UNKNOWN = {"cancel_delayed", "seal", "drop_staged"}
"""What is not theirs is as unknown to them as what is not there."""
LISTS = {"topics", "groups", "dead_letter_counts", "delayed", "writers", "stages"}
"""These answer everybody, with what they may see."""
NOT_FOR_USERS = {"open", "close", "maintain", "access_changed"}


async def _guarded() -> tuple[Stand, Rules]:
    rules = Rules()
    stand = Stand(authorize=rules)
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    await stand.broker.commit(ANN, "g", {("t", 0): 0})
    await stand.broker.publish_delayed(ANN, "t", b"later", delay_ms=1_000)
    await stand.broker.stage(ANN, "h", "t", RecordBatch([b"x"]), writer="q")
    return stand, rules


def test_every_verb_of_the_broker_is_in_the_table() -> None:
    verbs = {name for name, _ in inspect.getmembers(Broker, inspect.isfunction) if not name.startswith("_")}
    assert verbs == set(VERBS) | AS_UNKNOWN | LISTS | NOT_FOR_USERS


def test_the_documented_modules_and_no_others_ask_the_authorizer() -> None:
    package = Path(inspect.getfile(authorizer)).parent
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\bauthorizer\.(check|allows|allows_topic)\(", path.read_text().replace("_authorizer", "authorizer"))
    }
    documented = set(re.findall(r"^    ([\w/]+\.py) ", authorizer.__doc__ or "", re.MULTILINE))
    assert asking == documented
    assert "broker.py" in documented


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_is_refused_to_those_who_may_not(verb: str) -> None:
    stand, _ = await _guarded()
    call, action, kind = VERBS[verb]
    appends = stand.engine.appends
    with pytest.raises(NotAuthorized) as caught:
        answer = call(stand.broker)
        if isinstance(answer, Awaitable):
            await answer
    assert (caught.value.principal, caught.value.action) == ("bob", action.value)
    assert caught.value.resource.startswith(kind)
    assert stand.engine.appends == appends
    assert [topic.name for topic in stand.engine.topics().values() if not topic.internal] == ["t"]
    await stand.broker.close()


async def test_what_is_not_theirs_is_as_unknown_to_them_as_what_is_not_there() -> None:
    stand, _ = await _guarded()
    appends = stand.engine.appends
    (waiting,) = stand.broker.delayed(ANN)
    for id in (waiting.id, "nothing"):
        with pytest.raises(UnknownMessage):
            await stand.broker.cancel_delayed(BOB, id)
    for handle in ("h", "nothing"):
        with pytest.raises(UnknownStage):
            await stand.broker.seal(BOB, handle)
        assert await stand.broker.drop_staged(BOB, [handle]) == 0
    assert stand.broker.delayed(ANN) == [waiting]
    assert [(stage.handle, stage.is_sealed) for stage in stand.broker.stages(ANN)] == [("h", False)]
    assert stand.engine.appends == appends
    await stand.broker.close()


async def test_lists_show_only_what_one_may_see() -> None:
    stand, rules = await _guarded()
    await stand.broker.create_topic(ANN, "u")
    await stand.broker.commit(ANN, "h", {("t", 0): 0})
    rules.allowed |= {("bob", Action.READ, Resource("topic", "u")), ("bob", Action.DESCRIBE, Resource("group", "h"))}
    assert [topic.name for topic in stand.broker.topics(BOB)] == ["u"]
    assert stand.broker.groups(BOB) == ["h"]
    assert [topic.name for topic in stand.broker.topics(ANN)] == ["t", "u"]
    await stand.broker.close()


async def test_a_transaction_asks_for_each_topic_and_group_it_touches() -> None:
    stand, rules = await _guarded()
    rules.allowed.add(("bob", Action.PUBLISH, Resource("transaction", "tx")))
    transaction = stand.broker.begin(BOB, id="tx")
    with pytest.raises(NotAuthorized):
        transaction.publish("t", RecordBatch([b"x"]))
    with pytest.raises(NotAuthorized):
        transaction.commit_offsets("g", {("t", 0): 1})
    rules.allowed.add(("bob", Action.COMMIT, Resource("group", "g")))
    stand.broker.access_changed()
    with pytest.raises(NotAuthorized, match="read topic 't'"):
        transaction.commit_offsets("g", {("t", 0): 1})
    await stand.broker.close()


async def test_whether_a_topic_exists_is_told_only_to_those_who_may_know() -> None:
    stand, _ = await _guarded()
    for name in ("t", "nowhere"):
        with pytest.raises(NotAuthorized):
            stand.broker.publish(BOB, name, RecordBatch([b"x"]))
        with pytest.raises(NotAuthorized):
            await stand.broker.fetch(BOB, name, 0, 0, bytes_max=1)
    await stand.broker.close()


async def test_changed_rules_count_after_access_changed() -> None:
    stand, rules = await _guarded()
    permission = ("bob", Action.PUBLISH, Resource("topic", "t"))
    with pytest.raises(NotAuthorized):
        stand.broker.publish(BOB, "t", RecordBatch([b"x"]))
    rules.allowed.add(permission)
    stand.broker.access_changed()
    await stand.broker.publish(BOB, "t", RecordBatch([b"x"]))
    rules.allowed.discard(permission)
    stand.broker.access_changed()
    with pytest.raises(NotAuthorized):
        stand.broker.publish(BOB, "t", RecordBatch([b"x"]))
    await stand.broker.close()


def test_a_question_is_asked_once() -> None:
    rules = Rules()
    gate = Authorizer(rules)
    for _ in range(3):
        gate.check(ANN, Action.READ, "topic", "t")
        assert not gate.allows(BOB, Action.READ, "topic", "t")
    assert len(rules.asked) == 2
    gate.forget()
    gate.check(ANN, Action.READ, "topic", "t")
    assert len(rules.asked) == 3


def test_the_same_name_through_another_protocol_is_another_question() -> None:
    gate = Authorizer(lambda who, action, resource: who.protocol == "figg")
    assert gate.allows(Principal("x", "figg"), Action.READ, "topic", "t")
    assert not gate.allows(Principal("x", "rustlog"), Action.READ, "topic", "t")
