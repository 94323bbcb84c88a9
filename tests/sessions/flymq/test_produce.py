"""PRODUCE: partitions of records, replies to producers, and their order."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.settings import BrokerSettings
from headrace.errors import BrokerError, DiskFull, StorageFailed, Unavailable
from headrace.limits import IN_FLIGHT_BYTES_MAX, KEY_BYTES_MAX
from headrace.sessions.flymq.staging import RECORD_BYTES_MAX
from headrace.wire.flymq.messages import (
    Consume,
    Consumed,
    CreateTopic,
    Done,
    Failure,
    Fetch,
    Fetched,
    ListTopics,
    ProduceBatch,
    RecordMetadataBatch,
    TopicList,
)

from .support import NOW, ListenerContext, placed, rest, running_server


async def created(server: ListenerContext, topic: str, partitions: int) -> None:
    assert isinstance(await server.peer().one(CreateTopic(topic, partitions)), Done)


async def test_a_record_is_answered_with_where_and_when_it_was_stored() -> None:
    async with running_server() as server:
        peer = server.peer()
        assert await peer.one(ProduceBatch("t", [b"hello"])) == RecordMetadataBatch("t", [0], [0], [NOW], [-1], [5])
        server.now += 7
        assert await peer.one(ProduceBatch("t", [b""], [b"key"])) == RecordMetadataBatch("t", [0], [1], [NOW + 7], [3], [0])


async def test_every_record_of_a_batch_gets_its_own_reply() -> None:
    async with running_server() as server:
        replies = await server.peer().exchange(ProduceBatch("t", [b"%d" % number for number in range(500)]))
        assert [placed(reply) for reply in replies] == [(0, number) for number in range(500)]


async def test_records_may_come_one_by_one_and_cut_anywhere() -> None:
    async with running_server() as server:
        peer = server.peer()
        stream = b"".join(
            bytes.fromhex("AF010101 00000013 0001 74 00000000 00000004") + b"%04d" % number + b"\xff\xff\xff\xff" for number in range(20)
        )
        for at in range(len(stream)):
            peer.session.receive(stream[at : at + 1])
        assert [placed(reply) for reply in await peer.replies(20)] == [(0, number) for number in range(20)]


async def test_the_produce_example_of_the_specification_works_as_printed() -> None:
    async with running_server() as server:
        peer = server.peer()
        example = bytes.fromhex("AF01010100000013 0004 74657374 00000000 00000005 68656C6C6F FFFFFFFF")
        peer.session.receive(example * 2)
        assert [placed(reply) for reply in await peer.replies(2)] == [(0, 0), (0, 1)]
        assert await peer.one(Consume("test", 0, 1)) == Consumed(b"", b"hello")


async def test_a_partition_that_is_named_is_used() -> None:
    async with running_server() as server:
        await created(server, "t", 3)
        batch = ProduceBatch("t", [b"%d" % number for number in range(6)], None, [2, 0, 2, 2, 1, 0])
        replies = await server.peer().exchange(batch)
        assert [placed(reply) for reply in replies] == [(2, 0), (0, 0), (2, 1), (2, 2), (1, 0), (0, 1)]


async def test_a_partition_there_is_not_is_refused_for_that_record_alone() -> None:
    async with running_server() as server:
        await created(server, "t", 2)
        replies = await server.peer().exchange(ProduceBatch("t", [b"a", b"b", b"c", b"d"], None, [1, 2, -2, 1]))
        assert [placed(replies[0]), placed(replies[3])] == [(1, 0), (1, 1)]
        assert replies[1:3] == [Failure("partition 2 out of range"), Failure("partition -2 out of range")]


async def test_named_and_free_choice_may_be_mixed_and_keep_their_order_in_each_partition() -> None:
    async with running_server() as server:
        await created(server, "t", 2)
        key = b"user-123"  # its hash is 0x8c93cc93: odd, so partition 1
        batch = ProduceBatch("t", [b"0", b"1", b"2", b"3"], [key, key, key, key], [-1, 1, -1, 0])
        replies = await server.peer().exchange(batch)
        assert [placed(reply) for reply in replies] == [(1, 0), (1, 1), (1, 2), (0, 0)]


@pytest.mark.parametrize(("key", "hash_"), [("user-123", 0x8C93CC93), ("user-456", 0x58E2C8F4), ("key", 0x6815C86C), ("a", 0xE40C292C)])
async def test_keys_are_spread_as_the_original_spreads_them(key: str, hash_: int) -> None:
    async with running_server() as server:
        await created(server, "t", 7)
        partition, _ = placed(await server.peer().one(ProduceBatch("t", [b""], [key.encode()])))
        assert partition == hash_ % 7


async def test_keyed_records_of_one_batch_are_told_their_own_places() -> None:
    async with running_server() as server:
        await created(server, "t", 4)
        keys: list[bytes | None] = [b"k%d" % (number % 10) for number in range(100)]
        replies = await server.peer().exchange(ProduceBatch("t", [b"%d" % number for number in range(100)], keys))
        places = [placed(reply) for reply in replies]
        assert len(set(places)) == 100 and len({partition for partition, _ in places}) > 1
        for number, (partition, offset) in enumerate(places):
            assert await server.peer().one(Consume("t", partition, offset)) == Consumed(keys[number] or b"", b"%d" % number)


async def test_a_topic_that_is_missing_is_created_unless_that_is_switched_off() -> None:
    async with running_server() as server:
        assert placed(await server.peer().one(ProduceBatch("new", [b"1"]))) == (0, 0)
    async with running_server(BrokerSettings(auto_create=False)) as server:
        replies = await server.peer().exchange(ProduceBatch("new", [b"1", b"2"]), ListTopics())
        assert replies == [Failure("topic not found: new")] * 2 + [TopicList([])]


@pytest.mark.parametrize("topic", ["", "a b", "__offsets", "..", "x" * 250])
async def test_a_topic_with_a_bad_name_is_refused_and_the_connection_goes_on(topic: str) -> None:
    async with running_server() as server:
        peer = server.peer()
        replies = await peer.exchange(ProduceBatch(topic, [b"1", b"2"]), ListTopics())
        assert all(isinstance(reply, Failure) for reply in replies[:2])
        assert replies[2] == TopicList([])


async def test_replies_keep_the_order_of_the_requests_though_a_later_record_is_stored_first() -> None:
    async with running_server() as server:
        await created(server, "slow", 1)
        await created(server, "quick", 1)
        server.engine.hold("slow")
        peer = server.peer()
        peer.send(ProduceBatch("slow", [b"1"]), ProduceBatch("quick", [b"2"]), ListTopics(), ProduceBatch("quick", [b"3"]))
        await rest()
        assert peer.heard() == []
        server.engine.release("slow")
        replies = await peer.replies(4)
        assert [reply.topic for reply in replies if isinstance(reply, RecordMetadataBatch)] == ["slow", "quick", "quick"]
        assert replies[2] == TopicList(["quick", "slow"])


async def test_a_client_that_publishes_and_then_fetches_reads_its_own_writes() -> None:
    async with running_server() as server:
        await created(server, "t", 1)
        server.engine.hold("t")
        peer = server.peer()
        peer.send(ProduceBatch("t", [b"1"]), Fetch("t", 0, 0, 10), ProduceBatch("t", [b"2"]), Fetch("t", 0, 1, 10))
        await rest()
        server.engine.release("t")
        replies = await peer.replies(4)
        assert replies[1] == Fetched([0], [b"1"], 1)
        assert replies[3] == Fetched([1], [b"2"], 2)


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (DiskFull("no space left"), "disk full: no space left"),
        (StorageFailed("write failed"), "storage failed: write failed"),
        (Unavailable("starting"), "unavailable: starting"),
    ],
)
async def test_records_the_disk_refuses_are_refused_one_by_one(failure: BrokerError, text: str) -> None:
    async with running_server() as server:
        await created(server, "t", 1)
        peer = server.peer()
        server.engine.failure = failure
        assert await peer.exchange(ProduceBatch("t", [b"1", b"2"])) == [Failure(text)] * 2
        server.engine.failure = None
        assert placed(await peer.one(ProduceBatch("t", [b"3"]))) == (0, 0)


async def test_one_record_too_large_takes_no_other_down() -> None:
    async with running_server() as server:
        keys: list[bytes | None] = [None, bytes(KEY_BYTES_MAX + 1), bytes(KEY_BYTES_MAX), None]
        replies = await server.peer().exchange(ProduceBatch("t", [b"1", b"2", b"3", b"4"], keys))
        assert isinstance(replies[1], Failure)
        assert [placed(replies[index]) for index in (0, 2, 3)] == [(0, 0), (0, 1), (0, 2)]


async def test_no_record_is_taken_that_a_fetch_could_not_bring_back() -> None:
    async with running_server() as server:
        peer = server.peer()
        value = bytes(RECORD_BYTES_MAX)
        assert placed(await peer.one(ProduceBatch("t", [value]))) == (0, 0)
        fetched = await peer.one(Fetch("t", 0, 0, 10))
        assert isinstance(fetched, Fetched) and fetched.values == [value]
        refused = await peer.refused(ProduceBatch("t", [value + b"!"]))
        assert refused == f"record of {RECORD_BYTES_MAX + 1} bytes exceeds the limit of {RECORD_BYTES_MAX} bytes"


async def test_a_publish_without_the_right_is_an_error() -> None:
    def readers_only(who: Principal, action: Action, resource: Resource) -> bool:
        return action is not Action.PUBLISH

    async with running_server(authorize=readers_only) as server:
        assert (await server.peer().refused(ProduceBatch("t", [b"1"]))).startswith("unauthorized: dev may not publish")


async def test_a_writer_faster_than_the_disk_is_no_longer_read_until_half_is_stored() -> None:
    async with running_server() as server:
        await created(server, "t", 1)
        server.engine.hold("t")
        peer = server.peer()
        megabyte = bytes(1 << 20)
        for _ in range(IN_FLIGHT_BYTES_MAX >> 20):
            assert peer.wire.pauses == 0
            peer.send(ProduceBatch("t", [megabyte]))
        assert peer.wire.pauses == 1
        server.engine.release("t")
        await peer.replies(IN_FLIGHT_BYTES_MAX >> 20)
        assert peer.wire.pauses == 0


async def test_records_without_bytes_count_against_the_window_too() -> None:
    async with running_server() as server:
        await created(server, "t", 1)
        server.engine.hold("t")
        peer = server.peer()
        peer.send(*[ProduceBatch("t", [b""] * 10_000)] * 30)
        assert peer.wire.pauses == 1
        server.engine.release("t")
        await peer.replies(300_000)
        assert peer.wire.pauses == 0


async def test_a_connection_lost_with_records_under_way_leaves_nothing_behind() -> None:
    async with running_server() as server:
        await created(server, "t", 1)
        server.engine.hold("t")
        peer = server.peer()
        peer.send(ProduceBatch("t", [b"1"]), ListTopics(), ProduceBatch("other", [b"2"]))
        await rest()
        peer.session.lost()
        server.engine.release("t")
        await rest()
        assert peer.wire.sent == b""
        assert await server.peer().one(Consume("t", 0, 0)) == Consumed(b"", b"1")


async def test_a_draining_server_answers_what_it_received_and_then_closes() -> None:
    async with running_server() as server:
        await created(server, "t", 1)
        server.engine.hold("t")
        peer = server.peer()
        peer.send(ProduceBatch("t", [b"1"]), ListTopics())
        peer.session.closing()
        peer.send(ProduceBatch("t", [b"not taken"]))
        await asyncio.sleep(0)
        assert peer.wire.closed is None
        server.engine.release("t")
        assert await peer.closed() == ("drained", False)
        assert [placed(reply) if isinstance(reply, RecordMetadataBatch) else reply for reply in await peer.replies(2)] == [
            (0, 0),
            TopicList(["t"]),
        ]


async def test_an_idle_connection_closes_at_once_when_the_server_drains() -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.session.closing()
        assert peer.wire.closed == ("drained", False)
