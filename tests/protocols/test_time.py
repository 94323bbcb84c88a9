"""Delay, expiry and transactions seen through every protocol, and across a kill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import cast

import pytest

from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import Settlement, Start
from tests.protocols.peers import DIALECTS, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
VOICES = PEERS + DIALECTS + QUIC
readers = pytest.mark.parametrize("reader", VOICES, ids=str)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("time")) as broker:
        yield broker


@asynccontextmanager
async def flymq(broker: Broker) -> AsyncIterator[FlyMqClient]:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as client:
        yield cast(FlyMqClient, client)


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"time-{next(NAMES)}"
    async with flymq(broker) as client:
        await client.create_topic(name)
    return name


async def _read_until(broker: Broker, reader: Peer, topic: str, last: bytes, ready: asyncio.Event | None = None) -> list[bytes]:
    """Return what a subscription of this protocol delivers up to a certain value. `ready` is set when it is active."""
    start: Start = "start" if reader.reads_history else "end"
    settlement: Settlement = "auto" if reader.needs_settlement else "explicit"
    seen: list[bytes] = []
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(reader) as client:
        subscription = await client.subscribe(topic, start, settlement=settlement)
        if ready is not None:
            ready.set()
        async for message in subscription:
            seen.append(message.value)
            if message.value == last:
                break
        await subscription.close()
    return seen


@readers
async def test_a_delayed_record_comes_through_every_protocol_in_its_time_and_once(broker: Broker, topic: str, reader: Peer) -> None:
    ready = asyncio.Event()
    reading = asyncio.ensure_future(_read_until(broker, reader, topic, b"end", ready))
    await ready.wait()
    async with flymq(broker) as client:
        receipt = await client.publish_delayed(topic, b"later", delay_ms=150)
        await client.publish(topic, b"now")
        while len(await client.fetch(topic, 0)) < 2:
            assert time.time() * 1000 < receipt.deliver_at + 60_000
        assert time.time() * 1000 >= receipt.deliver_at
        await client.publish(topic, b"end")
    assert await reading == [b"now", b"later", b"end"]


@pytest.mark.parametrize("reader", [voice for voice in VOICES if voice.reads_history], ids=str)
async def test_an_expired_record_is_hidden_from_every_protocol(broker: Broker, topic: str, reader: Peer) -> None:
    async with flymq(broker) as client:
        await client.publish(topic, b"first")
        await client.publish_with_ttl(topic, b"short", ttl_ms=30)
        await client.publish(topic, b"end")
        while len(await client.fetch(topic, 0)) == 3:
            pass
    assert await _read_until(broker, reader, topic, b"end") == [b"first", b"end"]


@readers
async def test_a_transaction_is_seen_through_every_protocol_when_it_is_committed(broker: Broker, topic: str, reader: Peer) -> None:
    ready = asyncio.Event()
    reading = asyncio.ensure_future(_read_until(broker, reader, topic, b"end", ready))
    await ready.wait()
    async with flymq(broker) as client:
        dropped = client.transaction()
        await dropped.begin()
        await dropped.publish(topic, b"dropped")
        async with client.transaction() as transaction:
            await transaction.publish(topic, b"one")
            await transaction.publish(topic, b"two")
            await client.publish(topic, b"before")
        await dropped.rollback()
        await client.publish(topic, b"end")
    assert await reading == [b"before", b"one", b"two", b"end"]


async def test_what_was_in_flight_when_the_broker_was_killed_is_there_once_or_not_at_all(tmp_path: Path) -> None:
    """Four times: delayed messages and transactions under way, kill -9, start again."""
    due: dict[bytes, int] = {}
    committed = 0
    for life in range(4):
        with serving(tmp_path, quic=False) as broker:
            async with flymq(broker) as client:
                await client.create_topic("later")
                await client.create_topic("a")
                await client.create_topic("b")
                for number in range(15):
                    value = b"%d-%d" % (life, number)
                    receipt = await client.publish_delayed("later", value, delay_ms=number * 10)
                    due[value] = receipt.deliver_at
                    async with client.transaction() as transaction:
                        await transaction.publish("a", value)
                        await transaction.publish("b", value)
                    committed += 1
                broker.process.process.kill()
                broker.process.process.wait(WAIT_SECONDS)
                client.abandon()
    with serving(tmp_path, quic=False) as broker:
        async with flymq(broker) as client:
            while len(messages := await client.fetch("later", 0)) < len(due):
                pass
            assert sorted(message.value for message in messages) == sorted(due), "none lost, none twice"
            for value, deliver_at in due.items():
                offset = next(message.offset for message in messages if message.value == value)
                assert offset is not None
                early = await client.offset_for_time("later", deliver_at)
                assert offset >= early, "none early: its time is at or after the one it was due"
            first, second = await client.fetch("a", 0), await client.fetch("b", 0)
            assert [message.value for message in first] == [message.value for message in second], "none by half"
            assert len(first) == committed
