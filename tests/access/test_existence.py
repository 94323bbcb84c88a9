"""Existence oracles: whoever may not know of a topic gets the same answer whether it is there or not, through every protocol."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import pytest

from headrace.access.policy import Effect, Grant, Match, Rule
from headrace.broker import Action, BrokerSettings, Principal
from headrace.errors import BrokerError, InvalidRequest, NotAuthorized
from headrace.schemas import SchemaType
from headrace.sessions.figg.session import FiggSession
from headrace.sessions.fujin.session import FujinSession
from headrace.sessions.fujin.writer import WriterIds
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession
from headrace.wire.flymq import access_messages as a
from headrace.wire.rustlog import Dialect as RustLogDialect
from tests.access.stand import ADMIN, Guarded, guarded
from tests.access.test_matrix import BROKER, BROKER_CALLS, EXISTING, FLYMQ, SCHEMAS, World, flymq_peer, world
from tests.access.test_protocol_matrix import FIGG, FUJIN, RUSTLOG
from tests.access.world import ABSENT, PEOPLE, expected
from tests.broker.stand import Stand, turns
from tests.conftest import Proof
from tests.sessions.figg.peer import TestLink
from tests.sessions.fujin.support import StreamLink
from tests.sessions.rustlog.support import Peer as RustLogPeer
from tests.sessions.rustlog.support import Wire as RustLogWire

ROOT = ADMIN.who
KINDS = ("topic", "group", "transaction", "schema")


def is_hidden(who: str, protocol: str, name: str) -> bool:
    """Nothing of that name, and none of its dead letters, is theirs to use in any way."""
    places = [*((kind, name) for kind in KINDS), ("topic", f"{name}.dlq")]
    return not any(expected(who, protocol, action, *place) for action in Action for place in places)


def hidden(who: str, protocol: str) -> list[str]:
    return [name for name in EXISTING if is_hidden(who, protocol, name)] if is_hidden(who, protocol, ABSENT) else []


HIDING = [who for who in PEOPLE if hidden(who, "internal")]


def test_there_are_people_from_whom_topics_are_hidden() -> None:
    assert {"nobody", "alice", "bob", "carol", "stranger", "revoked key", "narrow key"} <= set(HIDING)


def unnamed(answer: object, name: str, stand: World) -> str:
    """The answer in words, without the name that was asked for. What belongs to the name is chosen by whoever asks."""
    text = str(answer)
    for part in (name, stand.waiting.get(name), stand.staged.get(name)):
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", "*", text) if part else text
    return text


async def outcome(call: Any) -> str:
    try:
        result = call()
        if isinstance(result, Awaitable):
            result = await result
    except BrokerError as error:
        return f"{error.code}: {error}"
    return repr(result)


@pytest.mark.parametrize("auto_create", [True, False])
@pytest.mark.parametrize("who", HIDING)
async def test_no_verb_tells_whether_a_hidden_topic_exists(who: str, auto_create: bool, proof: Proof) -> None:
    principal, cases = PEOPLE[who].at("internal"), 0
    async with world() as stand:
        stand.broker._settings = BrokerSettings(auto_create=auto_create)
        stand.waiting[ABSENT], stand.staged[ABSENT] = "none", "none"
        for verb, call in BROKER.items():
            told = {}
            for name in (ABSENT, *hidden(who, "internal")):
                told[name] = unnamed(await outcome(lambda n=name, c=call: c(stand, stand.broker, principal, n)), name, stand)
            assert set(told.values()) == {told[ABSENT]}, verb
            cases += len(told)
        for verb, (schema_call, _) in SCHEMAS.items():
            told = {}
            for name in (ABSENT, *hidden(who, "internal")):
                found = await outcome(lambda n=name, c=schema_call: c(stand.broker.schemas, principal, n))
                told[name] = unnamed(found, name, stand)
            assert set(told.values()) == {told[ABSENT]}, verb
            cases += len(told)
    proof("answers that tell nothing", cases)


@pytest.mark.parametrize("who", HIDING)
async def test_no_flymq_request_tells_whether_a_hidden_topic_exists(who: str, proof: Proof) -> None:
    cases = 0
    async with world() as stand:
        peer = flymq_peer(stand, PEOPLE[who].at("flymq"))
        for label, row in [*((hex(opcode), row) for opcode, row in FLYMQ.items()), *BROKER_CALLS.items()]:
            told = {}
            for name in (ABSENT, *hidden(who, "flymq")):
                told[name] = unnamed(await peer.one(row.request(name)), name, stand)
            if label not in ("0x40", "0x43"):  # a transaction has another id each time
                assert set(told.values()) == {told[ABSENT]}, label
                cases += len(told)
    proof("answers that tell nothing", cases)


@pytest.mark.parametrize("who", HIDING)
async def test_no_other_protocol_tells_whether_a_hidden_topic_exists(who: str, proof: Proof) -> None:
    cases = 0
    async with world() as stand:
        wire = RustLogWire()
        session = RustLogSession(wire, stand.broker, PEOPLE[who].at("rustlog"), RustLogContext(ticks_ns=iter(range(1 << 30)).__next__))
        peer = RustLogPeer(session, wire)
        for kind, row in RUSTLOG.items():
            told = {}
            for name in (ABSENT, *hidden(who, "rustlog")):
                told[name] = unnamed(await peer.exchange(RustLogDialect.JSON, row.request(name)), name, stand)
            if kind.__name__ not in ("MetricsFetch", "Ping"):
                assert set(told.values()) == {told[ABSENT]}, kind
                cases += len(told)
        session.lost()
        for label, row in FIGG.items():
            told = {}
            for name in (ABSENT, *hidden(who, "figg")):
                link = TestLink()
                figg = FiggSession(stand.broker, link, PEOPLE[who].at("figg"))
                figg.receive(row.request(name))
                await turns()
                told[name] = unnamed(link.closed, name, stand)
                figg.lost()
            assert set(told.values()) == {told[ABSENT]}, label
            cases += len(told)
        for request, row in FUJIN.items():
            told = {}
            for name in (ABSENT, *hidden(who, "fujin")):
                stream = StreamLink()
                fujin = FujinSession(stand.broker, stream, PEOPLE[who].at("fujin"), WriterIds())
                fujin.receive(row.request(name))
                await turns()
                refusals = re.findall(r"may not \w+ \w+ '[^']*'", bytes(stream.sent).decode(errors="replace"))
                told[name] = unnamed(refusals, name, stand)
                fujin.lost()
                await turns()
            assert set(told.values()) == {told[ABSENT]}, request
            cases += len(told)
    proof("answers that tell nothing", cases)


async def test_a_topic_that_one_may_not_see_is_refused_alike_with_and_without_auto_create() -> None:
    for auto_create in (True, False):
        stand = Stand(BrokerSettings(auto_create=auto_create), authorize=lambda who, action, resource: who.name == "ann")
        await stand.broker.open()
        await stand.broker.create_topic(Principal("ann"), "there")
        answers = set()
        for name in ("there", "gone!"):
            with pytest.raises(NotAuthorized) as refused:
                await stand.broker.ensure_topic(Principal("mallory"), name)
            answers.add(str(refused.value).replace(name, "NAME"))
        assert answers == {"mallory may not describe topic 'NAME'"}
        await stand.broker.close()


# Groups.


async def give(stand: Guarded, name: str, kind: str, called: str, *actions: Action) -> None:
    rule = Rule(f"user:{name}", Effect.ALLOW, Grant(frozenset(actions), kind, Match.LITERAL, called))
    await stand.administration.add_rule(ADMIN, rule)


async def test_the_lag_of_a_group_shows_no_topic_that_one_may_not_see() -> None:
    async with guarded() as stand:
        for topic in ("seen", "secret"):
            await stand.broker.create_topic(ROOT, topic)
            await stand.broker.commit(ROOT, "g", {(topic, 0): 0})
        who = await stand.user("ann")
        await give(stand, "ann", "group", "g", Action.DESCRIBE)
        for action in (Action.DESCRIBE, Action.READ, Action.PUBLISH):
            rule = Rule("user:ann", Effect.ALLOW, Grant(frozenset({action}), "topic", Match.LITERAL, "seen"))
            await stand.administration.add_rule(ADMIN, rule)
            assert [lag.topic for lag in stand.broker.lag(who, "g")] == ["seen"]
            await stand.administration.remove_rule(ADMIN, rule)
            assert stand.broker.lag(who, "g") == [], "read was revoked"


async def test_what_a_group_has_committed_does_not_tell_whether_a_topic_exists() -> None:
    async with guarded() as stand:
        await stand.broker.create_topic(ROOT, "secret", partitions=2)
        who = await stand.user("ann")
        await give(stand, "ann", "group", "g", Action.DESCRIBE)
        answers = set()
        for topic, partition in (("secret", 0), ("secret", 9), ("absent", 0)):
            with pytest.raises(NotAuthorized) as refused:
                stand.broker.committed(who, "g", topic, partition)
            answers.add(str(refused.value).replace(topic, "NAME"))
        assert answers == {"ann may not describe topic 'NAME'"}


# Schemas.


async def test_a_schema_in_use_names_the_topic_to_those_only_who_may_know_of_it() -> None:
    async with guarded() as stand:
        await stand.broker.create_topic(ROOT, "secret")
        await stand.broker.schemas.register(ROOT, "s", SchemaType.JSON, b"{}")
        await stand.broker.schemas.require(ROOT, "secret", "s")
        who = await stand.user("ann")
        await give(stand, "ann", "schema", "s", Action.DELETE)
        with pytest.raises(InvalidRequest, match="a topic requires schema 's'"):
            await stand.broker.schemas.delete(who, "s")
        with pytest.raises(InvalidRequest, match="topic 'secret' requires schema 's'"):
            await stand.broker.schemas.delete(ROOT, "s")


# Roles.


async def test_roles_are_shown_to_those_who_hold_them_and_to_administrators() -> None:
    async with guarded() as stand:
        for role in ("clerk", "spy"):
            grant = Grant(frozenset({Action.READ}), "topic", Match.LITERAL, f"secret of {role}")
            await stand.administration.put_role(ADMIN, role, [grant], f"about secret of {role}")
        ann = await stand.user("ann", "clerk")
        narrow = await stand.administration.create_key(ADMIN, "ann", [Grant(frozenset({Action.READ}), "topic", Match.LITERAL, "t")])
        wide = await stand.administration.create_key(ADMIN, "ann", [])
        people = {
            "anonymous": Principal("anonymous", "flymq"),
            "ann": ann,
            "with an older password": Principal("ann", "flymq", "password:0"),
            "with a key": stand.access.verify_key(wide.text, ADMIN),
            "with a narrow key": stand.access.verify_key(narrow.text, ADMIN),
            "admin": ROOT,
        }
        shown = {}
        for label, who in people.items():
            assert who is not None
            peer = flymq_peer(stand, who)  # type: ignore[arg-type]  # what it needs of a world is a guarded broker
            told = "".join([str(await peer.one(a.AccessCall("role.list", b"{}"))), str(await peer.one(a.RoleList()))])
            assert "producer" in told, "the built-in roles are no secret"
            shown[label] = [role for role in ("clerk", "spy") if role in told]
        nothing: list[str] = []
        assert shown == {
            "anonymous": nothing,
            "ann": ["clerk"],
            "with an older password": nothing,
            "with a key": ["clerk"],
            "with a narrow key": nothing,
            "admin": ["clerk", "spy"],
        }
