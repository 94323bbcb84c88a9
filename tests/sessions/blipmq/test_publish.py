from __future__ import annotations

import struct

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import TopicConfig
from headrace.errors import BrokerError, CorruptData, DiskFull, StorageFailed, Unavailable
from headrace.limits import BLIPMQ_REPLIES_OWED_MAX, IN_FLIGHT_BYTES_MAX
from headrace.wire.blipmq import FrameType, Nack, Pong, encoder
from tests.sessions.blipmq.support import KEYS, rest, running_server

DEV = KEYS[b"dev-key"]


def publish(payload: bytes, cid: int = 5) -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), FrameType.PUBLISH, cid) + payload


@pytest.mark.parametrize("payload", [b"", b"\1", b"\1\0", b"\1\0\5demo", b"\1\0\1\xff"])
async def test_a_publish_that_cannot_be_read_is_invalid(payload: bytes) -> None:
    async with running_server() as broker:
        assert await (await broker.client()).exchange(publish(payload)) == [Nack(5, 400, "invalid PUBLISH payload")]


async def test_an_empty_topic_is_refused_before_a_bad_qos() -> None:
    async with running_server() as broker:
        assert await (await broker.client()).exchange(publish(b"\1\0\0v") + publish(b"\7\0\0v", 6)) == [
            Nack(5, 400, "empty topic"),
            Nack(6, 400, "empty topic"),
        ]


async def test_a_qos_other_than_0_and_1_is_refused() -> None:
    async with running_server() as broker:
        replies = await (await broker.client()).exchange(publish(b"\2\0\1tv") + publish(b"\xff\0\1tv", 6))
        assert replies == [Nack(5, 400, "invalid QoS value"), Nack(6, 400, "invalid QoS value")]


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_publish_is_not_answered_and_is_in_the_log(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        assert await peer.exchange(encoder.publishes(qos, "demo", [1, 2], [b"a", b""])) == []
        assert broker.values("demo") == [b"a", b""]


async def test_publishes_to_new_and_known_topics_keep_their_order() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        frames = [encoder.publishes(1, topic, [index], [b"%s-%d" % (topic.encode(), index)]) for index in range(20) for topic in ("a", "b")]
        assert await peer.exchange(b"".join(frames)) == []
        for topic in ("a", "b"):
            assert broker.values(topic) == [b"%s-%d" % (topic.encode(), index) for index in range(20)]


async def test_publishes_of_a_topic_with_partitions_stay_in_order_in_one() -> None:
    async with running_server() as broker:
        await broker.broker.create_topic(DEV, "wide", partitions=4)
        peer = await broker.client()
        for index in range(6):
            await peer.publish("wide", b"%d" % index)
        assert broker.values("wide", 0) == [b"%d" % index for index in range(6)]


async def test_a_topic_name_no_topic_can_have_is_refused_with_the_reason() -> None:
    async with running_server() as broker:
        (reply,) = await (await broker.client()).exchange(encoder.publishes(0, "two words", [1], [b"v"]))
        assert isinstance(reply, Nack) and reply.code == 400 and "white space" in reply.text
        (reply,) = await (await broker.client()).exchange(encoder.publishes(1, "t" * 250, [1], [b"v"]))
        assert isinstance(reply, Nack) and reply.code == 400 and "249" in reply.text


async def test_without_auto_create_an_unknown_topic_is_a_404() -> None:
    async with running_server(broker=BrokerSettings(auto_create=False)) as broker:
        peer = await broker.client()
        replies = await peer.exchange(encoder.publishes(1, "demo", [1, 2], [b"v", b"w"]) + encoder.subscribe(3, "demo", 1))
        assert replies == [Nack(cid, 404, "topic 'demo' not found") for cid in (1, 2, 3)]


async def test_a_publish_without_the_right_is_an_error() -> None:
    def only_read(who: Principal, action: Action, resource: Resource) -> bool:
        return action not in (Action.PUBLISH, Action.CREATE)

    async with running_server(authorize=only_read) as broker:
        (reply,) = await (await broker.client()).exchange(encoder.publishes(1, "demo", [1], [b"v"]))
        assert isinstance(reply, Nack) and reply.code == 401 and "dev may not" in reply.text


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (DiskFull("no space left"), "durable publish failed: I/O error: no space left"),
        (StorageFailed("fdatasync: EIO"), "durable publish failed: I/O error: fdatasync: EIO"),
        (CorruptData("batch at 7"), "durable publish failed: log corruption: batch at 7"),
        (Unavailable("draining"), "durable publish failed: wal writer stopped: draining"),
    ],
)
async def test_a_failed_write_is_a_500_for_each_qos_1_record_and_silence_for_qos_0(failure: BrokerError, text: str) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.failure = failure
        replies = await peer.exchange(encoder.publishes(1, "demo", [1, 2], [b"a", b"b"]) + encoder.publishes(0, "demo", [3], [b"c"]))
        assert replies == [Nack(1, 500, text), Nack(2, 500, text)]
        broker.engine.failure = None
        await peer.publish("demo", b"again")
        assert broker.values("demo") == [b"first", b"again"]


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_pong_waits_until_every_earlier_publish_is_durable(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.hold()
        peer.session.receive(encoder.publishes(qos, "demo", [1], [b"slow"]) + encoder.ping(2))
        await rest()
        assert peer.heard() == []
        broker.engine.release()
        await rest()
        assert peer.heard() == [Pong(2)]


async def test_publishes_after_a_ping_do_not_wait_for_its_pong_and_do_not_delay_it() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.hold()
        peer.session.receive(encoder.publishes(1, "demo", [1], [b"a"]) + encoder.ping(2) + encoder.publishes(1, "demo", [3], [b"b"]))
        await rest()
        staged = [write for append in broker.engine._staged for write, *_ in append.writes]
        assert sum(write.records for write in staged) == 2, "the second publish does not wait for the disk"
        assert peer.heard() == []
        broker.engine.release()
        await rest()
        assert peer.heard() == [Pong(2)]


async def test_replies_keep_the_order_of_their_requests() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.hold()
        peer.session.receive(encoder.publishes(1, "demo", [1], [b"a"]) + encoder.ping(2) + publish(b"\7\0\1tv", 3) + encoder.polls(0, [4]))
        await rest()
        assert peer.heard() == []
        broker.engine.release()
        await rest()
        assert peer.heard() == [Pong(2), Nack(3, 400, "invalid QoS value"), Nack(4, 400, "subscription_id must be non-zero")]


async def test_a_peer_that_publishes_faster_than_the_disk_writes_is_not_read_and_loses_nothing() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.hold()
        value = bytes(1 << 20)
        half = IN_FLIGHT_BYTES_MAX // len(value)
        peer.session.receive(encoder.publishes(1, "demo", range(half), [value] * half))
        assert peer.wire.pauses == 0
        peer.session.receive(encoder.publishes(1, "demo", [half], [b"one more"]))
        assert peer.wire.pauses == 1
        broker.engine.release()
        await rest()
        assert peer.wire.pauses == 0
        assert len(broker.values("demo")) == half + 2
        assert await peer.exchange(b"") == []


async def test_a_peer_that_asks_faster_than_the_disk_writes_is_not_read() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.hold()
        peer.session.receive(encoder.publishes(1, "demo", [1], [b"slow"]))
        peer.session.receive(b"".join(map(encoder.ping, range(BLIPMQ_REPLIES_OWED_MAX - 1))))
        assert peer.wire.pauses == 0
        peer.session.receive(encoder.ping(BLIPMQ_REPLIES_OWED_MAX))
        assert peer.wire.pauses == 1
        broker.engine.release()
        await rest()
        assert peer.wire.pauses == 0
        assert len(peer.heard()) == BLIPMQ_REPLIES_OWED_MAX


async def test_what_a_client_must_not_send_is_ignored() -> None:
    async with running_server() as broker:
        malformed = struct.pack(">IBQ", 10, FrameType.NACK, 4) + b"x"
        assert await (await broker.client()).exchange(encoder.nack(2, 400, "mine") + encoder.pong(3) + malformed) == []


async def test_a_ping_may_carry_anything_and_its_pong_carries_nothing() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        peer.session.receive(struct.pack(">IBQ", 14, FrameType.PING, 77) + b"hello")
        assert peer.wire.sent.endswith(bytes.fromhex("00000009 08 000000000000004d"))


async def test_a_draining_server_completes_what_it_took_and_then_closes() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"first")
        broker.engine.hold()
        peer.session.receive(encoder.publishes(1, "demo", [1], [b"taken"]) + encoder.ping(2))
        peer.session.closing()
        assert peer.wire.closed is None
        peer.session.receive(encoder.publishes(1, "demo", [3], [b"too late"]))
        broker.engine.release()
        assert await peer.closed() == ("drained", False)
        assert peer.heard() == [Pong(2)]
        assert broker.values("demo") == [b"first", b"taken"]


async def test_records_staged_by_a_connection_that_is_lost_stay_and_its_waiting_requests_go() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        broker.engine.hold()
        behind = encoder.polls(subscription, [2]) + encoder.publishes(1, "demo", [3], [b"never taken"])
        peer.session.receive(encoder.publishes(1, "demo", [1], [b"staged"]) + behind)
        peer.session.lost()
        broker.engine.release()
        await rest()
        assert broker.values("demo") == [b"staged"]
        assert await (await broker.client()).poll(subscription) == [(1, 1, b"staged")], "the lost POLL took nothing"


async def test_new_topics_get_the_brokers_defaults() -> None:
    config = TopicConfig(retention_ms=1234)
    async with running_server(broker=BrokerSettings(topic_defaults=config)) as broker:
        await (await broker.client()).publish("demo", b"v")
        assert broker.broker.topic(DEV, "demo").config == config


async def test_a_reply_is_owed_for_a_ping_but_not_for_a_publish() -> None:
    """The connection then leaves the TCP acknowledgement to the reply."""
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"creates the topic")
        owes_reply: list[bool] = []
        for frame in (encoder.publishes(1, "demo", [1], [b"a"]), encoder.ping(2)):
            peer.session.receive(frame)
            owes_reply.append(peer.session.owes_reply)
        assert owes_reply == [False, True]
        await rest()
        assert peer.heard() == [Pong(2)] and not peer.session.owes_reply
