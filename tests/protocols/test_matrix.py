"""Records written through one protocol and read through another: the same bytes, keys, offsets, order and groups, for every pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, product

import pytest

import headrace
from headrace.clients.messages import Settlement, Start
from headrace.limits import MIB
from headrace.wire import figg
from tests.conftest import Proof
from tests.net.polling import until
from tests.protocols.peers import DIALECTS, GROUP_PEERS, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
VALUES = [
    b"plain",
    b"",
    b"\x00",
    b"nul\x00inside",
    b"\xff\xfe not UTF-8 \x80",
    "naïve ☃".encode(),
    b'{"json": [1, 2.5, null]}',
    bytes(range(256)) * 4 * 1024,  # 1 MiB of everything
    b"\r\n",
    b"last",
]
assert max(map(len, VALUES)) == MIB

VOICES = PEERS + DIALECTS + QUIC
pairs = pytest.mark.parametrize("writer, reader", [pytest.param(a, b, id=f"{a}-{b}") for a, b in product(VOICES, VOICES)])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("matrix")) as broker:
        yield broker


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"matrix-{next(NAMES)}"
    async with broker.connect("flymq") as client:
        await client.create_topic(name)
    return name


@asynccontextmanager
async def following(broker: Broker, reader: Peer, topic: str) -> AsyncIterator[headrace.Subscription]:
    """From the start, or from now on through a protocol that knows no past; subscribed when it is entered."""
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(reader) as client:
        start: Start = "earliest" if reader.reads_history else "latest"
        settlement: Settlement = "auto" if reader.needs_settlement else "explicit"
        subscription = await client.subscribe(topic, start, settlement=settlement)
        yield subscription
        await subscription.close()


def values_for(writer: Peer) -> list[bytes]:
    return VALUES if writer.writes_empty else [value for value in VALUES if value]


async def write(broker: Broker, writer: Peer, topic: str, values: list[bytes]) -> list[headrace.Receipt]:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(writer) as client:
        key = (lambda value: b"key of %d" % len(value) if value else None) if writer.writes_keys else None
        return await (await client.send_many(topic, values, key=key))


@pairs
async def test_what_is_written_through_one_protocol_is_read_through_another(
    broker: Broker, topic: str, writer: Peer, reader: Peer, proof: Proof
) -> None:
    values = values_for(writer)
    async with following(broker, reader, topic) as subscription:
        receipts = await write(broker, writer, topic, values)
        messages = [await anext(subscription) for _ in values]
    assert [message.value for message in messages] == values
    assert {message.topic for message in messages} == {topic}
    if reader.reads_offsets:
        assert [(message.partition, message.offset) for message in messages] == [(0, offset) for offset in range(len(values))]
    if writer.has_receipts:
        assert [(receipt.partition, receipt.offset) for receipt in receipts] == [(0, offset) for offset in range(len(values))]
    wanted = [b"key of %d" % len(value) if value and writer.writes_keys and reader.reads_keys else None for value in values]
    assert [message.key for message in messages] == wanted
    proof("records through two protocols", len(values))


@pairs
async def test_what_comes_live_keeps_its_order(broker: Broker, topic: str, writer: Peer, reader: Peer) -> None:
    values = [b"%d" % number for number in range(2_000)]
    async with following(broker, reader, topic) as subscription, broker.connect(writer) as client:
        publishing = asyncio.create_task(client.publish_many(topic, values))
        got: list[bytes] = []
        async for batch in subscription.batches():
            got += batch.values
            if len(got) >= len(values):
                break
        assert await publishing == len(values)
    assert got == values


async def test_protocols_that_write_in_turns_use_one_sequence_of_offsets(broker: Broker, topic: str) -> None:
    expected: list[bytes] = []
    for turn in range(3):
        for writer in VOICES:
            value = f"{writer} {turn}".encode()
            receipt = (await write(broker, writer, topic, [value]))[0]
            assert receipt.offset in (None, len(expected))
            expected.append(value)
    for reader in VOICES:
        if reader.reads_history:
            async with following(broker, reader, topic) as subscription:
                messages = [await anext(subscription) for _ in expected]
            assert [message.value for message in messages] == expected, reader.protocol
            if reader.reads_offsets:
                assert [message.offset for message in messages] == list(range(len(expected))), reader.protocol


@pytest.mark.parametrize("writer", PEERS + QUIC, ids=str)
async def test_every_record_has_the_time_of_the_broker_whatever_protocol_it_came_through(broker: Broker, topic: str, writer: Peer) -> None:
    async with broker.connect("flymq") as clock:
        first = await clock.publish(topic, b"before")
        assert first.timestamp is not None and abs(first.timestamp - time.time() * 1000) < 60_000
        await until_after(first.timestamp)
        (receipt,) = await write(broker, writer, topic, [b"between"])
        between = time.time_ns() // 1_000_000
        await until_after(between)
        last = await clock.publish(topic, b"after")
        assert last.timestamp is not None
        assert await clock.offset_for_time(topic, first.timestamp + 1) == 1
        assert await clock.offset_for_time(topic, between + 1) == 2
        assert await clock.offset_for_time(topic, last.timestamp + 1) == 3
        if receipt.timestamp is not None:
            assert first.timestamp < receipt.timestamp <= between
            assert await clock.offset_for_time(topic, receipt.timestamp) == 1


async def until_after(milliseconds: int) -> None:
    """The broker is on this machine, so it reads the same clock."""
    await until(lambda: time.time_ns() // 1_000_000 > milliseconds)


async def test_on_the_wire_a_figg_offset_points_behind_its_record(broker: Broker, topic: str) -> None:
    values = [b"a", b"b", b"c"]
    await write(broker, PEERS[-1], topic, values)
    reader, writer = await asyncio.open_connection(*broker.process.addresses[0])
    try:
        writer.write(figg.encode.attach(topic, 1))
        decoder, seen = figg.client_decoder(), list[figg.ServerMessage]()
        async with asyncio.timeout(WAIT_SECONDS):
            while not any(isinstance(message, figg.DataBatch) for message in seen):
                seen += decoder.feed(await reader.read(65_536))
    finally:
        writer.close()
    [attached] = [message for message in seen if isinstance(message, figg.Attached)]
    [batch] = [message for message in seen if isinstance(message, figg.DataBatch)]
    assert attached.offset == 1, "the record to come is number 1"
    assert (list(batch.offsets), batch.values) == ([2, 3], [b"b", b"c"])


# Groups.

group_pairs = pytest.mark.parametrize(
    "first, second", [pytest.param(a, b, id=f"{a}-{b}") for a, b in product(GROUP_PEERS, GROUP_PEERS) if a != b]
)


@group_pairs
async def test_a_group_goes_on_through_another_protocol_and_back(broker: Broker, topic: str, first: Peer, second: Peer) -> None:
    group = f"group of {topic}"
    async with broker.connect(first) as one, broker.connect(second) as other:
        await one.publish_many(topic, [b"%d" % number for number in range(10)])
        assert await other.committed(topic, group=group) is None
        await one.commit(topic, 3, group=group)
        assert await one.committed(topic, group=group) == await other.committed(topic, group=group) == 3
        assert [message.offset for message in await other.fetch(topic, group=group, records_max=2)] == [3, 4]

        subscription = await other.subscribe(topic, "latest", group=group)
        for wanted in range(3, 6):
            async with await anext(subscription) as message:
                assert message.offset == wanted
        assert await one.committed(topic, group=group) == 6
        await subscription.close()

        assert await one.seek(topic, group=group, offset=1) == 1
        assert (await anext(await other.subscribe(topic, group=group))).offset == 1


@group_pairs
async def test_progress_that_is_settled_by_itself_is_seen_through_the_other_protocol(
    broker: Broker, topic: str, first: Peer, second: Peer
) -> None:
    async with broker.connect(first) as one, broker.connect(second) as other:
        await one.publish_many(topic, [b"a", b"b", b"c"])
        subscription = await one.subscribe(topic, "earliest", group="g", settlement="auto")
        assert [(await anext(subscription)).value for _ in range(2)] == [b"a", b"b"]
        await subscription.close()
        assert await other.committed(topic, group="g") == 2
        assert [message.value for message in await other.fetch(topic, group="g")] == [b"c"]


async def test_what_was_acknowledged_one_by_one_is_the_progress_of_a_group_like_any_other(broker: Broker, topic: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("fujin") as fujin, broker.connect("rustlog") as rustlog:
        await rustlog.publish_many(topic, [b"a", b"b", b"c"])
        subscription = await fujin.subscribe(topic)
        for wanted in (b"a", b"b"):
            async with await anext(subscription) as message:
                assert message.value == wanted
        while await rustlog.committed(topic, group=topic) != 2:  # noqa: ASYNC110  (acknowledgements are written down in the background)
            await asyncio.sleep(0.002)
        assert [message.value for message in await rustlog.fetch(topic, group=topic)] == [b"c"]


async def test_partitions_are_the_same_through_both_protocols_that_have_them(broker: Broker) -> None:
    topic = f"parted-{next(NAMES)}"
    async with broker.connect("rustlog") as rustlog, broker.connect("flymq") as flymq:
        await rustlog.create_topic(topic, partitions=3)
        assert topic in await flymq.topics() and topic in await rustlog.topics()
        for partition in range(3):
            assert (await flymq.publish(topic, b"f", partition=partition)).offset == 0
            assert (await rustlog.publish(topic, b"r", partition=partition)).offset == 1
            await flymq.commit(topic, partition, group="g", partition=partition)
        for client in (rustlog, flymq):
            for partition in range(3):
                assert [message.value for message in await client.fetch(topic, partition=partition)] == [b"f", b"r"]
                assert await client.committed(topic, group="g", partition=partition) == partition


# After a restart.


async def test_what_was_written_and_committed_through_every_protocol_outlives_the_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("restart")
    with serving(directory) as before:
        for writer in PEERS + QUIC:
            async with before.connect("flymq") as client:
                await client.create_topic(writer.protocol)
            await write(before, writer, writer.protocol, values_for(writer))
        async with before.connect("rustlog") as rustlog:
            await rustlog.commit("figg", 4, group="g")
        before.process.process.kill()
    with serving(directory) as after:
        for writer, reader in product(PEERS + QUIC, PEERS + QUIC):
            if reader.reads_history:
                async with following(after, reader, writer.protocol) as subscription:
                    values = values_for(writer)
                    assert [(await anext(subscription)).value for _ in values] == values, f"{writer}, {reader}"
        async with after.connect("flymq") as flymq:
            assert await flymq.committed("figg", group="g") == 4
