"""Schemas through a FlyMQ session."""

from __future__ import annotations

import json

import pytest

from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq.messages import Done, Failure, ProduceBatch, RecordMetadataBatch
from tests.sessions.flymq.support import DEV, NOW, Peer, placed, running_server

INT, NUM = b'{"type":"integer"}', b'{"type":"number"}'


def register(definition: bytes = INT, type: str = "json", compatibility: str = "") -> s.RegisterSchema:
    return s.RegisterSchema("n", s.SchemaWord(type), definition, compatibility)


async def call(peer: Peer, operation: str, **arguments: object) -> object:
    reply = await peer.one(v.BrokerCall(operation, json.dumps(arguments).encode()))
    assert isinstance(reply, v.BrokerReply), reply
    return json.loads(reply.body)


async def test_the_registry_through_its_opcodes() -> None:
    async with running_server() as server:
        peer = server.peer()
        assert await peer.one(register()) == s.SchemaEntry("n", "json", 1)
        assert await peer.one(register(NUM, compatibility="full")) == Failure(
            "not compatible with n v1: /: the writer may write number, the reader takes integer (forward)"
        )
        assert await peer.one(register(NUM)) == s.SchemaEntry("n", "json", 2)
        assert await peer.one(s.ListSchemas()) == s.SchemaEntries([s.SchemaEntry("n-v1", "json", 1), s.SchemaEntry("n-v2", "json", 2)])
        assert await peer.one(s.ListSchemas("other")) == s.SchemaEntries([])
        assert await peer.one(s.GetSchema("n", 1)) == s.SchemaReply([s.SchemaEntry("n", "json", 1)], "n-v1", INT, "backward", NOW // 1000)
        assert await peer.one(s.ValidateSchema("n", b"1.5")) == s.Validated(True, [])
        assert await peer.one(s.ValidateSchema("n", b"{}")) == s.Validated(False, ['/: {} is not of type "number"'])
        assert await peer.one(s.DeleteSchema("n", 1)) == Done(True, "schema deleted")
        assert await peer.refused(s.GetSchema("n", 1)) == "schema not found: n v1"
        assert await peer.refused(s.ValidateSchema("none", b"")) == "schema not found: none"
        assert await peer.refused(register(type="xml")) == "unsupported schema type: xml"
        assert await peer.refused(register(compatibility="odd")) == "unknown compatibility: odd"


async def test_produce_with_schema_takes_what_fits() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(register())
        assert await peer.one(s.ProduceWithSchema("t", "n", b"1")) == v.Placed("t", 0, 0, NOW, -1, 1)
        assert (await peer.refused(s.ProduceWithSchema("t", "n", b"{}"))).startswith("schema validation failed: /: {} is not of type")
        assert await peer.refused(s.ProduceWithSchema("t", "none", b"1")) == "schema not found: none"
        assert server.broker.bounds(DEV, "t", 0).end == 1


async def test_a_record_that_does_not_fit_takes_no_other_of_its_batch_down() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(register())
        await server.broker.create_topic(DEV, "t")
        await call(peer, "schema.require", topic="t", name="n")
        replies = await peer.exchange(ProduceBatch("t", [b"1", b"x", b"y", b"2", b"3", b"z"]))
        assert [isinstance(reply, Failure) for reply in replies] == [False, True, True, False, False, True]
        assert [placed(reply) for reply in replies if isinstance(reply, RecordMetadataBatch)] == [(0, 0), (0, 1), (0, 2)]


async def test_two_thousand_records_that_do_not_fit_are_refused_one_by_one() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(register())
        await server.broker.create_topic(DEV, "t")
        await call(peer, "schema.require", topic="t", name="n")
        assert all(isinstance(reply, Failure) for reply in await peer.exchange(ProduceBatch("t", [b"x"] * 2_000)))


async def test_dead_letters_are_acknowledged_as_nowhere() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(register())
        await server.broker.create_topic(DEV, "t")
        await call(peer, "schema.require", topic="t", name="n", on_invalid="dead_letter")
        replies = await peer.exchange(ProduceBatch("t", [b"x", b"1"]))
        assert [placed(reply) for reply in replies] == [(-1, (1 << 63) - 1), (0, 0)]


async def test_transactions_and_delayed_messages_are_held_to_it() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(register())
        await server.broker.create_topic(DEV, "t")
        await call(peer, "schema.require", topic="t", name="n")
        assert (await peer.refused(v.ProduceDelayed("t", b"x", 5))).startswith("schema validation failed")
        assert (await peer.refused(v.ProduceWithTtl("t", b"x", 5))).startswith("schema validation failed")
        begun = await peer.one(v.TxnBegin())
        assert isinstance(begun, v.TxnBegun)
        assert (await peer.refused(v.TxnProduceBatch(begun.transaction, "t", [b"x"]))).startswith("schema validation failed")


async def test_requests_without_an_opcode_are_operations_of_broker() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(register())
        await server.broker.create_topic(DEV, "t")
        shown = {"name": "n", "version": 1, "type": "json", "compatibility": "backward", "created": NOW}
        assert await call(peer, "schema.list") == [shown]
        required = {"topic": "t", "schema": "n", "version": 1, "on_invalid": "reject"}
        assert await call(peer, "schema.require", topic="t", name="n", version=1) == required
        assert await call(peer, "schema.requirement", topic="t") == required
        assert await call(peer, "schema.describe", name="n") == {**shown, "versions": [1], "topics": ["t"], "definition": INT.decode()}
        assert await call(peer, "schema.check", name="n", type="json", definition='{"type":"string"}') == {
            "conflicts": ["/: the writer may write integer, the reader takes string"]
        }
        assert await call(peer, "schema.compatibility", name="n", compatibility="none") == {}
        assert await peer.one(register(b'{"type":"string"}')) == s.SchemaEntry("n", "json", 2)
        assert await call(peer, "schema.release", topic="t") == {}
        assert await call(peer, "schema.requirement", topic="t") is None


@pytest.mark.parametrize("arguments", [b"[]", b'{"topic":1}', b'{"topic":"t","name":"n","version":-1}', b'{"odd":1}'])
async def test_arguments_that_make_no_sense_are_refused(arguments: bytes) -> None:
    async with running_server() as server:
        peer = server.peer()
        await server.broker.create_topic(DEV, "t")
        assert await peer.refused(v.BrokerCall("schema.require", arguments))
