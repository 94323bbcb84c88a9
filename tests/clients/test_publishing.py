"""Publishing through every protocol: deadlines, the record that was refused, and the types of arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest

import headrace
from headrace.clients.flymq.client import FlyMqClient
from tests.net.proxy import FaultProxy
from tests.protocols.peers import API_KEY, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
peers = pytest.mark.parametrize("peer", PEERS, ids=str)
everyone = pytest.mark.parametrize("peer", PEERS + QUIC, ids=str)
answering = pytest.mark.parametrize("peer", [peer for peer in PEERS + QUIC if peer.protocol != "figg"], ids=str)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("publishing")) as broker:
        yield broker


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"publishing-{next(NAMES)}"
    async with broker.connect("flymq") as client:
        await client.create_topic(name)
    return name


# The refused record.


@answering
async def test_publish_many_names_the_refused_record_and_counts_the_kept_ones(broker: Broker, topic: str, peer: Peer) -> None:
    values = [b"%d" % index for index in range(3_000)]
    values[2_500] = b"no number"
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as admin, broker.connect(peer) as client:
        assert isinstance(admin, FlyMqClient)
        await admin.register_schema("number", "json", b'{"type":"integer"}')
        await admin.require_schema(topic, "number")
        with pytest.raises(headrace.RecordRefused, match="record 2500 was refused: ") as caught:
            await client.publish_many(topic, values)
        found = caught.value
        assert (found.index, found.__cause__) == (2_500, found.failure)
        assert found.kind == "invalid_record" or isinstance(found.failure, headrace.Refused)
        end = (await admin.describe_topic(topic))[0].end
        assert found.kept == end
        with pytest.raises(headrace.HeadraceError) as single:
            await client.publish(topic, b"no number")
        assert type(single.value) is type(found.failure)


@everyone
async def test_publish_many_names_a_record_that_fits_no_frame(broker: Broker, topic: str, peer: Peer) -> None:
    too_large = bytes(40 << 20)
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as admin, broker.connect(peer) as client:
        assert isinstance(admin, FlyMqClient)
        with pytest.raises(headrace.RecordRefused) as caught:
            await client.publish_many(topic, [b"a", b"b", too_large, b"d"])
        assert (caught.value.index, caught.value.kept) == (2, (await admin.describe_topic(topic))[0].end)
        assert caught.value.kept >= 2
        with pytest.raises(type(caught.value.failure)):
            await client.publish(topic, too_large)


@answering
async def test_a_batch_names_its_refused_record(broker: Broker, topic: str, peer: Peer) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as admin, broker.connect(peer) as client:
        assert isinstance(admin, FlyMqClient)
        await admin.register_schema("number", "json", b'{"type":"integer"}')
        await admin.require_schema(topic, "number")
        sent = await client.send_many(topic, [b"1", b"2", b"x", b"4"])
        with pytest.raises(headrace.RecordRefused) as caught:
            await sent
        assert (caught.value.index, caught.value.kept) == (2, (await admin.describe_topic(topic))[0].end)


# Deadlines.


@peers
async def test_a_record_without_an_acknowledgement_in_time_has_an_unknown_outcome(broker: Broker, topic: str, peer: Peer) -> None:
    host, port = broker.process.addresses[0]
    api_key = API_KEY if peer.needs_api_key else None
    async with asyncio.timeout(WAIT_SECONDS), FaultProxy(host, port) as proxy:
        client = await headrace.connect(f"{peer.protocol}://{proxy.host}:{proxy.port}", api_key=api_key)
        proxy.hold_answers()
        with pytest.raises(headrace.OutcomeUnknown, match=r"1 record was sent .*: no acknowledgement within 0.05 s"):
            await client.publish(topic, b"late", timeout=0.05)
        proxy.release_answers()
        await client.publish(topic, b"in time")
        await client.close()


@peers
async def test_a_record_that_was_not_sent_in_time_is_never_sent(broker: Broker, topic: str, peer: Peer) -> None:
    host, port = broker.process.addresses[0]
    api_key = API_KEY if peer.needs_api_key else None
    delays: list[float] = []

    def backoff(failures: int) -> float:
        return 0.01 if delays else 3_600.0

    async with asyncio.timeout(WAIT_SECONDS), FaultProxy(host, port) as proxy:
        lost = asyncio.Event()
        client = await headrace.connect(
            f"{peer.protocol}://{proxy.host}:{proxy.port}",
            api_key=api_key,
            backoff=backoff,
            publish_seconds=0.05,
            on_state=lambda state, reason: lost.set() if state == "disconnected" else None,
        )
        proxy.cut()
        await lost.wait()
        with pytest.raises(headrace.NotSent, match=r"1 record was never sent: no acknowledgement within 0.05 s"):
            await client.publish(topic, b"late")
        assert client.unacknowledged == 0
        with pytest.raises(headrace.NotSent):
            await client.publish_many(topic, [b"late"] * 3)
        client.abandon()
    async with broker.connect("flymq") as reader:
        assert await reader.fetch(topic) == []


async def test_the_deadline_includes_the_wait_for_room_in_the_window(broker: Broker, topic: str) -> None:
    host, port = broker.process.addresses[0]
    async with asyncio.timeout(WAIT_SECONDS), FaultProxy(host, port) as proxy:
        client = await headrace.connect(
            f"flymq://{proxy.host}:{proxy.port}", options=headrace.FlyMqOptions(window_records_max=1, ping_seconds=600)
        )
        proxy.hold_answers()
        first = await client.send(topic, b"first")
        with pytest.raises(headrace.NotSent, match="no room in the window within 0.05 s"):
            await client.publish(topic, b"second", timeout=0.05)
        proxy.release_answers()
        assert (await first).offset == 0
        await client.close()


# Arguments.

WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("publish", ("t", "text"), {}, r"value: expected bytes, got str; encode it: text.encode\(\)"),
    ("publish", ("t", None), {}, "value: expected bytes, got NoneType"),
    ("publish", (b"t", b"v"), {}, "topic: expected str, got bytes"),
    ("publish", ("t", b"v"), {"key": "k"}, "key: expected bytes"),
    ("publish", ("t", b"v"), {"partition": "0"}, "partition: expected int, got str"),
    ("publish_many", ("t", b"bytes"), {}, "values: expected an iterable of bytes, got bytes"),
    ("publish_many", ("t", 7), {}, "values: expected an iterable of bytes, got int"),
    ("publish_many", ("t", [b"a", "b"]), {}, r"values\[1\]: expected bytes, got str"),
    ("send_many", ("t", [b"a", 3]), {}, r"values\[1\]: expected bytes, got int"),
    ("subscribe", (7,), {}, "topic: expected str, got int"),
    ("subscribe", ("t", 1.5), {}, "start: expected 'earliest', 'latest', an offset or a datetime, got float"),
]


@pytest.mark.parametrize("method, arguments, options, complaint", WRONG, ids=[f"{row[0]}-{index}" for index, row in enumerate(WRONG)])
async def test_a_wrong_type_names_the_argument(
    broker: Broker, method: str, arguments: tuple[Any, ...], options: dict[str, Any], complaint: str
) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        for peer in PEERS + QUIC:
            async with broker.connect(peer) as client:
                with pytest.raises(headrace.InvalidArgument, match=complaint):
                    await getattr(client, method)(*arguments, **options)
                assert client.unacknowledged == 0


async def test_a_time_of_a_wrong_type_is_named(broker: Broker, topic: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as client:
        with pytest.raises(headrace.InvalidArgument, match="timestamp: expected int, got datetime"):
            await client.offset_for_time(topic, datetime.now(UTC))  # type: ignore[arg-type]  # the error under test


async def test_headers_of_a_wrong_type_are_named_where_the_protocol_has_headers(broker: Broker) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("fujin") as client:
        with pytest.raises(TypeError, match=r"headers: expected a sequence of \(str, bytes\) pairs, got dict"):
            await client.publish("t", b"v", headers={"a": b"b"})  # type: ignore[arg-type]  # the error under test
        with pytest.raises(TypeError, match="headers: expected a sequence"):
            await client.publish("t", b"v", headers=((b"a", b"b"),))  # type: ignore[arg-type]  # the error under test


@everyone
async def test_headers_are_carried_or_refused_with_the_protocol_that_carries_them(broker: Broker, topic: str, peer: Peer) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(peer) as client:
        if peer.protocol == "fujin":
            return  # tests/clients/fujin/test_client.py: this listener is configured without headers
        for publishing in (client.publish(topic, b"v", headers=(("h", b"v"),)), client.publish_many(topic, [b"v"], headers=(("h", b"v"),))):
            with pytest.raises(headrace.NotSupported, match="does not support headers; fujin:// has them"):
                await publishing
