"""Existence oracles: a principal that may not see a topic gets the same answer whether it exists or not, through every protocol."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace.access.policy import Effect, Grant, Match, Rule
from headrace.broker import Action, BrokerSettings, Principal
from headrace.errors import BrokerError, InvalidRequest, NotAuthorized
from headrace.flight.request import encode
from headrace.schemas import SchemaType
from headrace.sessions.figg.session import FiggSession
from headrace.sessions.fujin.session import FujinSession
from headrace.sessions.fujin.writer import WriterIds
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession
from headrace.wire.flymq import access_messages as a
from headrace.wire.rustlog import Dialect as RustLogDialect
from tests.access.harness import ADMIN, Guarded, guarded
from tests.access.test_flight_matrix import ACTIONS, PUTS, READS, act, flight_client, put, read
from tests.access.test_matrix import BROKER, BROKER_CALLS, EXISTING, FLYMQ, SCHEMAS, World, flymq_peer, world
from tests.access.test_protocol_matrix import BLIPMQ, FIGG, FUJIN, RUSTLOG, blipmq_peer
from tests.access.world import ABSENT, PEOPLE, expected
from tests.broker.harness import Harness, turns
from tests.conftest import Proof
from tests.sessions.figg.peer import TestLink
from tests.sessions.fujin.support import StreamLink
from tests.sessions.rustlog.support import Peer as RustLogPeer
from tests.sessions.wire import Wire

ROOT = ADMIN.who
KINDS = ("topic", "group", "transaction", "writer", "schema")


def is_hidden(who: str, protocol: str, name: str) -> bool:
    """Return whether the principal has no permission on the name or on its dead letters."""
    places = [*((kind, name) for kind in KINDS), ("topic", f"{name}.dlq")]
    return not any(expected(who, protocol, action, *place) for action in Action for place in places)


def hidden(who: str, protocol: str) -> list[str]:
    return [name for name in EXISTING if is_hidden(who, protocol, name)] if is_hidden(who, protocol, ABSENT) else []


HIDING = [who for who in PEOPLE if hidden(who, "internal")]


def test_there_are_people_from_whom_topics_are_hidden() -> None:
    assert {"anonymous", "alice", "bob", "carol", "stranger", "revoked key", "narrow key"} <= set(HIDING)


def unnamed(answer: object, name: str, harness: World) -> str:
    """Return the answer in words, without the requested name and what the caller chose for it."""
    text = str(answer)
    for part in (name, harness.waiting.get(name), harness.staged.get(name)):
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
async def test_no_broker_method_tells_whether_a_hidden_topic_exists(who: str, auto_create: bool, proof: Proof) -> None:
    principal, cases = PEOPLE[who].at("internal"), 0
    async with world() as harness:
        harness.broker._settings = BrokerSettings(auto_create=auto_create)
        harness.waiting[ABSENT], harness.staged[ABSENT] = "none", "none"
        for method, call in BROKER.items():
            answers = {}
            for name in (ABSENT, *hidden(who, "internal")):
                answers[name] = unnamed(await outcome(lambda n=name, c=call: c(harness, harness.broker, principal, n)), name, harness)
            assert set(answers.values()) == {answers[ABSENT]}, method
            cases += len(answers)
        for method, (schema_call, _) in SCHEMAS.items():
            answers = {}
            for name in (ABSENT, *hidden(who, "internal")):
                found = await outcome(lambda n=name, c=schema_call: c(harness.broker.schemas, principal, n))
                answers[name] = unnamed(found, name, harness)
            assert set(answers.values()) == {answers[ABSENT]}, method
            cases += len(answers)
    proof("answers that tell nothing", cases)


@pytest.mark.parametrize("who", HIDING)
async def test_no_flymq_request_tells_whether_a_hidden_topic_exists(who: str, proof: Proof) -> None:
    cases = 0
    async with world() as harness:
        peer = flymq_peer(harness, PEOPLE[who].at("flymq"))
        for label, row in [*((hex(opcode), row) for opcode, row in FLYMQ.items()), *BROKER_CALLS.items()]:
            answers = {}
            for name in (ABSENT, *hidden(who, "flymq")):
                answers[name] = unnamed(await peer.one(row.request(name)), name, harness)
            if label not in ("0x40", "0x43"):  # a transaction has a different id each time
                assert set(answers.values()) == {answers[ABSENT]}, label
                cases += len(answers)
    proof("answers that tell nothing", cases)


@pytest.mark.parametrize("who", HIDING)
async def test_no_other_protocol_tells_whether_a_hidden_topic_exists(who: str, proof: Proof) -> None:
    cases = 0
    async with world() as harness:
        wire = Wire()
        session = RustLogSession(wire, harness.broker, PEOPLE[who].at("rustlog"), RustLogContext(ticks_ns=iter(range(1 << 30)).__next__))
        peer = RustLogPeer(session, wire)
        for kind, row in RUSTLOG.items():
            answers = {}
            for name in (ABSENT, *hidden(who, "rustlog")):
                answers[name] = unnamed(await peer.exchange(RustLogDialect.JSON, row.request(name)), name, harness)
            if kind.__name__ not in ("MetricsFetch", "Ping"):
                assert set(answers.values()) == {answers[ABSENT]}, kind
                cases += len(answers)
        session.lost()
        for label, row in FIGG.items():
            answers = {}
            for name in (ABSENT, *hidden(who, "figg")):
                link = TestLink()
                figg = FiggSession(harness.broker, link, PEOPLE[who].at("figg"))
                figg.receive(row.request(name))
                await turns()
                answers[name] = unnamed(link.closed, name, harness)
                figg.lost()
            assert set(answers.values()) == {answers[ABSENT]}, label
            cases += len(answers)
        for request, row in FUJIN.items():
            answers = {}
            for name in (ABSENT, *hidden(who, "fujin")):
                stream = StreamLink()
                fujin = FujinSession(harness.broker, stream, PEOPLE[who].at("fujin"), WriterIds())
                fujin.receive(row.request(name))
                await turns()
                errors = re.findall(r"may not \w+ \w+ '[^']*'", bytes(stream.sent).decode(errors="replace"))
                answers[name] = unnamed(errors, name, harness)
                fujin.lost()
                await turns()
            assert set(answers.values()) == {answers[ABSENT]}, request
            cases += len(answers)
    proof("answers that tell nothing", cases)


@pytest.mark.parametrize("who", HIDING)
async def test_no_blipmq_frame_tells_whether_a_hidden_topic_exists(who: str, proof: Proof) -> None:
    cases = 0
    async with world() as harness, blipmq_peer(harness, PEOPLE[who].at("blipmq")) as peer:
        for kind, row in BLIPMQ.items():
            answers = {}
            for name in (ABSENT, *hidden(who, "blipmq")):
                answers[name] = unnamed(await peer.exchange(row.request(name)), name, harness)
            assert set(answers.values()) == {answers[ABSENT]}, kind
            cases += len(answers)
    proof("answers that tell nothing", cases)


def flight_calls(client: flight.FlightClient, harness: World, name: str) -> dict[str, Callable[[], object]]:
    return {
        **{kind: partial(act, client, flight.Action(kind, encode(row.request(harness, name)))) for kind, row in ACTIONS.items()},
        **{kind.__name__: partial(put, client, row.request(harness, name)) for kind, row in PUTS.items()},
        **{call: partial(read, client, call, name) for call in READS},
    }


async def flight_outcome(call: Callable[[], object]) -> str:
    """Return the result or the error of a call in words, without what gRPC adds about the connection."""
    try:
        return repr(await asyncio.to_thread(call))
    except (flight.FlightError, pa.ArrowException) as error:
        return f"{type(error).__name__}: {str(error).partition('gRPC client debug context')[0]}"


@pytest.mark.parametrize("who", HIDING)
async def test_no_flight_call_tells_whether_a_hidden_topic_exists(who: str, proof: Proof) -> None:
    cases = 0
    async with world() as harness, flight_client(harness, PEOPLE[who].at("flight")) as client:
        calls = {name: flight_calls(client, harness, name) for name in (ABSENT, *hidden(who, "flight"))}
        for label in calls[ABSENT]:
            answers = {name: unnamed(await flight_outcome(of_name[label]), name, harness) for name, of_name in calls.items()}
            assert set(answers.values()) == {answers[ABSENT]}, label
            cases += len(answers)
    proof("answers that tell nothing", cases)


async def test_a_topic_that_one_may_not_see_is_refused_alike_with_and_without_auto_create() -> None:
    for auto_create in (True, False):
        harness = Harness(BrokerSettings(auto_create=auto_create), authorize=lambda who, action, resource: who.name == "ann")
        await harness.broker.open()
        await harness.broker.create_topic(Principal("ann"), "there")
        answers = set()
        for name in ("there", "gone!"):
            with pytest.raises(NotAuthorized) as refused:
                await harness.broker.ensure_topic(Principal("mallory"), name)
            answers.add(str(refused.value).replace(name, "NAME"))
        assert answers == {"mallory may not describe topic 'NAME'"}
        await harness.broker.close()


# Groups.


async def give(harness: Guarded, name: str, kind: str, called: str, *actions: Action) -> None:
    rule = Rule(f"user:{name}", Effect.ALLOW, Grant(frozenset(actions), kind, Match.LITERAL, called))
    await harness.administration.add_rule(ADMIN, rule)


async def test_the_lag_of_a_group_shows_no_topic_that_one_may_not_see() -> None:
    async with guarded() as harness:
        for topic in ("seen", "secret"):
            await harness.broker.create_topic(ROOT, topic)
            await harness.broker.commit(ROOT, "g", {(topic, 0): 0})
        who = await harness.user("ann")
        await give(harness, "ann", "group", "g", Action.DESCRIBE)
        for action in (Action.DESCRIBE, Action.READ, Action.PUBLISH):
            rule = Rule("user:ann", Effect.ALLOW, Grant(frozenset({action}), "topic", Match.LITERAL, "seen"))
            await harness.administration.add_rule(ADMIN, rule)
            assert [lag.topic for lag in harness.broker.lag(who, "g")] == ["seen"]
            await harness.administration.remove_rule(ADMIN, rule)
            assert harness.broker.lag(who, "g") == [], "read was revoked"


async def test_what_a_group_has_committed_does_not_tell_whether_a_topic_exists() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "secret", partitions=2)
        who = await harness.user("ann")
        await give(harness, "ann", "group", "g", Action.DESCRIBE)
        answers = set()
        for topic, partition in (("secret", 0), ("secret", 9), ("absent", 0)):
            with pytest.raises(NotAuthorized) as refused:
                harness.broker.committed(who, "g", topic, partition)
            answers.add(str(refused.value).replace(topic, "NAME"))
        assert answers == {"ann may not describe topic 'NAME'"}


# Schemas.


async def test_a_schema_in_use_names_the_topic_to_those_only_who_may_know_of_it() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "secret")
        await harness.broker.schemas.register(ROOT, "s", SchemaType.JSON, b"{}")
        await harness.broker.schemas.require(ROOT, "secret", "s")
        who = await harness.user("ann")
        await give(harness, "ann", "schema", "s", Action.DELETE)
        with pytest.raises(InvalidRequest, match="a topic requires schema 's'"):
            await harness.broker.schemas.delete(who, "s")
        with pytest.raises(InvalidRequest, match="topic 'secret' requires schema 's'"):
            await harness.broker.schemas.delete(ROOT, "s")


# Roles.


async def test_roles_are_shown_to_those_who_hold_them_and_to_administrators() -> None:
    async with guarded() as harness:
        for role in ("clerk", "spy"):
            grant = Grant(frozenset({Action.READ}), "topic", Match.LITERAL, f"secret of {role}")
            await harness.administration.put_role(ADMIN, role, [grant], f"about secret of {role}")
        ann = await harness.user("ann", "clerk")
        narrow = await harness.administration.create_key(ADMIN, "ann", [Grant(frozenset({Action.READ}), "topic", Match.LITERAL, "t")])
        wide = await harness.administration.create_key(ADMIN, "ann", [])
        people = {
            "anonymous": Principal("anonymous", "flymq"),
            "ann": ann,
            "with an older password": Principal("ann", "flymq", "password:0"),
            "with a key": harness.access.verify_key(wide.text, ADMIN),
            "with a narrow key": harness.access.verify_key(narrow.text, ADMIN),
            "admin": ROOT,
        }
        shown = {}
        for label, who in people.items():
            assert who is not None
            peer = flymq_peer(harness, who)  # type: ignore[arg-type]  # it needs only the guarded broker of a world
            answers = "".join([str(await peer.one(a.AccessCall("role.list", b"{}"))), str(await peer.one(a.RoleList()))])
            assert "producer" in answers, "the built-in roles are public"
            shown[label] = [role for role in ("clerk", "spy") if role in answers]
        nothing: list[str] = []
        assert shown == {
            "anonymous": nothing,
            "ann": ["clerk"],
            "with an older password": nothing,
            "with a key": ["clerk"],
            "with a narrow key": nothing,
            "admin": ["clerk", "spy"],
        }
