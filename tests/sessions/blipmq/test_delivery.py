from __future__ import annotations

import asyncio
import struct

import pytest

from headrace.limits import BLIPMQ_FRAME_BYTES_MAX, OUTPUT_HIGH_WATER_BYTES, SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.records import RecordBatch
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.wire.blipmq import AckBatch, FrameType, Message, Nack, PublishBatch, encoder
from tests.sessions.blipmq.support import KEYS, rest, running_server

DEV = KEYS[b"dev-key"]
UNKNOWN = "unknown subscription or delivery tag"


def frame(kind: FrameType, cid: int, payload: bytes) -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), kind, cid) + payload


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "invalid SUBSCRIBE payload"),
        (b"\0\4demo", "invalid SUBSCRIBE payload"),
        (b"\0\1\xff\1", "invalid SUBSCRIBE payload"),
        (b"\0\0\1", "empty topic"),
        (b"\0\0\7", "empty topic"),
        (b"\0\1t\2", "invalid QoS value"),
    ],
)
async def test_a_bad_subscribe_is_refused(payload: bytes, text: str) -> None:
    async with running_server() as broker:
        assert await (await broker.client()).exchange(frame(FrameType.SUBSCRIBE, 5, payload)) == [Nack(5, 400, text)]


async def test_a_subscribe_may_have_bytes_too_many() -> None:
    async with running_server() as broker:
        (reply,) = await (await broker.client()).exchange(frame(FrameType.SUBSCRIBE, 5, b"\0\1t\1more"))
        assert isinstance(reply, AckBatch) and reply.subscription > 0


@pytest.mark.parametrize("kind", [FrameType.ACK, FrameType.POLL])
async def test_a_bad_ack_or_poll_is_refused(kind: FrameType) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        invalid = Nack(5, 400, f"invalid {kind.name} payload")
        assert await peer.exchange(frame(kind, 5, bytes(7)) + frame(kind, 5, bytes(9))) == [invalid, invalid]
        assert await peer.exchange(frame(kind, 6, bytes(8))) == [Nack(6, 400, "subscription_id must be non-zero")]


async def test_an_unknown_subscription_is_a_404_for_ack_and_poll() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        assert await peer.exchange(encoder.acks(77, [5, 6]) + encoder.polls(77, [7, 8])) == [
            Nack(cid, 404, UNKNOWN) for cid in (5, 6, 7, 8)
        ]


async def test_an_unknown_subscription_is_silence_for_poll_where_the_operator_wants_it() -> None:
    async with running_server(BlipMqSettings(compat_silent_poll=True)) as broker:
        peer = await broker.client()
        assert await peer.exchange(encoder.polls(77, [5])) == []
        assert await peer.exchange(encoder.polls(0, [6])) == [Nack(6, 400, "subscription_id must be non-zero")]
        assert await peer.exchange(encoder.acks(77, [7])) == [Nack(7, 404, UNKNOWN)]


async def test_an_unknown_tag_a_second_ack_and_the_ack_of_a_qos_0_delivery_are_404s() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"v")
        ((_, tag, _),) = await peer.poll(subscription)
        assert await peer.exchange(encoder.acks(subscription, [tag + 1])) == [Nack(tag + 1, 404, UNKNOWN)]
        assert await peer.exchange(encoder.acks(subscription, [tag])) == []
        assert await peer.exchange(encoder.acks(subscription, [tag])) == [Nack(tag, 404, UNKNOWN)]
        await peer.publish("demo", b"w", qos=0)
        ((qos, cid, _),) = await peer.poll(subscription)
        assert (qos, cid) == (0, 1000)
        assert await peer.exchange(encoder.acks(subscription, [cid])) == [Nack(cid, 404, UNKNOWN)]


@pytest.mark.parametrize("subscribed", [0, 1])
@pytest.mark.parametrize("published", [0, 1])
async def test_the_qos_of_a_delivery_is_the_lower_of_both(published: int, subscribed: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo", subscribed)
        await peer.publish("demo", b"v", qos=published)
        ((qos, cid, value),) = await peer.poll(subscription)
        assert value == b"v"
        if published and subscribed:
            assert qos == 1
            assert await peer.exchange(encoder.acks(subscription, [cid])) == []
        else:
            assert (qos, cid) == (0, 1000)
        await broker.clock.advance(60_000)
        assert await peer.poll(subscription) == [], "what was acknowledged or needed no ACK does not come again"


async def test_a_poll_with_nothing_to_deliver_gets_no_frame() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        for qos in (0, 1):
            assert await peer.poll(await peer.subscribe("demo", qos), 3) == []


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_subscription_sees_what_is_published_after_it_and_nothing_before(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"before")
        frames = (
            encoder.publishes(1, "demo", [1], [b"just before"])
            + encoder.subscribe(2, "demo", qos)
            + encoder.publishes(1, "demo", [3], [b"just after"])
        )
        (reply,) = await peer.exchange(frames)
        assert isinstance(reply, AckBatch)
        assert [value for _, _, value in await peer.poll(reply.subscription, 5)] == [b"just after"]


@pytest.mark.parametrize("qos", [0, 1])
async def test_who_publishes_and_polls_at_once_finds_what_it_published(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo", qos)
        (delivery,) = await peer.exchange(encoder.publishes(1, "demo", [1], [b"mine"]) + encoder.polls(subscription, [2]))
        assert isinstance(delivery, PublishBatch) and delivery.values == [b"mine"]


@pytest.mark.parametrize("qos", [0, 1])
async def test_deliveries_come_in_order_as_many_as_polls(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo", qos)
        values = [b"%04d" % index for index in range(2000)]
        await peer.publish("demo", *values)
        assert [value for _, _, value in await peer.poll(subscription, 3)] == values[:3]
        assert [value for _, _, value in await peer.poll(subscription, 1500)] == values[3:1503]
        assert [value for _, _, value in await peer.poll(subscription, 1500)] == values[1503:]


async def test_tags_rise_from_1_and_are_the_correlation_ids_of_qos_1_deliveries() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        first, second = await peer.subscribe("demo"), await peer.subscribe("demo")
        await peer.publish("demo", b"a", b"b", b"c")
        for subscription in (first, second):
            assert await peer.poll(subscription, 5) == [(1, 1, b"a"), (1, 2, b"b"), (1, 3, b"c")]


async def test_two_subscriptions_to_one_topic_get_a_copy_each() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscriptions = [await peer.subscribe("demo", qos) for qos in (0, 1, 1)]
        assert len(set(subscriptions)) == 3
        await peer.publish("demo", b"v")
        for subscription in subscriptions:
            assert [value for _, _, value in await peer.poll(subscription, 2)] == [b"v"]


async def test_mixed_qos_on_one_subscription_keeps_the_order_and_answers_the_right_polls() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        for qos, value in ((1, b"a"), (0, b"b"), (0, b"c"), (1, b"d")):
            await peer.publish("demo", value, qos=qos)
        assert await peer.poll(subscription, 4) == [(1, 1, b"a"), (0, 1001, b"b"), (0, 1002, b"c"), (1, 4, b"d")]


async def test_records_of_all_partitions_arrive() -> None:
    async with running_server() as broker:
        await broker.broker.create_topic(DEV, "wide", partitions=3)
        peer = await broker.client()
        subscriptions = [await peer.subscribe("wide", qos) for qos in (0, 1)]
        for partition in range(3):
            await broker.broker.publish(DEV, "wide", RecordBatch([b"%d" % partition]), partition=partition)
        for subscription in subscriptions:
            assert sorted(value for _, _, value in await peer.poll(subscription, 5)) == [b"0", b"1", b"2"]


async def test_a_tombstone_of_another_protocol_is_an_empty_message() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscriptions = [await peer.subscribe("demo", qos) for qos in (0, 1)]
        await broker.broker.publish(DEV, "demo", RecordBatch([None], [b"key"]))
        for subscription in subscriptions:
            assert [value for _, _, value in await peer.poll(subscription)] == [b""]


async def test_a_record_too_large_for_a_frame_is_passed_over_and_ends_among_the_dead_letters() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        live, durable = await peer.subscribe("demo", 0), await peer.subscribe("demo", 1)
        await broker.broker.publish(DEV, "demo", RecordBatch([bytes(BLIPMQ_FRAME_BYTES_MAX)]))
        await peer.publish("demo", b"small")
        assert [value for _, _, value in await peer.poll(live)] == [b"small"]
        found = list[bytes]()
        for _ in range(5):
            found += [value for _, _, value in await peer.poll(durable, 2)]
            await peer.exchange(encoder.acks(durable, [2]))
            await broker.clock.advance(1_000)
        assert found == [b"small"]
        assert [len(value or b"") for value in broker.values("demo.dlq")] == [BLIPMQ_FRAME_BYTES_MAX]


async def test_a_peer_that_does_not_read_is_not_fed() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", *[bytes(100_000)] * 30)
        peer.wire.unsent_bytes = OUTPUT_HIGH_WATER_BYTES + 1
        peer.session.receive(encoder.polls(subscription, range(30)))
        await rest()
        assert peer.heard() == []
        peer.wire.unsent_bytes = 0
        peer.session.drained()
        await rest()
        assert sum(len(message.values) for message in peer.heard() if isinstance(message, PublishBatch)) == 30


async def test_requests_behind_a_slow_one_wait_and_the_socket_is_not_read_meanwhile() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        broker.engine.hold()
        peer.session.receive(encoder.subscribe(1, "demo", 1) + encoder.publishes(1, "demo", [2], [b"v"]) + encoder.ping(3))
        await rest()
        assert peer.wire.pauses == 1
        assert peer.heard() == []
        broker.engine.release()
        await rest()
        assert peer.wire.pauses == 0
        assert [type(message).__name__ for message in peer.heard()] == ["AckBatch", "Pong"]


async def test_a_request_that_arrives_at_any_moment_of_a_slow_one_is_answered() -> None:
    async with running_server() as broker:
        for turns in range(40):
            peer = await broker.client()
            peer.session.receive(encoder.subscribe(1, f"demo-{turns}", 1))
            for _ in range(turns):
                await asyncio.sleep(0)
            (reply,) = await peer.exchange(b"")
            assert isinstance(reply, AckBatch)


async def test_a_fault_of_our_own_closes_the_connection_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise AssertionError("a bug")

    async with running_server() as broker:
        peer, other = await broker.client(), await broker.client()
        monkeypatch.setattr(broker.broker, "ensure_topic", broken)
        peer.session.receive(encoder.subscribe(1, "demo", 1) + encoder.ping(2))
        assert await peer.closed() == ("internal error: the request could not be completed", True)
        assert "a bug" in caplog.text
        assert await other.exchange(b"") == []


async def test_one_connection_may_hold_so_many_subscriptions_and_no_more() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        frames = b"".join(encoder.subscribe(cid, "demo", 0) for cid in range(SUBSCRIPTIONS_PER_CONNECTION_MAX + 1))
        replies: list[Message] = await peer.exchange(frames)
        assert replies[-1] == Nack(SUBSCRIPTIONS_PER_CONNECTION_MAX, 400, "too many subscriptions: the limit is 1024")
        assert sum(len(reply.cids) for reply in replies if isinstance(reply, AckBatch)) == SUBSCRIPTIONS_PER_CONNECTION_MAX


async def test_a_subscribe_that_fails_leaves_nothing_behind() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        topic = "t" * 249
        await peer.publish(topic, b"v")
        (reply,) = await peer.exchange(encoder.subscribe(5, topic, 1))
        assert isinstance(reply, Nack) and reply.code == 400, "there is no room for the name of its dead letters"
        await rest()
        assert len(broker.subscriptions) == 0
        await broker.restart()
        assert len(broker.subscriptions) == 0


async def test_the_end_of_a_topic_is_the_end_of_its_subscriptions() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscriptions = [await peer.subscribe("demo", qos) for qos in (0, 1)]
        await broker.broker.delete_topic(DEV, "demo")
        for subscription in subscriptions:
            for _ in range(2):
                assert await peer.exchange(encoder.polls(subscription, [5])) == [Nack(5, 404, UNKNOWN)]
        assert len(broker.subscriptions) == 0


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_poll_for_messages_in_memory_is_answered_in_the_call_that_receives_it(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo", qos)
        await peer.publish("demo", *[b"%d" % number for number in range(10)], qos=qos)
        await peer.poll(subscription)
        for first, count in ((1, 1), (2, 3), (5, 5)):
            peer.session.receive(encoder.polls(subscription, range(7, 7 + count)))
            (delivery,) = peer.heard()
            tags = [*range(first + 1, first + 1 + count)] if qos else [*range(7, 7 + count)]
            assert delivery == PublishBatch(qos, "demo", tags, [b"%d" % number for number in range(first, first + count)])
        peer.session.receive(encoder.polls(subscription, [7]))
        assert peer.heard() == []


async def test_polls_beyond_the_messages_in_memory_get_what_there_is() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await broker.broker.publish(DEV, "demo", RecordBatch([b"1", b"2"]))
        await broker.broker.publish(DEV, "demo", RecordBatch([b"3", bytes(BLIPMQ_FRAME_BYTES_MAX), b"5"]))
        assert [value for _, _, value in await peer.poll(subscription)] == [b"1"]
        assert [value for _, _, value in await peer.poll(subscription, 2)] == [b"2", b"3"]
        found = [*await peer.poll(subscription), *await peer.poll(subscription)]
        assert found == [(1, 5, b"5")], "one before it fits no frame"


async def test_a_poll_after_the_right_has_ended_is_refused_even_if_its_message_is_in_memory() -> None:
    denied: set[str] = set()
    async with running_server(authorize=lambda who, action, resource: action.value not in denied) as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"1", b"2", b"3", b"4")
        assert [value for _, _, value in await peer.poll(subscription)] == [b"1"]
        assert [value for _, _, value in await peer.poll(subscription)] == [b"2"]
        denied.add("read")
        broker.broker.access_changed()
        (reply,) = await peer.exchange(encoder.polls(subscription, [7]))
        assert isinstance(reply, Nack) and reply.code == 401
        denied.clear()
        broker.broker.access_changed()
        assert [value for _, _, value in await peer.poll(subscription)] == [b"3"]
