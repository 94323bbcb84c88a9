"""The authorization matrix: people × protocols × requests × resources. Each answer is compared with an independent reading of the
policy.

A broker method, an opcode, a frame or a JSON call without a row fails the first test of its table.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.access.policy import decide
from headrace.broker import Action, Broker, Principal, Resource, SettlementPolicy
from headrace.broker.authorizer import Authorizer
from headrace.broker.operations.schemas import Schemas
from headrace.errors import BrokerError, NotAuthorized, UnknownMessage, UnknownStage
from headrace.records import RecordBatch
from headrace.schemas import Compatibility, SchemaType
from headrace.sessions.flymq.access import FlyMqAccess
from headrace.sessions.flymq.extensions import BrokerHandlers
from headrace.sessions.flymq.session import FlyMqSession
from headrace.wire.flymq import Opcode
from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq import schema_messages as sc
from headrace.wire.flymq.table import SPOKEN
from tests.access.harness import ADMIN_PASSWORD, Guarded
from tests.access.world import ABSENT, INTERNAL, NAMES, PEOPLE, TOPICS, expected, needed, policy
from tests.conftest import Proof
from tests.sessions.flymq.support import Peer as FlyMqPeer
from tests.sessions.wire import Wire

ROOT = Principal("admin")
EXISTING = [name for name in TOPICS if name != "cafe\u0301"]
SEES = "describe t | read t | publish t"
SEES_AND_GROUP = " | ".join(f"{action} t & describe g" for action in ("describe", "read", "publish"))
WRITES = " | ".join(
    f"{of_writer} a & {of_topic} t" for of_writer in ("describe", "publish") for of_topic in ("describe", "read", "publish")
)
WRITES_NOTHING_YET = "describe a | publish a"
CANCELS = "owns m & publish t | delete t"


class World(Guarded):
    """A broker with the policy of `tests/access/world.py`. The effect of each request is undone before the next."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, str] = {}
        self.staged: dict[str, str] = {}
        self.stages = 0

    async def open(self) -> None:
        await self.broker.open()
        await self.access.open(ADMIN_PASSWORD)
        self.reset_policy()
        for name in EXISTING:
            await self.restore(name)

    def reset_policy(self) -> None:
        self.access._policy = policy()
        self.broker.access_changed()

    async def restore(self, name: str) -> None:
        topics = self.engine.topics()
        if name in EXISTING and name not in topics:
            await self.broker.create_topic(ROOT, name)
            await self.broker.publish(ROOT, name, RecordBatch([b"x"]))
        elif name not in EXISTING and name in topics and not topics[name].internal:
            await self.broker.delete_topic(ROOT, name)
        if name not in EXISTING and self.broker.schemas.versions(ROOT, name):
            await self.broker.schemas.delete(ROOT, name)
        if name in EXISTING:
            if not self.broker.schemas.versions(ROOT, name):
                await self.broker.schemas.register(ROOT, name, SchemaType.JSON, b"{}")
            if not self.broker.lag(ROOT, name):
                await self.broker.commit(ROOT, name, {(name, 0): 0})
            if not any(one.id == self.waiting.get(name) for one in self.broker.delayed(ROOT)):
                self.waiting[name], _ = await self.broker.publish_delayed(ROOT, name, b"later", delay_ms=1_000_000, key=b"k")

            await self.restore_writer(name)

    async def restore_writer(self, name: str) -> None:
        """Restore the writer of that name: one record published as version 0, and one stage."""
        handles = [stage.handle for stage in self.broker.stages(ROOT) if stage.writer == name]
        if self.broker.last_version(ROOT, name) == 0 and handles == [self.staged[name]]:
            return
        await self.broker.drop_staged(ROOT, handles)
        if self.broker.last_version(ROOT, name) is not None:
            await self.broker.forget_writer(ROOT, name)
        self.stages += 1
        await self.broker.stage(ROOT, f"published {self.stages}", name, RecordBatch([b"x"]), writer=name)
        await self.broker.seal(ROOT, f"published {self.stages}")
        await self.broker.publish_staged(ROOT, name, 0, [f"published {self.stages}"])
        self.staged[name] = f"stage {self.stages}"
        await self.broker.stage(ROOT, self.staged[name], name, RecordBatch([b"x"]), writer=name)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    built = World()
    await built.open()
    try:
        yield built
    finally:
        await built.access.close()
        await built.broker.close()


@dataclass(frozen=True)
class Row:
    """`needs` of a topic that exists; `absent` of one that does not, where that differs."""

    request: Callable[[str], Any]
    needs: str
    absent: str | None = None

    def of(self, name: str) -> str:
        return self.needs if self.absent is None or name in EXISTING else self.absent


@dataclass
class Tally:
    """Answers that differ from the expected ones."""

    cases: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, case: str, got: bool, wanted: bool) -> None:
        self.cases += 1
        if got is not wanted:
            self.wrong.append(f"{case}: {'allowed' if got else 'denied'}")


# The rules themselves.


def test_every_decision_is_the_one_the_statements_say(proof: Proof) -> None:
    tally, rules = Tally(), policy()
    for who, person in PEOPLE.items():
        for protocol in ("flymq", "rustlog", "blipmq", "figg", "fujin", "internal"):
            for action in Action:
                for kind in ("topic", "group", "transaction", "writer", "schema", "broker"):
                    for name in [*NAMES, "headrace", ""]:
                        got = decide(rules, person.at(protocol), action, Resource(kind, name))
                        tally.add(f"{who} {protocol} {action} {kind}:{name}", got, expected(who, protocol, action, kind, name))
    assert tally.wrong == []
    proof("authorization decisions", tally.cases)


def test_the_authorizer_caches_answers_per_principal() -> None:
    authorizer = Authorizer(lambda who, action, resource: decide(policy(), who, action, resource))
    for _ in range(2):
        for who, person in PEOPLE.items():
            for name in NAMES:
                assert authorizer.allows(person.at("figg"), Action.READ, "topic", name) is expected(who, "figg", "read", "topic", name)


# The broker.


async def dropped(broker: Broker, who: Principal, handle: str) -> None:
    if not await broker.drop_staged(who, [handle]):
        raise UnknownStage(handle)


BROKER: dict[str, Callable[[World, Broker, Principal, str], Any]] = {
    "topic": lambda w, b, who, n: b.topic(who, n),
    "create_topic": lambda w, b, who, n: b.create_topic(who, n),
    "ensure_topic": lambda w, b, who, n: b.ensure_topic(who, n),
    "alter_topic": lambda w, b, who, n: b.alter_topic(who, n),
    "delete_topic": lambda w, b, who, n: b.delete_topic(who, n),
    "prepare": lambda w, b, who, n: b.prepare(who, n, [b"x"]),
    "check_ready": lambda w, b, who, n: b.check_ready(who, n, [b"x"]),
    "publish": lambda w, b, who, n: b.publish(who, n, RecordBatch([b"x"])),
    "publish_each": lambda w, b, who, n: b.publish_each(who, [n], [b"x"]),
    "publish_one": lambda w, b, who, n: b.publish_one(who, n, b"x"),
    "read_now": lambda w, b, who, n: b.read_now(who, n, 0, 0, bytes_max=1),
    "fetch": lambda w, b, who, n: b.fetch(who, n, 0, 0, bytes_max=1),
    "locate": lambda w, b, who, n: b.locate(who, n, 0, 0, 0),
    "check_reads": lambda w, b, who, n: b.check_reads(who, n),
    "bounds": lambda w, b, who, n: b.bounds(who, n, 0),
    "size_bytes": lambda w, b, who, n: b.size_bytes(who, n, 0),
    "wait_for_growth": lambda w, b, who, n: b.wait_for_growth(who, {n: {}}, 0),
    "offset_for_time": lambda w, b, who, n: b.offset_for_time(who, n, 0, 0),
    "cursor": lambda w, b, who, n: b.cursor(who, n, 0, 0, lambda _: None, credit_bytes=1).close(),
    "commit": lambda w, b, who, n: b.commit(who, n, {(n, 0): 0}),
    "stage_commit": lambda w, b, who, n: b.stage_commit(who, n, {(n, 0): 0}),
    "committed": lambda w, b, who, n: b.committed(who, n, n, 0),
    "lag": lambda w, b, who, n: b.lag(who, n),
    "delete_group": lambda w, b, who, n: b.delete_group(who, n),
    "reset_group": lambda w, b, who, n: b.reset_group(who, n, {(n, 0): 0}),
    "members": lambda w, b, who, n: b.members(who, n),
    "join": lambda w, b, who, n: b.join(who, n, n, policy=SettlementPolicy(dead_letters=False)).close(),
    "begin": lambda w, b, who, n: b.begin(who).abort(),
    "begin_all": lambda w, b, who, n: b.begin_all(who, 1)[0].abort(),
    "dead_letters": lambda w, b, who, n: b.dead_letters(who, n, records_max=1),
    "move_to_dead_letters": lambda w, b, who, n: b.move_to_dead_letters(who, n, 9, 0),
    "move_many_to_dead_letters": lambda w, b, who, n: b.move_many_to_dead_letters(who, n, [(9, 0, "")]),
    "replay": lambda w, b, who, n: b.replay(who, n, ["0-9"]),
    "purge_dead_letters": lambda w, b, who, n: b.purge_dead_letters(who, n),
    "discard_dead_letters": lambda w, b, who, n: b.discard_dead_letters(who, n, ["0-9"]),
    "publish_delayed": lambda w, b, who, n: b.publish_delayed(who, n, b"x", delay_ms=1_000_000),
    "stage_delayed": lambda w, b, who, n: b.stage_delayed(who, n, [b"x"], [1_000_000], [None], [None]).outcome,
    "cancel_delayed": lambda w, b, who, n: b.cancel_delayed(who, w.waiting.get(n, "9-9")),
    "stage": lambda w, b, who, n: b.stage(who, f"new {who.name} {n}", n, RecordBatch([b"x"]), writer=n),
    "seal": lambda w, b, who, n: b.seal(who, w.staged.get(n, "none")),
    "publish_staged": lambda w, b, who, n: b.publish_staged(who, n, 1, [w.staged.get(n, "none")]),
    "drop_staged": lambda w, b, who, n: dropped(b, who, w.staged.get(n, "none")),
    "last_version": lambda w, b, who, n: b.last_version(who, n),
    "forget_writer": lambda w, b, who, n: b.forget_writer(who, n),
    "status": lambda w, b, who, n: b.status(who),
}
BROKER_NEEDS = {
    "topic": SEES,
    "create_topic": "create t",
    "ensure_topic": SEES,
    "alter_topic": "alter t",
    "delete_topic": "delete t",
    "prepare": "publish t",
    "check_ready": "publish t",
    "publish": "publish t",
    "publish_each": "publish t",
    "publish_one": "publish t",
    "read_now": "read t",
    "fetch": "read t",
    "locate": "read t",
    "check_reads": "read t",
    "bounds": SEES,
    "size_bytes": SEES,
    "wait_for_growth": SEES,
    "offset_for_time": SEES,
    "cursor": "read t",
    "commit": "commit g & read t",
    "stage_commit": "commit g & read t",
    "committed": SEES_AND_GROUP,
    "lag": "describe g",
    "delete_group": "delete g",
    "reset_group": "commit g & read t",
    "members": "describe g",
    "join": "read t & commit g",
    "begin": "publish x",
    "begin_all": "publish x",
    "dead_letters": "read d",
    "move_to_dead_letters": "read t & publish d",
    "move_many_to_dead_letters": "read t & publish d",
    "replay": "read d & publish t",
    "purge_dead_letters": "delete d",
    "discard_dead_letters": "delete d",
    "publish_delayed": "publish t",
    "stage_delayed": "publish t",
    "cancel_delayed": CANCELS,
    "stage": "publish a & publish t",
    "seal": "publish a & publish t",
    "publish_staged": "publish a & publish t",
    "drop_staged": "publish a & publish t",
    "last_version": WRITES,
    "forget_writer": "delete a & publish t",
    "status": "describe b",
}
ABSENT_NEEDS = {
    "ensure_topic": "create t",
    "prepare": "create t & publish t",
    "cancel_delayed": "never",
    "seal": "never",
    "publish_staged": "publish a",
    "drop_staged": "never",
    "last_version": WRITES_NOTHING_YET,
    "forget_writer": "delete a",
}
"""Requirements that differ if the topic does not exist. An unknown message or stage is unknown to every principal."""
AS_UNKNOWN: dict[str, type[BrokerError]] = {"cancel_delayed": UnknownMessage, "seal": UnknownStage, "drop_staged": UnknownStage}
"""Methods that answer as if the object did not exist."""
LISTS = {"topics", "listed", "groups", "dead_letter_counts", "delayed", "delayed_count", "traffic", "writers", "stages"}
NOT_FOR_USERS = {
    "open",
    "close",
    "take_over",
    "check_coordinator",
    "with_new_topics",
    "maintain",
    "measure",
    "access_changed",
    "may_describe",
}


def test_every_method_of_the_broker_has_a_row() -> None:
    methods = {name for name, _ in inspect.getmembers(Broker, inspect.isfunction) if not name.startswith("_")}
    assert methods == set(BROKER) | LISTS | NOT_FOR_USERS
    assert set(BROKER) == set(BROKER_NEEDS)


async def allowed(answer: Callable[[], Any], error: type[BrokerError] = NotAuthorized) -> bool:
    """Return whether the call passed authorization, whatever its outcome."""
    try:
        result = answer()
        if isinstance(result, Awaitable):
            await result
    except (NotAuthorized, error):
        return False
    except BrokerError:
        pass
    return True


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_method_answers_as_the_policy_says(who: str, proof: Proof) -> None:
    tally, principal = Tally(), PEOPLE[who].at("internal")
    async with world() as harness:
        for method, call in BROKER.items():
            for name in NAMES:
                needs = BROKER_NEEDS[method] if name in EXISTING else ABSENT_NEEDS.get(method, BROKER_NEEDS[method])
                if name == INTERNAL and method == "ensure_topic":
                    needs = SEES  # it exists and is hidden
                got = await allowed(
                    lambda call=call, name=name: call(harness, harness.broker, principal, name),  # type: ignore[misc]
                    AS_UNKNOWN.get(method, NotAuthorized),
                )
                tally.add(f"{method} {name}", got, needed(who, "internal", needs, name))
                await harness.restore(name)
        visible = {name for name in EXISTING if needed(who, "internal", SEES, name)}
        tally.add("topics", {topic.name for topic in harness.broker.topics(principal)} == visible, True)
        slices = await harness.broker.listed(principal, lambda topics: {topic.name for topic in topics})
        tally.add("listed", set().union(*slices) == visible, True)
        groups = {name for name in EXISTING if needed(who, "internal", "describe g", name)}
        tally.add("groups", set(harness.broker.groups(principal)) == groups, True)
        waiting = [one for one in harness.broker.delayed(principal) if one.id in harness.waiting.values()]
        listed = {name for name in EXISTING if needed(who, "internal", f"{CANCELS} | read t", name)}
        tally.add("delayed", {one.topic for one in waiting} == listed, True)
        keys = {name for name in EXISTING if needed(who, "internal", "owns m & publish t | read t", name)}
        tally.add("keys of delayed", {one.topic for one in waiting if one.key is not None} == keys, True)
        owners = {name for name in EXISTING if needed(who, "internal", CANCELS, name)}
        tally.add("owners of delayed", {one.topic for one in waiting if one.owner is not None} == owners, True)
        writers = {name for name in EXISTING if needed(who, "internal", WRITES, name)}
        tally.add("writers", {entry.writer for entry in harness.broker.writers(principal)} == writers, True)
        tally.add("stages", {entry.writer for entry in harness.broker.stages(principal)} == writers, True)
        tally.add("dead letters", harness.broker.dead_letter_counts(principal) == {}, True)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)


SCHEMAS: dict[str, tuple[Callable[[Schemas, Principal, str], Any], str]] = {
    "register": (lambda s, who, n: s.register(who, n, SchemaType.JSON, b"{}"), "create s"),
    "conflicts": (lambda s, who, n: s.conflicts(who, n, SchemaType.JSON, b"{}"), "describe s"),
    "find": (lambda s, who, n: s.find(who, n), "describe s"),
    "faults": (lambda s, who, n: s.faults(who, n, b"{}"), "describe s"),
    "check": (lambda s, who, n: s.check(who, n, b"{}"), "describe s"),
    "set_compatibility": (lambda s, who, n: s.set_compatibility(who, n, Compatibility.NONE), "alter s"),
    "delete": (lambda s, who, n: s.delete(who, n), "delete s"),
    "require": (lambda s, who, n: s.require(who, n, n), "alter t & describe s"),
    "release": (lambda s, who, n: s.release(who, n), "alter t"),
    "requirement": (lambda s, who, n: s.requirement(who, n), "describe t"),
}
SCHEMA_LISTS = {"versions", "requirements"}


def test_every_method_of_schemas_has_a_row() -> None:
    assert {name for name, _ in inspect.getmembers(Schemas, inspect.isfunction) if not name.startswith("_")} == set(SCHEMAS) | SCHEMA_LISTS


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_method_of_schemas_answers_as_the_policy_says(who: str, proof: Proof) -> None:
    tally, principal = Tally(), PEOPLE[who].at("internal")
    async with world() as harness:
        schemas = harness.broker.schemas
        for method, (call, needs) in SCHEMAS.items():
            for name in NAMES:
                got = await allowed(lambda call=call, name=name: call(schemas, principal, name))  # type: ignore[misc]
                tally.add(f"{method} {name}", got, needed(who, "internal", needs, name))
                if name in EXISTING and schemas.requirement(ROOT, name) is not None:
                    await schemas.release(ROOT, name)
                await harness.restore(name)
        seen = {name for name in EXISTING if needed(who, "internal", "describe s", name)}
        tally.add("versions", {one.name for one in schemas.versions(principal)} >= seen, True)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)


# FlyMQ.


def broker_call(method: str, **body: object) -> v.BrokerCall:
    return v.BrokerCall(method, json.dumps(body).encode())


CREATES = "create t"
FLYMQ: dict[int, Row] = {
    0x01: Row(lambda n: m.ProduceBatch(n, [b"x"]), "publish t", "publish t & create t"),
    0x02: Row(lambda n: m.Consume(n, 0, 0), "read t", SEES),
    0x03: Row(lambda n: m.CreateTopic(n, 1), CREATES),
    0x04: Row(lambda n: m.Metadata(n), SEES),
    0x05: Row(lambda n: m.Subscribe(n, n, 0, m.Mode("latest")), SEES),
    0x06: Row(lambda n: m.Commit(n, n, 0, 0), "commit g & read t"),
    0x07: Row(lambda n: m.Fetch(n, 0, 0, 1), "read t", SEES),
    0x08: Row(lambda n: m.ListTopics(), ""),
    0x09: Row(lambda n: m.DeleteTopic(n), "delete t"),
    0x0A: Row(lambda n: m.ConsumeZeroCopy(n, 0, 0), "read t", SEES),
    0x0B: Row(lambda n: m.FetchBinary(n, 0, 0, 1), "read t", SEES),
    0x10: Row(lambda n: sc.RegisterSchema(n, sc.SchemaWord("json"), b"{}"), "create s"),
    0x11: Row(lambda n: sc.GetSchema(n), "describe s"),
    0x12: Row(lambda n: sc.ListSchemas(n), ""),
    0x13: Row(lambda n: sc.ValidateSchema(n, b"{}"), "describe s"),
    0x14: Row(lambda n: sc.ProduceWithSchema(n, n, b"{}"), "describe s & publish t", "describe s"),
    0x15: Row(lambda n: sc.DeleteSchema(n), "delete s"),
    0x20: Row(lambda n: v.FetchDlq(n, 1), "read d"),
    0x21: Row(lambda n: v.ReplayDlq(n, "0-9"), "read d & publish t"),
    0x22: Row(lambda n: v.PurgeDlq(n), "delete d"),
    0x30: Row(lambda n: v.ProduceDelayed(n, b"x", 1_000_000), "publish t", "create t & publish t"),
    0x31: Row(lambda n: v.CancelDelayed("9-9", n), ""),
    0x35: Row(lambda n: v.ProduceWithTtl(n, b"x", 1_000), "publish t", "create t & publish t"),
    0x40: Row(lambda n: v.TxnBegin(), "publish x"),
    0x41: Row(lambda n: v.TxnCommit("none of this connection"), ""),
    0x42: Row(lambda n: v.TxnRollback("none of this connection"), ""),
    0x43: Row(lambda n: v.TxnProduceBatch("none of this connection", n, [b"x"]), ""),
    0x50: Row(lambda n: v.ClusterJoin("x"), ""),
    0x51: Row(lambda n: v.ClusterLeave(), ""),
    0x52: Row(lambda n: v.ClusterStatus(), "describe b"),
    0x53: Row(lambda n: m.ClusterMetadata(n), SEES),
    0x60: Row(lambda n: m.GetOffset(n, n, 0), "describe g"),
    0x61: Row(lambda n: m.ResetOffset(n, n, 0, m.Mode("earliest")), "commit g & read t", SEES),
    0x62: Row(lambda n: m.ListGroups(), ""),
    0x63: Row(lambda n: m.DescribeGroup(n, n), "describe g"),
    0x64: Row(lambda n: m.GetLag(n, n, 0), "describe g & read t | describe g & publish t | describe g & describe t", SEES),
    0x65: Row(lambda n: m.DeleteGroup(n, n), "describe g & delete g", "describe g"),
    0x66: Row(lambda n: m.SeekToTimestamp(n, 0, 0, n), "commit g & read t", SEES),
    0x67: Row(lambda n: m.GroupJoin(n, n), "read t & commit g"),
    0x68: Row(lambda n: m.GroupTake(1, 1), ""),
    0x69: Row(lambda n: m.GroupSettle(1, m.ACK, []), ""),
    0x6A: Row(lambda n: m.GroupLeave(1), ""),
}
"""Requests about topics and groups."""
FLYMQ_ADMIN: dict[int, Callable[[], Any]] = {
    0x73: lambda: a.UserCreate("new", "a new password"),
    0x74: lambda: a.UserDelete("no such user"),
    0x75: lambda: a.UserUpdate("no such user", "", "", []),
    0x76: lambda: a.UserList(),
    0x77: lambda: a.UserGet("no such user"),
    0x78: lambda: a.AclSet("own", True, [], []),
    0x79: lambda: a.AclGet("own"),
    0x7A: lambda: a.AclDelete("own"),
    0x7B: lambda: a.AclList(),
    0x7C: lambda: a.PasswordChange("no such user", "a new password"),
    0x80: lambda: a.AuditQuery(),
    0x81: lambda: a.AuditExport(a.AuditQuery(), "json"),
    0xA0: lambda: a.AuditQuerySdk(),
    0xA1: lambda: a.AuditExportSdk(a.AuditQuery(), "json"),
}
"""For those who may administer."""
FLYMQ_FREE: dict[int, Callable[[], Any]] = {
    0x70: lambda: a.Auth("mallory", "wrong password"),
    0x72: lambda: a.WhoAmI(),
    0x7D: lambda: a.RoleList(),
}
"""For everybody."""
GRANT = {"actions": ["read"], "kind": "topic", "name": "own"}
ACCESS: dict[str, tuple[dict[str, object], bool]] = {
    "rule.list": ({}, True),
    "rule.add": ({**GRANT, "subject": "*"}, True),
    "rule.remove": ({**GRANT, "subject": "*"}, True),
    "rule.check": ({"user": "no such user", "action": "read", "kind": "topic", "name": "own"}, True),
    "role.list": ({}, False),
    "role.put": ({"name": "new"}, True),
    "role.delete": ({"name": "new"}, True),
    "key.list": ({}, True),
    "key.get": ({"id": "none"}, True),
    "key.create": ({"owner": "no such user"}, True),
    "key.alter": ({"id": "none"}, True),
    "key.revoke": ({"id": "none"}, True),
    "key.delete": ({"id": "none"}, True),
}
"""ACCESS, by call: its arguments, and whether it requires ADMIN."""
BROKER_CALLS: dict[str, Row] = {
    "topic.list": Row(lambda n: broker_call("topic.list"), ""),
    "topic.describe": Row(lambda n: broker_call("topic.describe", topic=n), SEES),
    "topic.create": Row(lambda n: broker_call("topic.create", topic=n), CREATES),
    "topic.alter": Row(
        lambda n: broker_call("topic.alter", topic=n), "alter t & describe t | alter t & read t | alter t & publish t", SEES
    ),
    "topic.delete": Row(lambda n: broker_call("topic.delete", topic=n), "delete t"),
    "group.list": Row(lambda n: broker_call("group.list"), ""),
    "group.lag": Row(lambda n: broker_call("group.lag", group=n), "describe g"),
    "group.members": Row(lambda n: broker_call("group.members", group=n), "describe g"),
    "group.reset": Row(lambda n: broker_call("group.reset", group=n, topic=n, offsets={"0": 0}), "commit g & read t"),
    "group.delete": Row(lambda n: broker_call("group.delete", group=n), "delete g"),
    "dlq.list": Row(lambda n: broker_call("dlq.list"), ""),
    "dlq.replay": Row(lambda n: broker_call("dlq.replay", topic=n, ids=["0-9"]), "read d & publish t"),
    "dlq.discard": Row(lambda n: broker_call("dlq.discard", topic=n, ids=["0-9"]), "delete d"),
    "delayed.list": Row(lambda n: broker_call("delayed.list", topic=n), ""),
    "writer.list": Row(lambda n: broker_call("writer.list"), ""),
    "writer.forget": Row(lambda n: broker_call("writer.forget", writer=n), "delete a & publish t", "delete a"),
    "stage.list": Row(lambda n: broker_call("stage.list"), ""),
    "stage.drop": Row(lambda n: broker_call("stage.drop", handles=["none of these"]), ""),
    "schema.list": Row(lambda n: broker_call("schema.list"), ""),
    "schema.describe": Row(lambda n: broker_call("schema.describe", name=n), "describe s"),
    "schema.check": Row(lambda n: broker_call("schema.check", name=n, type="json", definition="{}"), "describe s"),
    "schema.compatibility": Row(lambda n: broker_call("schema.compatibility", name=n, compatibility="none"), "alter s"),
    "schema.require": Row(lambda n: broker_call("schema.require", topic=n, name=n), "alter t & describe s"),
    "schema.release": Row(lambda n: broker_call("schema.release", topic=n), "alter t"),
    "schema.requirement": Row(lambda n: broker_call("schema.requirement", topic=n), "describe t"),
    "record.publish": Row(
        lambda n: broker_call("record.publish", topic=n, records=[{"value": "eA=="}]), "publish t", "publish t & create t"
    ),
    "record.details": Row(lambda n: broker_call("record.details", topic=n, partition=0, offset=0, count=1), "read t"),
    "status": Row(lambda n: broker_call("status"), ""),
    "topic.counters": Row(lambda n: broker_call("topic.counters"), ""),
}


def test_every_opcode_and_every_json_call_has_a_row() -> None:
    assert set(FLYMQ) | set(FLYMQ_ADMIN) | set(FLYMQ_FREE) | {Opcode.ACCESS, Opcode.BROKER} == SPOKEN
    harness = Guarded()
    assert set(ACCESS) == set(FlyMqAccess(harness.access, ROOT, "a:1").calls)
    assert set(BROKER_CALLS) == set(BrokerHandlers(harness.broker, lambda: ROOT).operations)
    harness.passwords.close()


def flymq_peer(harness: World, who: Principal) -> FlyMqPeer:
    wire = Wire()
    return FlyMqPeer(FlyMqSession(wire, harness.broker, who, access=FlyMqAccess(harness.access, who, "10.0.0.1:1")), wire)


async def flymq_allows(peer: FlyMqPeer, request: Any) -> bool:
    reply = await peer.one(request)
    return not (isinstance(reply, m.Failure) and reply.message.startswith("unauthorized"))


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_flymq_request_is_answered_as_the_policy_says(who: str, proof: Proof) -> None:
    tally, principal = Tally(), PEOPLE[who].at("flymq")
    async with world() as harness:
        peer = flymq_peer(harness, principal)
        for label, row in [*((hex(opcode), row) for opcode, row in FLYMQ.items()), *BROKER_CALLS.items()]:
            for name in NAMES:
                needs = row.of(name)
                if label == "group.delete" and not (name in EXISTING and needed(who, "flymq", "describe g", name)):
                    needs = ""  # a hidden group counts as unknown
                if label == "0x65" and not needed(who, "flymq", SEES, name):
                    needs = "describe g"  # so do its offsets in a hidden topic
                if label in ("0x60", "0x63", "0x65") and name not in EXISTING:
                    needs = "describe g"
                tally.add(f"{label} {name}", await flymq_allows(peer, row.request(name)), needed(who, "flymq", needs, name))
                await harness.restore(name)
        topics = await peer.one(m.ListTopics())
        assert isinstance(topics, m.TopicList)
        tally.add("list", set(topics.topics) == {name for name in EXISTING if needed(who, "flymq", SEES, name)}, True)
        requests = [(f"{opcode:#x}", make(), "admin b") for opcode, make in FLYMQ_ADMIN.items()]
        requests += [(f"{opcode:#x}", make(), "") for opcode, make in FLYMQ_FREE.items()]
        requests += [
            (method, a.AccessCall(method, json.dumps(body).encode()), "admin b" if admin else "")
            for method, (body, admin) in ACCESS.items()
        ]
        peer = flymq_peer(harness, principal)  # the first one uses the original's dialect by now
        for label, request, needs in requests:
            harness.reset_policy()
            tally.add(label, await flymq_allows(peer, request), needed(who, "flymq", needs, ""))
        harness.reset_policy()
        own = f"own entry of {who}"
        tally.add(own, await flymq_allows(peer, a.UserGet(principal.name)), True)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)


def test_the_names_tried_hold_every_kind_of_neighbour() -> None:
    assert ABSENT in NAMES and INTERNAL in NAMES
    assert len(NAMES) == len(set(NAMES)) == 12
