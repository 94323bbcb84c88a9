"""Two brokers on one Kafka at the same time: both publish and read; the coordinator does what needs an owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, product
from typing import NamedTuple, cast

import pytest

import headrace
from headrace.clients.connect import Connecting
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import Settlement, Start
from headrace.kafka_server import Cluster
from tests.protocols.peers import API_KEY, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving
from tests.protocols.test_matrix import values_for, write

NAMES = count()
VOICES = PEERS + QUIC


class Brokers(NamedTuple):
    """Two brokers on one Kafka."""

    coordinator: Broker
    other: Broker


@pytest.fixture(scope="module")
def brokers(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", "kafka.prefix=both.")
    arguments = (*engine, "--listen-flight", "127.0.0.1:0", "--set", "blipmq.retry_backoff=10m", "--set", "kafka.refresh=100ms")
    with serving(tmp_path_factory.mktemp("first"), *arguments) as first, serving(tmp_path_factory.mktemp("second"), *arguments) as second:
        yield Brokers(first, second)


def address(broker: Broker, kind: str) -> str:
    protocols = broker.process.ready["protocols"]
    assert isinstance(protocols, dict)
    return str(protocols[kind][0])


def connect(peer: Peer, *brokers: Broker) -> Connecting:
    """Connect to the first broker, with the addresses of all."""
    places = ",".join(address(broker, peer.kind) for broker in brokers)
    return headrace.connect(f"{peer.protocol}://{places}", api_key=API_KEY if peer.needs_api_key else None, options=peer.options)


@asynccontextmanager
async def flymq(*brokers: Broker) -> AsyncIterator[FlyMqClient]:
    async with asyncio.timeout(WAIT_SECONDS), connect(next(peer for peer in PEERS if peer.protocol == "flymq"), *brokers) as client:
        yield cast(FlyMqClient, client)


@asynccontextmanager
async def following(reader: Peer, topic: str, *brokers: Broker) -> AsyncIterator[headrace.Subscription]:
    async with asyncio.timeout(WAIT_SECONDS), connect(reader, *brokers) as client:
        start: Start = "earliest" if reader.reads_history else "latest"
        settlement: Settlement = "auto" if reader.needs_settlement else "explicit"
        subscription = await client.subscribe(topic, start, settlement=settlement)
        yield subscription
        await subscription.close()


async def known(topic: str, broker: Broker) -> None:
    """Wait until the broker has heard of the topic."""
    async with flymq(broker) as client:
        while topic not in await client.topics():  # noqa: ASYNC110  # it reads the topics of others at intervals
            await asyncio.sleep(0.05)


@pytest.fixture
async def topic(brokers: Brokers) -> str:
    """A topic that was created through the broker that is not the coordinator."""
    name = f"both-{next(NAMES)}"
    async with flymq(brokers.other) as client:
        await client.create_topic(name)
    await known(name, brokers.coordinator)
    return name


@pytest.mark.parametrize("writer, reader", [pytest.param(a, b, id=f"{a}-{b}") for a, b in product(VOICES, VOICES)])
async def test_each_broker_reads_live_what_the_other_publishes(brokers: Brokers, topic: str, writer: Peer, reader: Peer) -> None:
    """A reader with settlement needs the coordinator: its client knows both addresses and moves on."""
    values = [value for value in values_for(writer) if len(value) < 1024]
    for here, there in (brokers, reversed(brokers)):
        async with following(reader, topic, here, there) as subscription:
            before = 0 if here is brokers.coordinator or not reader.reads_history or reader.needs_settlement else len(values)
            for _ in range(before):
                await anext(subscription)
            await write(there, writer, topic, values)
            assert [(await anext(subscription)).value for _ in values] == values
