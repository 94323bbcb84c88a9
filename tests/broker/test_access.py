"""Authorization of every broker method."""

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
from tests.broker.harness import ANN, Harness

BOB = Principal("bob", "figg")


class Rules:
    """Ann may do everything, other principals what is listed."""

    def __init__(self) -> None:
        self.allowed: set[tuple[str, Action, Resource]] = set()
        self.asked: list[tuple[str, Action, Resource]] = []

    def __call__(self, who: Principal, action: Action, resource: Resource) -> bool:
        self.asked.append((who.name, action, resource))
        return who == ANN or (who.name, action, resource) in self.allowed


METHODS: dict[str, tuple[Callable[[Broker], Any], Action, str]] = {
    "topic": (lambda broker: broker.topic(BOB, "t"), Action.DESCRIBE, "topic"),
    "create_topic": (lambda broker: broker.create_topic(BOB, "new"), Action.CREATE, "topic"),
    "ensure_topic": (lambda broker: broker.ensure_topic(BOB, "new"), Action.DESCRIBE, "topic"),
    "alter_topic": (lambda broker: broker.alter_topic(BOB, "t", partitions=2), Action.ALTER, "topic"),
    "delete_topic": (lambda broker: broker.delete_topic(BOB, "t"), Action.DELETE, "topic"),
    "publish": (lambda broker: broker.publish(BOB, "t", RecordBatch([b"x"])), Action.PUBLISH, "topic"),
    "publish_each": (lambda broker: broker.publish_each(BOB, ["t"], [b"x"]), Action.PUBLISH, "topic"),
    "publish_one": (lambda broker: broker.publish_one(BOB, "t", b"x"), Action.PUBLISH, "topic"),
    "check_ready": (lambda broker: broker.check_ready(BOB, "t", [b"x"]), Action.PUBLISH, "topic"),
    "prepare": (lambda broker: broker.prepare(BOB, "t", [b"x"]), Action.DESCRIBE, "topic"),
    "fetch": (lambda broker: broker.fetch(BOB, "t", 0, 0, bytes_max=1), Action.READ, "topic"),
    "locate": (lambda broker: broker.locate(BOB, "t", 0, 0, 0), Action.READ, "topic"),
    "read_now": (lambda broker: broker.read_now(BOB, "t", 0, 0, bytes_max=1), Action.READ, "topic"),
    "check_reads": (lambda broker: broker.check_reads(BOB, "t"), Action.READ, "topic"),
    "bounds": (lambda broker: broker.bounds(BOB, "t", 0), Action.DESCRIBE, "topic"),
    "size_bytes": (lambda broker: broker.size_bytes(BOB, "t", 0), Action.DESCRIBE, "topic"),
    "wait_for_growth": (lambda broker: broker.wait_for_growth(BOB, {"t": {}}, 0), Action.DESCRIBE, "topic"),
    "offset_for_time": (lambda broker: broker.offset_for_time(BOB, "t", 0, 0), Action.DESCRIBE, "topic"),
    "cursor": (lambda broker: broker.cursor(BOB, "t", 0, 0, lambda _: None, credit_bytes=1), Action.READ, "topic"),
    "commit": (lambda broker: broker.commit(BOB, "g", {("t", 0): 1}), Action.COMMIT, "group"),
    "stage_commit": (lambda broker: broker.stage_commit(BOB, "g", {("t", 0): 1}), Action.COMMIT, "group"),
    "committed": (lambda broker: broker.committed(BOB, "g", "t", 0), Action.DESCRIBE, "group"),
    "lag": (lambda broker: broker.lag(BOB, "g"), Action.DESCRIBE, "group"),
    "delete_group": (lambda broker: broker.delete_group(BOB, "g"), Action.DELETE, "group"),
    "reset_group": (lambda broker: broker.reset_group(BOB, "g", {("t", 0): 1}), Action.COMMIT, "group"),
    "members": (lambda broker: broker.members(BOB, "g"), Action.DESCRIBE, "group"),
    "join": (lambda broker: broker.join(BOB, "g", "t", policy=SettlementPolicy()), Action.READ, "topic"),
    "begin": (lambda broker: broker.begin(BOB, id="tx"), Action.PUBLISH, "transaction"),
    "begin_all": (lambda broker: broker.begin_all(BOB, 2), Action.PUBLISH, "transaction"),
    "dead_letters": (lambda broker: broker.dead_letters(BOB, "t", records_max=1), Action.READ, "topic"),
    "move_to_dead_letters": (lambda broker: broker.move_to_dead_letters(BOB, "t", 0, 0), Action.READ, "topic"),
    "move_many_to_dead_letters": (lambda broker: broker.move_many_to_dead_letters(BOB, "t", [(0, 0, "")]), Action.READ, "topic"),
    "replay": (lambda broker: broker.replay(BOB, "t", ["0-0"]), Action.READ, "topic"),
    "purge_dead_letters": (lambda broker: broker.purge_dead_letters(BOB, "t"), Action.DELETE, "topic"),
    "discard_dead_letters": (lambda broker: broker.discard_dead_letters(BOB, "t", ["0-0"]), Action.DELETE, "topic"),
    "publish_delayed": (lambda broker: broker.publish_delayed(BOB, "t", b"x", delay_ms=1), Action.PUBLISH, "topic"),
    "stage_delayed": (lambda broker: broker.stage_delayed(BOB, "t", [b"x"], [1], [None], [None]), Action.PUBLISH, "topic"),
    "stage": (lambda broker: broker.stage(BOB, "i", "t", RecordBatch([b"x"]), writer="q"), Action.PUBLISH, "writer"),
    "publish_staged": (lambda broker: broker.publish_staged(BOB, "q", 0, ["h"]), Action.PUBLISH, "writer"),
    "last_version": (lambda broker: broker.last_version(BOB, "q"), Action.DESCRIBE, "writer"),
    "forget_writer": (lambda broker: broker.forget_writer(BOB, "q"), Action.DELETE, "writer"),
    "status": (lambda broker: broker.status(BOB), Action.DESCRIBE, "broker"),
}
AS_UNKNOWN = {"cancel_delayed", "seal", "drop_staged"}
"""Methods that answer as if the object did not exist."""
LISTS = {"topics", "listed", "groups", "dead_letter_counts", "delayed", "delayed_count", "traffic", "writers", "stages", "may_describe"}
"""Methods that answer every principal with what it may see."""
NOT_FOR_USERS = {"open", "take_over", "check_coordinator", "with_new_topics", "close", "maintain", "measure", "access_changed"}


async def _guarded() -> tuple[Harness, Rules]:
    rules = Rules()
    harness = Harness(authorize=rules)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.commit(ANN, "g", {("t", 0): 0})
    await harness.broker.publish_delayed(ANN, "t", b"later", delay_ms=1_000)
    await harness.broker.stage(ANN, "h", "t", RecordBatch([b"x"]), writer="q")
    return harness, rules


def test_every_method_of_the_broker_is_in_the_table() -> None:
    methods = {name for name, _ in inspect.getmembers(Broker, inspect.isfunction) if not name.startswith("_")}
    assert methods == set(METHODS) | AS_UNKNOWN | LISTS | NOT_FOR_USERS


def test_only_the_methods_that_sessions_call_ask_the_authorizer() -> None:
    package = Path(inspect.getfile(authorizer)).parent
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    asking = {name for name, source in sources.items() if re.search(r"authorizer\.(check|allows|allows_topic)\(", source)}
    assert asking == {"broker.py", *(name for name in sources if name.startswith("operations/") and not name.endswith("__init__.py"))}
    imports = re.compile(r"^from headrace\.broker\.authorizer import .*\b(Action|Authorizer)\b", re.MULTILINE)
    knowing = {name for name, source in sources.items() if imports.search(source)}
    assert knowing - {"__init__.py"} == asking


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_the_permission_is_denied(method: str) -> None:
    harness, _ = await _guarded()
    call, action, kind = METHODS[method]
    appends = harness.engine.appends
    with pytest.raises(NotAuthorized) as caught:
        answer = call(harness.broker)
        if isinstance(answer, Awaitable):
            await answer
    assert (caught.value.principal, caught.value.action) == ("bob", action.value)
    assert caught.value.resource.startswith(kind)
    assert harness.engine.appends == appends
    assert [topic.name for topic in harness.engine.topics().values() if not topic.internal] == ["t"]
    await harness.broker.close()


async def test_what_is_not_theirs_is_as_unknown_to_them_as_what_is_not_there() -> None:
    harness, _ = await _guarded()
    appends = harness.engine.appends
    (waiting,) = harness.broker.delayed(ANN)
    for id in (waiting.id, "nothing"):
        with pytest.raises(UnknownMessage):
            await harness.broker.cancel_delayed(BOB, id)
    for handle in ("h", "nothing"):
        with pytest.raises(UnknownStage):
            await harness.broker.seal(BOB, handle)
        assert await harness.broker.drop_staged(BOB, [handle]) == 0
    assert harness.broker.delayed(ANN) == [waiting]
    assert [(stage.handle, stage.is_sealed) for stage in harness.broker.stages(ANN)] == [("h", False)]
    assert harness.engine.appends == appends
    await harness.broker.close()


async def test_lists_show_only_what_one_may_see() -> None:
    harness, rules = await _guarded()
    await harness.broker.create_topic(ANN, "u")
    await harness.broker.commit(ANN, "h", {("t", 0): 0})
    rules.allowed |= {("bob", Action.READ, Resource("topic", "u")), ("bob", Action.DESCRIBE, Resource("group", "h"))}
    assert [topic.name for topic in harness.broker.topics(BOB)] == ["u"]
    assert harness.broker.groups(BOB) == ["h"]
    assert [topic.name for topic in harness.broker.topics(ANN)] == ["t", "u"]
    await harness.broker.close()


async def test_a_transaction_asks_for_each_topic_and_group_it_touches() -> None:
    harness, rules = await _guarded()
    rules.allowed.add(("bob", Action.PUBLISH, Resource("transaction", "tx")))
    transaction = harness.broker.begin(BOB, id="tx")
    with pytest.raises(NotAuthorized):
        transaction.publish("t", RecordBatch([b"x"]))
    with pytest.raises(NotAuthorized):
        transaction.commit_offsets("g", {("t", 0): 1})
    rules.allowed.add(("bob", Action.COMMIT, Resource("group", "g")))
    harness.broker.access_changed()
    with pytest.raises(NotAuthorized, match="read topic 't'"):
        transaction.commit_offsets("g", {("t", 0): 1})
    await harness.broker.close()


async def test_whether_a_topic_exists_is_visible_only_with_a_permission() -> None:
    harness, _ = await _guarded()
    for name in ("t", "nowhere"):
        with pytest.raises(NotAuthorized):
            harness.broker.publish(BOB, name, RecordBatch([b"x"]))
        with pytest.raises(NotAuthorized):
            await harness.broker.fetch(BOB, name, 0, 0, bytes_max=1)
    await harness.broker.close()


async def test_changed_rules_count_after_access_changed() -> None:
    harness, rules = await _guarded()
    permission = ("bob", Action.PUBLISH, Resource("topic", "t"))
    with pytest.raises(NotAuthorized):
        harness.broker.publish(BOB, "t", RecordBatch([b"x"]))
    rules.allowed.add(permission)
    harness.broker.access_changed()
    await harness.broker.publish(BOB, "t", RecordBatch([b"x"]))
    rules.allowed.discard(permission)
    harness.broker.access_changed()
    with pytest.raises(NotAuthorized):
        harness.broker.publish(BOB, "t", RecordBatch([b"x"]))
    await harness.broker.close()


async def test_a_read_from_memory_ends_with_the_permission() -> None:
    harness, rules = await _guarded()
    permission = ("bob", Action.READ, Resource("topic", "t"))
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"]))
    rules.allowed.add(permission)
    assert harness.broker.read_now(BOB, "t", 0, 0, bytes_max=1) is not None
    rules.allowed.discard(permission)
    harness.broker.access_changed()
    with pytest.raises(NotAuthorized):
        harness.broker.read_now(BOB, "t", 0, 0, bytes_max=1)
    await harness.broker.close()


def test_a_question_is_asked_once() -> None:
    rules = Rules()
    under_test = Authorizer(rules)
    for _ in range(3):
        under_test.check(ANN, Action.READ, "topic", "t")
        assert not under_test.allows(BOB, Action.READ, "topic", "t")
    assert len(rules.asked) == 2
    under_test.forget()
    under_test.check(ANN, Action.READ, "topic", "t")
    assert len(rules.asked) == 3


def test_the_same_name_through_another_protocol_is_another_question() -> None:
    under_test = Authorizer(lambda who, action, resource: who.protocol == "figg")
    assert under_test.allows(Principal("x", "figg"), Action.READ, "topic", "t")
    assert not under_test.allows(Principal("x", "rustlog"), Action.READ, "topic", "t")
