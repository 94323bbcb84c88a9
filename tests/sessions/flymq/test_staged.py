"""COMMIT, PRODUCE_DELAYED and PRODUCE_WITH_TTL: staged like PRODUCE, answered in order, each with its own error."""

from __future__ import annotations

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import TopicConfig
from headrace.errors import DiskFull
from headrace.wire.flymq.advanced_messages import Placed, ProduceDelayed, ProduceWithTtl, Scheduled
from headrace.wire.flymq.messages import (
    Commit,
    CreateTopic,
    Done,
    Failure,
    Fetch,
    Fetched,
    GetOffset,
    ListTopics,
    OffsetReply,
    ProduceBatch,
    RecordMetadataBatch,
    Request,
    TopicList,
)

from .support import DEV, NOW, rest, running_server

COUNT = 40


def requests(kind: str, topic: str = "t") -> list[Request]:
    if kind == "commit":
        return [Commit(topic, "g", 0, number) for number in range(COUNT)]
    if kind == "delayed":
        return [ProduceDelayed(topic, b"%d" % number, 1_000) for number in range(COUNT)]
    return [ProduceWithTtl(topic, b"%d" % number, 1_000) for number in range(COUNT)]


KINDS = ["commit", "delayed", "ttl"]


@pytest.mark.parametrize("kind", KINDS)
async def test_none_waits_for_the_disk_before_the_next_is_taken(kind: str) -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("t", 1))
        await peer.one(CreateTopic("slow", 1))
        server.engine.hold("slow")
        peer.send(ProduceBatch("slow", [b"first"]), *requests(kind))
        await rest()
        assert peer.heard() == [], "replies keep the order of the requests"
        if kind == "commit":
            assert server.broker.committed(DEV, "g", "t", 0) == COUNT - 1
        elif kind == "delayed":
            assert len(server.broker.delayed(DEV)) == COUNT
        else:
            assert server.broker.bounds(DEV, "t", 0).end == COUNT
        server.engine.release("slow")
        first, *others = await peer.replies(1 + COUNT)
        assert isinstance(first, RecordMetadataBatch)
        assert not any(isinstance(reply, Failure) for reply in others)


async def test_the_replies_are_those_of_single_requests() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("t", 1))
        assert await peer.exchange(*requests("commit")) == [Done(True, "offset committed")] * COUNT
        assert await peer.one(GetOffset("t", "g", 0)) == OffsetReply(COUNT - 1)
        placed = await peer.exchange(*requests("ttl"))
        assert placed == [Placed("t", 0, number, NOW, -1, len(str(number))) for number in range(COUNT)]
        scheduled = await peer.exchange(*requests("delayed"))
        for number, reply in enumerate(scheduled):
            assert isinstance(reply, Scheduled)
            assert (reply.offset, reply.timestamp, reply.value_size, reply.deliver_at) == (0, NOW, len(str(number)), NOW + 1_000)
        assert {one.id for one in server.broker.delayed(DEV)} == {reply.message for reply in scheduled if isinstance(reply, Scheduled)}


async def test_records_with_a_time_to_live_expire_and_zero_means_that_of_the_topic() -> None:
    async with running_server() as server:
        await server.broker.create_topic(DEV, "t", config=TopicConfig(ttl_ms=5_000))
        peer = server.peer()
        await peer.exchange(*(ProduceWithTtl("t", b"%d" % number, 1_000 * (number % 2)) for number in range(COUNT)))
        server.now += 2_000
        reply = await peer.one(Fetch("t", 0, 0, 1_000))
        assert isinstance(reply, Fetched)
        assert list(reply.values) == [b"%d" % number for number in range(0, COUNT, 2)]
        server.now += 4_000
        reply = await peer.one(Fetch("t", 0, 0, 1_000))
        assert isinstance(reply, Fetched)
        assert not reply.values


async def test_a_request_that_fails_does_not_fail_its_neighbours() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("t", 1))
        bad: dict[str, Request] = {
            "commit": Commit("t", "g", 7, 1),
            "delayed": ProduceDelayed("t", b"x", 1 << 60),
            "ttl": ProduceWithTtl("t", b"x", -1),
        }
        for kind, odd in bad.items():
            replies = await peer.exchange(*requests(kind)[:10], odd, *requests(kind)[10:], ListTopics())
            assert [isinstance(reply, Failure) for reply in replies[:-1]] == [False] * 10 + [True] + [False] * (COUNT - 10), kind
            assert replies[-1] == TopicList(["t"])
        assert server.broker.committed(DEV, "g", "t", 0) == COUNT - 1
        assert len(server.broker.delayed(DEV)) == server.broker.bounds(DEV, "t", 0).end == COUNT


@pytest.mark.parametrize("kind", ["delayed", "ttl"])
async def test_a_missing_topic_is_created(kind: str) -> None:
    async with running_server() as server:
        replies = await server.peer().exchange(*requests(kind, "new"))
        assert not any(isinstance(reply, Failure) for reply in replies)
        assert server.broker.topic(DEV, "new").partitions == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_every_request_for_a_topic_that_may_not_be_created_gets_its_error(kind: str) -> None:
    async with running_server(BrokerSettings(auto_create=False)) as server:
        replies = await server.peer().exchange(*requests(kind, "missing"))
        assert replies == [Failure("topic not found: missing")] * COUNT


async def test_the_limit_of_delayed_messages_accepts_as_many_as_fit() -> None:
    async with running_server(BrokerSettings(delayed_max=25)) as server:
        peer = server.peer()
        await peer.one(CreateTopic("t", 1))
        replies = await peer.exchange(*requests("delayed"))
        assert [isinstance(reply, Failure) for reply in replies] == [False] * 25 + [True] * (COUNT - 25)


async def test_a_full_disk_fails_every_record_with_a_time_to_live() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("t", 1))
        server.engine.failure = DiskFull("no room")
        assert await peer.exchange(*requests("ttl")) == [Failure("disk full: no room")] * COUNT
