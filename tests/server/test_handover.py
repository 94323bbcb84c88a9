"""Two brokers on one log, of which one is the coordinator. Clients of the other one are handed over to it when they need it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast

import pytest

import headrace
from headrace.access.access import Access, AccessSettings, Mode
from headrace.broker.broker import Broker
from headrace.clients.blipmq.client import BlipMqClient
from headrace.clients.errors import LoginRefused
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.clients.rustlog.client import RustLogOptions
from headrace.engine.contract import Appended, Engine, Ownership, Write
from headrace.engine.memory import MemoryEngine
from headrace.errors import HeadraceError, NotCoordinator
from headrace.net.counters import NetCounters
from headrace.net.listener import Listener
from headrace.net.relay import PREFACE, Place, Relay, Relays
from headrace.net.tls import Tls
from headrace.server.config_sources import resolve
from headrace.server.protocols import Protocols
from headrace.wire import flymq, rustlog
from headrace.wire.flymq import messages as m
from tests.access.harness import quick_passwords
from tests.canaries import secret
from tests.net import test_tls
from tests.net.polling import until

SECONDS = 120.0
API_KEY = secret("api-key")
PASSWORD = secret("password")


def now() -> int:
    return time.time_ns() // 1_000_000


class Shared:
    """The engine of another process on the same log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ownership = Ownership(is_owner=False, coordinator="somewhere:1")

    def append(self, writes: Sequence[Write], **options: Any) -> asyncio.Future[list[Appended]]:
        if not self.ownership.is_owner and any(write.topic.startswith("__") and write.topic != "__audit" for write in writes):
            raise NotCoordinator(self.ownership.coordinator)
        return self._engine.append(writes, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Node:
    """A broker with a listener for all TCP protocols."""

    def __init__(self, engine: Engine, mode: Mode = Mode.OPEN, wait_seconds: float = SECONDS) -> None:
        self.engine = engine
        self.access = Access(
            engine, clock=now, random_bytes=secrets.token_bytes, settings=AccessSettings(mode), passwords=quick_passwords()
        )
        self.broker = Broker(engine, clock=now, random_bytes=secrets.token_bytes, authorize=self.access.authorize)
        self.access.listen(self.broker.access_changed)
        self.counters = NetCounters()
        self.coordinator: Place | None = None
        """Where this broker believes the coordinator to be."""
        self.relays = Relays(
            self.counters,
            is_coordinator=lambda: self.broker.is_coordinator,
            place_of=lambda protocol: self.coordinator,
            context=test_tls.client,
            wait_seconds=wait_seconds,
        )
        config = resolve().config
        self.protocols = Protocols(self.broker, engine, config, self.access, clock=now, blipmq_keys={API_KEY: "ann"}, relays=self.relays)
        self.listener: Listener

    async def open(self, tls: Tls | None = None) -> None:
        await self.broker.open()
        await self.access.open(PASSWORD)
        await self.protocols.open()
        self.listener = await Listener.open("127.0.0.1", 0, self.protocols.named(()), counters=self.counters, tls=tls)

    async def close(self) -> None:
        await self.listener.drain(5)
        await self.protocols.close()
        await self.access.close()
        await self.broker.close()

    @property
    def place(self) -> Place:
        return Place(self.listener.host, self.listener.port)

    async def take_over(self) -> None:
        self.engine.ownership.is_owner = True
        await self.access.open()
        await self.protocols.take_over()
        await self.broker.take_over()
        self.relays.coordinator_changed()


class Pair:
    def __init__(self, mode: Mode = Mode.OPEN, wait_seconds: float = SECONDS, tls: Tls | None = None) -> None:
        engine, self._tls = MemoryEngine(clock=now), tls
        self.owner = Node(engine, mode)
        self.other = Node(cast(Engine, Shared(engine)), mode, wait_seconds)

    async def __aenter__(self) -> Self:
        await self.owner.open(self._tls)
        await self.other.open()
        self.other.coordinator = self.owner.place
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.other.engine.ownership.is_owner = True  # a broker that closes may write
        await self.other.close()
        await self.owner.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with asyncio.timeout(2 * SECONDS), Pair() as pair:
        yield pair


@asynccontextmanager
async def connected(node: Node, protocol: str = "flymq", **options: Any) -> AsyncIterator[Any]:
    """A client that knows one address."""
    key = API_KEY if protocol == "blipmq" else None
    async with headrace.connect(f"{protocol}://{node.place}", api_key=key, **options) as client:
        yield client


OWNED: dict[str, Callable[[FlyMqClient, str], Awaitable[object]]] = {
    "commit": lambda client, topic: client.commit(topic, 0, group="g"),
    "committed": lambda client, topic: client.committed(topic, group="g"),
    "group": lambda client, topic: client.subscribe(topic, group="g"),
    "delayed": lambda client, topic: client.publish_delayed(topic, b"x", delay_ms=600_000),
    "transaction": lambda client, topic: client.transaction().__aenter__(),
    "user": lambda client, topic: client.create_user(f"user-of-{topic}", "", ["consumer"]),
    "schema": lambda client, topic: client.register_schema(topic, "json", b'{"type":"integer"}'),
    "delete": lambda client, topic: client.delete_topic(topic),
}
"""Requests that only the coordinator serves."""


@pytest.mark.parametrize("operation", OWNED)
@pytest.mark.parametrize("dialect", [flymq.Dialect.SPEC, flymq.Dialect.SDK])
async def test_a_request_for_the_coordinator_succeeds_at_the_other_broker(pair: Pair, operation: str, dialect: flymq.Dialect) -> None:
    async with connected(pair.other, options=FlyMqOptions(dialect=dialect)) as client:
        await client.create_topic("t")
        assert (await client.publish("t", b"before")).offset == 0
        await client.fetch("t")
        await OWNED[operation](client, "t")
        assert pair.other.counters.relays_open == 1
    await until(lambda: pair.other.counters.relays_open == pair.owner.counters.open == pair.other.counters.open == 0)
    assert pair.other.counters.relayed == 1


async def test_a_group_with_a_member_at_each_broker_shares_the_partitions_and_settles(pair: Pair) -> None:
    async with connected(pair.other) as one, connected(pair.owner) as two:
        await one.create_topic("t", partitions=4)
        members = [await client.subscribe("t", group="g", mode="ordered", settlement="auto") for client in (one, two)]
        for partition in range(4):
            await one.publish("t", b"%d" % partition, partition=partition)
        taken = [[await anext(member) for _ in range(2)] for member in members]
        assert sorted(message.value for messages in taken for message in messages) == [b"0", b"1", b"2", b"3"]
        for member in members:
            await member.close()
        for partition in range(4):
            assert await two.committed("t", group="g", partition=partition) == 1


@pytest.mark.parametrize("dialect", rustlog.Dialect)
async def test_rustlog_commits_and_reads_offsets_through_the_other_broker(pair: Pair, dialect: rustlog.Dialect) -> None:
    async with connected(pair.other, "rustlog", options=RustLogOptions(dialect=dialect)) as client:
        await client.create_topic("t")
        await client.publish("t", b"one")
        await client.commit("t", 1, group="g")
        assert await client.committed("t", group="g") == 1
        await client.publish("t", b"two")
        assert [message.value for message in await client.fetch("t")] == [b"one", b"two"]
    assert pair.other.counters.relayed == 1


async def test_blipmq_subscribes_with_settlement_and_comes_back_to_its_subscription_at_the_other_broker(pair: Pair) -> None:
    async with connected(pair.other, "blipmq") as client:
        subscription = await cast(BlipMqClient, client).subscribe("t", settlement="auto")
        await client.publish("t", b"one")
        assert (await anext(subscription)).value == b"one"
        pair.other.relays.coordinator_changed()  # the same one: the relay stays
        assert pair.other.counters.relays_open == 1
        (relay,) = pair.other.relays._open
        relay.abort("the coordinator died")
        await client.publish("t", b"two")
        assert (await anext(subscription)).value == b"two"
    assert pair.other.counters.relayed == 2


async def test_a_connection_with_a_subscription_in_memory_is_not_handed_over(pair: Pair) -> None:
    async with connected(pair.other, "blipmq") as client:
        live = await cast(BlipMqClient, client).subscribe("t", qos=0)
        with pytest.raises(HeadraceError, match="this operation needs the coordinator, which is at somewhere:1"):
            await cast(BlipMqClient, client).subscribe("t", qos=1)
        await client.publish("t", b"live")
        assert (await anext(live)).value == b"live"


async def test_a_wrong_key_is_refused_at_the_other_broker(pair: Pair) -> None:
    with pytest.raises(HeadraceError, match="key"):
        async with headrace.connect(f"blipmq://{pair.other.place}", api_key="wrong"):
            pass
    assert pair.other.counters.relayed == 0 == pair.owner.counters.accepted


async def test_a_login_that_the_coordinator_does_not_accept_is_not_handed_over() -> None:
    async with asyncio.timeout(2 * SECONDS), Pair() as pair, Pair() as strangers:
        pair.other.coordinator = strangers.owner.place
        strangers.owner.protocols._by_name["blipmq"] = strangers.owner.protocols._blipmq({})
        strangers.owner.listener.protocols = tuple(strangers.owner.protocols.named(()))
        async with connected(pair.other, "blipmq") as client:
            with pytest.raises(HeadraceError, match="this operation needs the coordinator"):
                await client.subscribe("t", settlement="auto")
            await client.publish("t", b"the connection is good")


async def test_requests_behind_the_first_for_the_coordinator_keep_their_order(pair: Pair) -> None:
    """All in one write: earlier ones are answered by the first broker, later ones by the coordinator, in the order of the requests."""
    async with connected(pair.other) as client:
        await client.create_topic("t")
    requests: list[m.Request] = [
        m.ProduceBatch("t", [b"0", b"1"]),
        m.Commit("t", "g", 0, 1),
        m.ProduceBatch("t", [b"2"]),
        m.GetOffset("t", "g", 0),
        m.Fetch("t", 0, 0, 10),
    ]
    frames = b"".join(map(flymq.encode_request, requests))
    for cut in (len(frames), len(frames) - 3, 20):
        reader, writer = await asyncio.open_connection(pair.other.listener.host, pair.other.listener.port)
        writer.write(frames[:cut])
        await asyncio.sleep(0)
        writer.write(frames[cut:])
        writer.write_eof()  # passed on: the coordinator answers and closes
        events = flymq.ReplyDecoder().feed(await reader.read())
        opcodes = [event.opcode for event in events if isinstance(event, m.ReplyFrame)]
        assert opcodes == [flymq.Opcode.COMMIT, flymq.Opcode.GET_OFFSET, flymq.Opcode.FETCH]
        records = [event for event in events if isinstance(event, m.RecordMetadataBatch)]
        assert sum(len(batch.offsets) for batch in records) == 3
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("behind", [b"\xaf\x01\x02\x01\0\0\0\x01\0", b"no frame"])
async def test_a_request_before_one_that_is_not_understood_is_refused(pair: Pair, behind: bytes) -> None:
    reader, writer = await asyncio.open_connection(pair.other.listener.host, pair.other.listener.port)
    writer.write(flymq.encode_request(m.GetOffset("t", "g", 0)) + behind)
    assert b"not coordinator: this operation needs the coordinator" in await reader.readuntil(b"somewhere:1")
    writer.close()
    await writer.wait_closed()
    assert pair.other.counters.relayed == 0


async def test_without_a_coordinator_a_request_is_refused_after_the_wait() -> None:
    async with asyncio.timeout(2 * SECONDS), Pair(wait_seconds=0.3) as pair:
        pair.other.coordinator = None
        async with connected(pair.other) as client:
            await client.create_topic("t")
            with pytest.raises(NotCoordinator):
                await client.commit("t", 0, group="g")
            with pytest.raises(NotCoordinator):
                await client.publish_delayed("t", b"x", delay_ms=1)
            await client.publish("t", b"the connection is good")
    assert pair.other.counters.relayed == 0


async def test_a_request_waits_for_an_election_and_is_served_by_its_own_broker_if_that_wins(pair: Pair) -> None:
    pair.other.coordinator = Place("127.0.0.1", 1)  # it has died: nobody listens there
    async with connected(pair.other) as client:
        await client.create_topic("t")
        waiting = [asyncio.create_task(client.commit("t", 7, group=group)) for group in ("g", "h")]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await pair.other.take_over()
        await asyncio.gather(*waiting)
        assert await client.committed("t", group="h") == 7
    assert pair.other.counters.relayed == 0


async def test_a_relayed_connection_is_not_relayed_again_but_waits_for_its_broker_to_become_the_coordinator(pair: Pair) -> None:
    """Each of two brokers takes the other one for the coordinator, which makes no loop."""
    async with Pair() as second:
        pair.other.coordinator, second.other.coordinator = second.other.place, pair.other.place
        async with connected(pair.other) as client:
            await client.create_topic("t")
            await second.owner.broker.create_topic(second.owner.protocols._who(cast(Any, Nobody()), "flymq", "ann"), "t")
            task = asyncio.create_task(client.commit("t", 7, group="g"))
            await until(lambda: second.other.counters.accepted == 1)
            await asyncio.sleep(0.1)
            assert not task.done() and second.other.counters.relayed == 0 and pair.other.counters.accepted == 1
            await second.other.take_over()
            await task


class Nobody:
    identity, peer = None, "127.0.0.1:1"


async def test_a_preface_cut_anywhere_marks_the_connection_and_is_no_part_of_the_protocol(pair: Pair) -> None:
    frames = PREFACE + flymq.encode_request(m.ListTopics())
    for cut in range(1, len(PREFACE) + 2):
        reader, writer = await asyncio.open_connection(pair.owner.listener.host, pair.owner.listener.port)
        writer.write(frames[:cut])
        await writer.drain()
        await asyncio.sleep(0.002)
        (connection,) = pair.owner.listener._connections
        writer.write(frames[cut:])
        assert (await reader.readexactly(8))[2] == flymq.Opcode.LIST_TOPICS
        assert connection.is_relayed
        writer.close()
        await writer.wait_closed()
        await until(lambda: pair.owner.counters.open == 0)


async def test_the_client_of_a_relay_reconnects_when_the_coordinator_changes(pair: Pair) -> None:
    async with connected(pair.other) as client:
        await client.create_topic("t")
        await client.commit("t", 1, group="g")
        assert pair.other.counters.relays_open == 1
        pair.other.coordinator = pair.other.place
        await pair.other.take_over()
        await until(lambda: pair.other.counters.relays_open == 0)
        await client.commit("t", 2, group="g")
        assert await client.committed("t", group="g") == 2
    assert pair.other.counters.relayed == 1


async def test_a_coordinator_that_does_not_read_stops_its_peer_and_holds_little_memory(pair: Pair) -> None:
    silent = asyncio.Event()

    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream has a transport with both directions
        await silent.wait()
        writer.close()

    server = await asyncio.start_server(never_read, "127.0.0.1", 0)
    try:
        pair.other.coordinator = Place("127.0.0.1", server.sockets[0].getsockname()[1])
        _, writer = await asyncio.open_connection(pair.other.listener.host, pair.other.listener.port)
        writer.write(flymq.encode_request(m.GetOffset("t", "g", 0)))
        await until(lambda: pair.other.counters.relays_open == 1)
        chunk = bytes(1 << 16)
        sent = 0
        while pair.other.counters.reading_pauses == 0 and sent < 64 << 20:
            writer.write(chunk)
            sent += len(chunk)
            await asyncio.sleep(0.001)
        (relay,) = cast(set[Relay], pair.other.relays._open)
        assert relay._transport is not None
        assert relay._transport.get_write_buffer_size() < 1 << 20 < sent
        writer.transport.abort()
        pair.other.coordinator = None  # another one is elected
        pair.other.relays.coordinator_changed()
        await until(lambda: pair.other.counters.relays_open == pair.other.counters.open == 0)
    finally:
        silent.set()
        server.close()


async def test_draining_ends_relays_after_their_requests(pair: Pair) -> None:
    async with connected(pair.other, refused_connections_max=1) as client:
        await client.create_topic("t")
        await client.commit("t", 1, group="g")
        assert await pair.other.listener.drain(SECONDS) == 0
    assert pair.other.counters.relays_open == pair.other.counters.open == 0


async def test_the_coordinator_checks_the_login_of_a_client_itself_and_the_client_keeps_its_rights() -> None:
    async with asyncio.timeout(2 * SECONDS), Pair(Mode.ENFORCED) as pair:
        with pytest.raises(LoginRefused):
            async with connected(pair.other, user="admin", password="wrong") as client:
                await client.topics()
        async with connected(pair.other, user="admin", password=PASSWORD) as admin:
            await admin.create_topic("t")
            await admin.create_user("bob", PASSWORD, ["consumer"])  # handed over
            assert (await admin.who_am_i()).user == "admin"
            await until(lambda: "bob" in pair.other.access.policy.users)
            async with connected(pair.other, user="bob", password=PASSWORD) as bob:
                with pytest.raises(HeadraceError, match="may not delete"):
                    await bob.delete_topic("t")
                await bob.commit("t", 0, group="g")
                assert (await bob.who_am_i()).user == "bob"
            assert pair.other.counters.relayed == 2


async def test_a_relay_verifies_the_certificate_of_the_coordinator(tmp_path: Path) -> None:
    tls = Tls(test_tls.files(tmp_path))
    async with asyncio.timeout(2 * SECONDS), Pair(wait_seconds=1.0, tls=tls) as pair:
        port = pair.owner.listener.port
        async with connected(pair.other) as client:
            await client.create_topic("t")
            pair.other.coordinator = Place("127.0.0.1", port, is_encrypted=True)  # a name that the certificate does not have
            with pytest.raises(NotCoordinator):
                await client.commit("t", 1, group="g")
            assert pair.other.counters.relayed == 0
            pair.other.coordinator = Place("localhost", port, is_encrypted=True)
            await client.commit("t", 1, group="g")
            assert await client.committed("t", group="g") == 1
            assert pair.owner.counters.opened_with_tls == 1
        await until(lambda: pair.other.counters.relays_open == pair.owner.counters.open == 0)


@pytest.mark.parametrize("text", ["a:1", "[::1]:9092", "tls://a.example:443"])
def test_a_place_is_what_it_was_written_as(text: str) -> None:
    assert str(Place.parse(text)) == text


@pytest.mark.parametrize("text", ["", "a", "a:b", ":1"])
def test_anything_else_is_no_place(text: str) -> None:
    assert Place.parse(text) is None
