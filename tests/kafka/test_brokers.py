"""Two brokers on one Kafka at the same time: both publish and read; the coordinator does what needs an owner."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count, product
from typing import NamedTuple, cast

import pyarrow as pa
import pytest

import headrace
from headrace.access.access import Access, AccessSettings, Mode
from headrace.access.administration import Caller
from headrace.access.policy import Effect, Grant, Match, Rule
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.clients.blipmq.client import BlipMqClient
from headrace.clients.connect import Connecting
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import Settlement, Start
from headrace.engine.kafka.engine import KafkaEngine
from headrace.engine.kafka.settings import KafkaSettings
from headrace.errors import LoginFailed, NotCoordinator
from headrace.flight.client import FlightClient, Servers
from headrace.kafka_server import Cluster
from tests.access.harness import quick_passwords
from tests.conftest import Proof
from tests.kafka.test_protocols import read_by_kafka
from tests.protocols.peers import API_KEY, DIALECTS, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving
from tests.protocols.test_matrix import values_for, write
from tests.server.test_handover import OWNED

NAMES = count()
VOICES = PEERS + QUIC


NEW_TOPIC_REQUESTS: tuple[Callable[[FlyMqClient, str], Awaitable[object]], ...] = (
    lambda client, topic: client.describe_topic(topic),
    lambda client, topic: client.commit(topic, 0, group="g"),
    lambda client, topic: client.committed(topic, group="g"),
    lambda client, topic: client.subscribe(topic, group="g"),
    lambda client, topic: client.publish_delayed(topic, b"x", delay_ms=600_000),
)
"""Requests for a topic that was created through another broker."""


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


async def test_a_topic_is_known_to_the_other_broker_as_soon_as_it_is_created(
    kafka: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither broker creates a topic by itself, and each reads those of others at intervals longer than the test."""
    engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", "kafka.prefix=new.", "--set", "kafka.refresh=1m")
    arguments = (*engine, "--listen-flight", "127.0.0.1:0", "--set", "topics.auto_create=false")

    async def create(broker: Broker) -> str:
        name = f"new-{next(NAMES)}"
        async with flymq(broker) as client:
            await client.create_topic(name)
        return name

    with serving(tmp_path_factory.mktemp("first"), *arguments) as first, serving(tmp_path_factory.mktemp("second"), *arguments) as second:
        for here, there in ((first, second), (second, first)):
            for writer in VOICES:
                await write(there, writer, await create(here), [b"a"])
            for reader in (peer for peer in PEERS if not peer.needs_settlement):
                topic = await create(here)
                await write(here, reader, topic, [b"a"])
                async with following(reader, topic, there) as subscription:
                    assert (await anext(subscription)).value == b"a"
            async with flymq(there) as requester:
                for request in NEW_TOPIC_REQUESTS:
                    await request(requester, await create(here))
            with FlightClient(Servers.parse(address(there, "flight"))) as client:
                described, written = await create(here), await create(here)
                assert len((await asyncio.to_thread(client.describe, [described]))[described].partitions) == 1
                rows = pa.record_batch({"value": [b"a"]}, schema=pa.schema([("value", pa.binary())]))
                assert (await asyncio.to_thread(client.append, written, [rows])).records == 1


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


async def test_both_brokers_publish_to_one_partition_and_each_keeps_the_order_of_its_publishers(
    kafka: Cluster, brokers: Brokers, topic: str
) -> None:
    """A reader on each broker follows live and sees the same records as Kafka's own client: each one once."""
    count = 3_000

    async def publish(name: bytes, broker: Broker) -> None:
        async with flymq(broker) as client:
            for begin in range(0, count, 100):
                await (await client.send_many(topic, [b"%s %d" % (name, number) for number in range(begin, begin + 100)], partition=0))

    async def follow(peer: Peer, broker: Broker) -> list[bytes]:
        values: list[bytes] = []
        async with following(peer, topic, broker) as subscription:
            async for batch in subscription.batches():
                values += batch.values
                if len(values) >= 2 * count:
                    return values
        raise AssertionError("the subscription ended")

    figg = next(peer for peer in PEERS if peer.protocol == "figg")
    readers = [asyncio.create_task(follow(figg, broker)) for broker in brokers]
    await asyncio.gather(publish(b"one", brokers.coordinator), publish(b"two", brokers.other))
    seen = [await reader for reader in readers]
    assert seen[0] == seen[1]
    for name in (b"one", b"two"):
        assert [value for value in seen[0] if value.startswith(name)] == [b"%s %d" % (name, number) for number in range(count)]
    stored = await asyncio.to_thread(read_by_kafka, kafka, f"both.{topic}", 2 * count)
    assert [value for _, value in stored] == seen[0]


async def test_a_key_has_one_partition_and_an_expiry_holds_on_both_brokers(brokers: Brokers) -> None:
    name = f"both-{next(NAMES)}"
    async with flymq(brokers.coordinator) as one, flymq(brokers.other) as two:
        await one.create_topic(name, partitions=5)
        await known(name, brokers.other)
        for key in (b"a", b"b", b"c", b"d"):
            receipts = [await client.publish(name, b"x", key=key) for client in (one, two)]
            assert receipts[0].partition == receipts[1].partition
        expired = await two.publish_with_ttl(name, b"expired", ttl_ms=1, partition=4)
        kept = await two.publish_with_ttl(name, b"kept", ttl_ms=600_000, partition=4)
        assert expired.offset is not None and kept.offset is not None
        for client in (one, two):
            while (await client.end_offset(name, partition=4)) <= kept.offset:  # noqa: ASYNC110  # it reads the ends at intervals
                await asyncio.sleep(0.05)
            assert [message.value for message in await client.fetch(name, expired.offset, partition=4)] == [b"kept"]


@pytest.mark.parametrize("operation", OWNED)
async def test_what_only_the_coordinator_does_succeeds_at_the_other_broker(brokers: Brokers, topic: str, operation: str) -> None:
    async with flymq(brokers.other) as client:
        await client.publish(topic, b"at the other broker")
        await OWNED[operation](client, topic)
        await client.publish("another", b"the connection is good")


async def operate(peer: Peer, client: headrace.Client, topic: str) -> None:
    """Do what needs the coordinator in this protocol."""
    if peer.protocol == "rustlog":
        await client.commit(topic, 1, group="g")
        assert await client.committed(topic, group="g") == 1
    else:
        subscription = await client.subscribe(topic, "earliest" if peer.reads_history else "latest", settlement="auto")
        await client.publish(topic, b"settled")
        assert (await anext(subscription)).value == b"settled"
        await subscription.close()
    if peer.protocol == "fujin":
        async with client.transaction() as transaction:
            await transaction.publish(topic, b"in a transaction")


@pytest.mark.parametrize("peer", [peer for peer in VOICES + DIALECTS if peer.protocol in ("rustlog", "blipmq", "fujin")], ids=str)
async def test_every_protocol_with_requests_for_the_coordinator_needs_one_address(brokers: Brokers, topic: str, peer: Peer) -> None:
    async with asyncio.timeout(WAIT_SECONDS), connect(peer, brokers.other) as client:
        await operate(peer, client, topic)


async def test_a_group_with_a_member_at_each_broker_shares_the_partitions_and_settles(brokers: Brokers) -> None:
    name = f"both-{next(NAMES)}"
    async with flymq(brokers.other) as one, flymq(brokers.coordinator) as two:
        await one.create_topic(name, partitions=4)
        await known(name, brokers.coordinator)
        members = [await client.subscribe(name, group="shared", mode="ordered", settlement="auto") for client in (one, two)]
        for partition in range(4):
            await one.publish(name, b"%d" % partition, partition=partition)
        taken = [[(await anext(member)).value for _ in range(2)] for member in members]
        assert sorted(value for values in taken for value in values) == [b"0", b"1", b"2", b"3"]
        for member in members:
            await member.close()
        assert [await one.committed(name, group="shared", partition=partition) for partition in range(4)] == [1, 1, 1, 1]


async def test_flight_at_the_other_broker_appends_and_reads_and_forwards_the_rest(brokers: Brokers, topic: str) -> None:
    here = address(brokers.other, "flight")
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"1", b"2"], pa.binary())})

    def read(client: FlightClient) -> list[bytes]:
        held = client.describe([topic])[topic].partitions[0]
        return [row["value"] for batch in client.read(topic, 0, held.first, held.end, columns=("value",)) for row in batch.to_pylist()]

    def through_flight() -> None:
        with FlightClient(Servers.parse(here)) as client:
            client.append(topic, [rows], partition=0)
            assert read(client) == [b"1", b"2"]
            assert client.stage("h", [rows], topic=topic, writer=f"w-{topic}").records == 2
            assert client.publish(f"w-{topic}", 0, ["h"]).records == 2
            client.commit("g", {topic: {0: 2}})
            assert client.committed("g", topic) == {0: 2}
            while len(read(client)) < 4:  # this broker reads the ends at intervals
                time.sleep(0.05)
            assert read(client) == [b"1", b"2", b"1", b"2"]

    await asyncio.to_thread(through_flight)


def now() -> int:
    return time.time_ns() // 1_000_000


async def test_logins_and_rules_on_every_broker_are_those_of_the_coordinator(kafka: Cluster, proof: Proof) -> None:
    """The interval of the refresh is so long that only the long polls tell the other broker what has changed."""
    settings = KafkaSettings(kafka.bootstrap, prefix="logins.", refresh_ms=60_000)
    enforced = AccessSettings(Mode.ENFORCED)
    engines = [KafkaEngine(settings, clock=now) for _ in range(2)]
    accesses = [
        Access(engine, clock=now, random_bytes=secrets.token_bytes, settings=enforced, passwords=quick_passwords()) for engine in engines
    ]
    async with asyncio.timeout(WAIT_SECONDS):
        for engine, access in zip(engines, accesses, strict=True):
            await engine.open()
            await access.open()
        owner, other = accesses
        caller, root = Caller(Principal("", "flymq"), "127.0.0.1"), Caller(Principal("admin", "flymq", "password:1"), "127.0.0.1")
        await owner.administration.create_user(root, "ann", "a long password", ["consumer"])

        async def reaches(condition: Callable[[], bool]) -> None:
            while not condition():  # noqa: ASYNC110  # the change comes through Kafka
                await asyncio.sleep(0.005)

        await reaches(lambda: "ann" in other.policy.users)
        who = await other.log_in("ann", "a long password", caller)
        assert other.authorize(who, Action.READ, Resource("topic", "t"))
        with pytest.raises(NotCoordinator):
            await other.administration.create_user(root, "bob", "a long password", [])

        def is_denied() -> bool:
            return not other.authorize(who, Action.READ, Resource("topic", "t"))

        delays: list[float] = []
        denial = Rule("user:ann", Effect.DENY, Grant(frozenset((Action.READ,)), "topic", Match.LITERAL, "t"))
        for change, is_allowed in [(owner.administration.add_rule, False), (owner.administration.remove_rule, True)] * 5:
            await change(root, denial)
            changed_at = time.monotonic()
            await reaches(partial(other.authorize, who, Action.READ, Resource("topic", "t")) if is_allowed else is_denied)
            delays.append(time.monotonic() - changed_at)
        proof("ms at most until another broker obeyed a changed rule", round(1000 * max(delays)))
        await owner.administration.delete_user(root, "ann")
        await reaches(is_denied)
        with pytest.raises(LoginFailed):
            await other.log_in("ann", "a long password", caller)
        for engine, access in zip(engines, accesses, strict=True):
            await access.close()
            await engine.close()


async def test_a_subscription_without_settlement_works_on_every_broker(brokers: Brokers, topic: str) -> None:
    blipmq = next(peer for peer in PEERS if peer.protocol == "blipmq")
    async with asyncio.timeout(WAIT_SECONDS), connect(blipmq, brokers.other) as client:
        subscriptions = [await cast(BlipMqClient, client).subscribe(topic, qos=0) for _ in range(2)]
        async with flymq(brokers.coordinator) as publisher:
            await publisher.publish(topic, b"live")
        for subscription in subscriptions:
            assert (await anext(subscription)).value == b"live"


@pytest.mark.parametrize("which", ["coordinator", "other"])
def test_the_status_of_a_broker_says_where_the_coordinator_is(brokers: Brokers, which: str) -> None:
    with FlightClient(Servers.parse(address(getattr(brokers, which), "flight"))) as client:
        server = client.status().server
    assert server is not None
    assert (server.is_coordinator, server.coordinator) == (which == "coordinator", brokers.coordinator.address)
