"""FlyMQ client: dead letters, delayed messages, time to live, transactions."""

from __future__ import annotations

import asyncio

import pytest

from headrace.clients.errors import OutcomeUnknown
from headrace.clients.flymq.advanced import DeadLetter
from headrace.errors import InvalidTransaction, UnknownMessage, UnknownTopic
from headrace.records import RecordBatch
from tests.clients.flymq.support import WAIT_SECONDS, serving
from tests.sessions.flymq.support import DEV, NOW


async def test_a_transaction_is_seen_when_it_is_left() -> None:
    async with serving() as server, await server.client() as client:
        await client.create_topic("a", partitions=2)
        async with client.transaction() as transaction:
            await transaction.publish("a", b"1", partition=1)
            await transaction.publish("b", b"2", key=b"k")
            await transaction.commit_offset("a", 1, group="g", partition=1)
            assert await client.fetch("a", 0, partition=1) == []
        assert [(receipt.topic, receipt.partition, receipt.offset) for receipt in transaction.receipts] == [("a", 1, 0), ("b", 0, 0)]
        assert [(message.key, message.value) for message in await client.fetch("b", 0)] == [(b"k", b"2")]
        assert await client.committed("a", group="g", partition=1) == 1


async def test_a_transaction_left_by_an_exception_is_rolled_back() -> None:
    async with serving() as server, await server.client() as client:
        with pytest.raises(ZeroDivisionError):
            async with client.transaction() as transaction:
                await transaction.publish("a", b"1")
                raise ZeroDivisionError
        assert await client.fetch("a", 0) == []
        with pytest.raises(InvalidTransaction):
            await transaction.commit()


async def test_a_transaction_is_gone_with_its_connection() -> None:
    async with serving() as server, await server.client() as client, asyncio.timeout(WAIT_SECONDS):
        transaction = client.transaction()
        await transaction.begin()
        await transaction.publish("a", b"1")
        server.cut()
        with pytest.raises((InvalidTransaction, OutcomeUnknown)):
            await transaction.publish("a", b"2")
        with pytest.raises(InvalidTransaction):
            await transaction.commit()
        assert await client.fetch("a", 0) == []


async def test_a_commit_without_an_answer_is_not_repeated() -> None:
    async with serving() as server, await server.client() as client, asyncio.timeout(WAIT_SECONDS):
        transaction = client.transaction()
        await transaction.begin()
        await transaction.publish("a", b"1")
        server.home.engine.hold("a")
        commit = asyncio.ensure_future(transaction.commit())
        await asyncio.sleep(0.05)
        server.cut()
        with pytest.raises(OutcomeUnknown):
            await commit
        server.home.engine.release("a")


async def test_the_client_rejects_a_transaction_that_has_not_begun() -> None:
    async with serving() as server, await server.client() as client:
        with pytest.raises(InvalidTransaction):
            await client.transaction().publish("a", b"1")


async def test_dead_letters_are_read_and_replayed() -> None:
    async with serving() as server, await server.client() as client:
        broker = server.home.broker
        await broker.create_topic(DEV, "t")
        await broker.publish(DEV, "t", RecordBatch([b"v"], [b"k"], [(("own", b"1"),)]))
        await broker.move_to_dead_letters(DEV, "t", 0, 0)
        (letter,) = await client.dead_letters("t")
        assert letter == DeadLetter("0-0", b"v", b"k", (("own", b"1"),), "moved", 0, 0, 0, NOW, NOW)
        await client.replay_dead_letter("t", letter.id)
        with pytest.raises(UnknownMessage):
            await client.replay_dead_letter("t", letter.id)
        assert await client.dead_letters("t") == []
        await client.purge_dead_letters("t")
        assert await client.dead_letters("t", replayed=True) == []


async def test_delay_and_time_to_live() -> None:
    async with serving() as server, await server.client() as client:
        receipt = await client.publish_delayed("t", b"later", delay_ms=60_000, key=b"k")
        assert receipt.deliver_at == NOW + 60_000
        await client.cancel_delayed(receipt.id)
        with pytest.raises(UnknownMessage):
            await client.cancel_delayed(receipt.id, topic="t")
        assert (await client.publish_with_ttl("t", b"short", ttl_ms=10)).offset == 0
        assert [message.value for message in await client.fetch("t", 0)] == [b"short"]
        server.home.now += 10
        assert await client.fetch("t", 0) == []


async def test_the_broker_has_operations_beyond_the_original() -> None:
    async with serving() as server, await server.client() as client:
        assert (await client.cluster_status()).node_count == 1
        assert (await client.call("topic.create", topic="t", config={"ttl_ms": 5}))["config"]["ttl_ms"] == 5
        with pytest.raises(UnknownTopic):
            await client.call("topic.describe", topic="none")
