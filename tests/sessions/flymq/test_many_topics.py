"""PRODUCE to many topics in turn: one append, one reply for each record, and errors that stay with their topic."""

from __future__ import annotations

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import TopicConfig
from headrace.errors import StorageFailed
from headrace.wire.flymq.messages import Failure, Fetch, Fetched, ListTopics, ProduceBatch, RecordMetadataBatch, TopicList

from .support import DEV, NOW, ListenerContext, Peer, placed, running_server

COUNT = 60


def in_turn(*topics: str, count: int = COUNT) -> list[ProduceBatch]:
    return [ProduceBatch(topics[number % len(topics)], [b"%03d" % number]) for number in range(count)]


async def created(server: ListenerContext, *topics: str, partitions: int = 1, config: TopicConfig | None = None) -> None:
    for topic in topics:
        await server.broker.create_topic(DEV, topic, partitions=partitions, config=config)


async def stored(peer: Peer, topic: str, partition: int = 0) -> list[bytes]:
    reply = await peer.one(Fetch(topic, partition, 0, 1000))
    assert isinstance(reply, Fetched)
    return list(reply.values)


async def test_each_record_is_answered_with_its_place_in_the_order_of_the_requests() -> None:
    async with running_server() as server:
        await created(server, "a", "b", "c")
        peer = server.peer()
        replies = await peer.exchange(*in_turn("a", "b", "c"))
        expected = [("abc"[number % 3], number // 3) for number in range(COUNT)]
        assert replies == [RecordMetadataBatch(topic, [0], [offset], [NOW], [-1], [3]) for topic, offset in expected]
        assert await stored(peer, "b") == [b"%03d" % number for number in range(1, COUNT, 3)]


async def test_topics_that_do_not_exist_are_created() -> None:
    async with running_server() as server:
        await created(server, "a")
        replies = await server.peer().exchange(*in_turn("a", "new", "newer"))
        assert [placed(reply) for reply in replies] == [(0, number // 3) for number in range(COUNT)]


async def test_a_topic_that_cannot_be_created_fails_only_its_own_records() -> None:
    async with running_server(BrokerSettings(auto_create=False)) as server:
        await created(server, "a", "b")
        peer = server.peer()
        replies = await peer.exchange(*in_turn("a", "missing", "b"), ListTopics())
        assert [isinstance(reply, Failure) for reply in replies[:-1]] == [False, True, False] * (COUNT // 3)
        assert replies[-1] == TopicList(["a", "b"]), "the request after them keeps its place"
        assert len(await stored(peer, "a")) == len(await stored(peer, "b")) == COUNT // 3


async def test_each_topic_needs_its_own_permission() -> None:
    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        return not (action is Action.PUBLISH and resource.name == "closed")

    async with running_server(authorize=authorize) as server:
        await created(server, "open", "closed")
        peer = server.peer()
        replies = await peer.exchange(*in_turn("open", "closed"))
        assert [isinstance(reply, Failure) for reply in replies] == [False, True] * (COUNT // 2)
        assert await stored(peer, "closed") == []


async def test_a_permission_that_ends_is_noticed_by_the_next_records() -> None:
    closed: set[str] = set()

    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        return not (action is Action.PUBLISH and resource.name in closed)

    async with running_server(authorize=authorize) as server:
        await created(server, "a", "b")
        peer = server.peer()
        assert not any(isinstance(reply, Failure) for reply in await peer.exchange(*in_turn("a", "b")))
        closed.add("b")
        server.broker.access_changed()
        replies = await peer.exchange(*in_turn("a", "b"))
        assert [isinstance(reply, Failure) for reply in replies] == [False, True] * (COUNT // 2)


@pytest.mark.parametrize("config", [TopicConfig(), TopicConfig(ttl_ms=1_000)])
async def test_a_time_to_live_of_a_topic_applies(config: TopicConfig) -> None:
    async with running_server() as server:
        await created(server, "a")
        await created(server, "b", config=config)
        peer = server.peer()
        await peer.exchange(*in_turn("a", "b"))
        server.now += 2_000
        assert len(await stored(peer, "a")) == COUNT // 2
        assert len(await stored(peer, "b")) == (0 if config.ttl_ms else COUNT // 2)


async def test_a_key_decides_the_partition_and_keyless_records_of_a_topic_stay_together() -> None:
    async with running_server() as server:
        await created(server, "one")
        await created(server, "many", partitions=8)
        peer = server.peer()
        keyed = [ProduceBatch("many" if number % 2 else "one", [b"v"], [b"key %d" % (number % 10)]) for number in range(COUNT)]
        places = [placed(reply) for reply in await peer.exchange(*keyed)]
        alone = [placed(await peer.one(ProduceBatch("many", [b"v"], [b"key %d" % (number % 10)])))[0] for number in range(1, COUNT, 2)]
        assert [partition for partition, _ in places[1::2]] == alone
        places = [placed(reply) for reply in await peer.exchange(*in_turn("one", "many"))]
        assert len({partition for partition, _ in places[1::2]}) == 1


async def test_a_disk_that_fails_fails_every_record_with_a_reply() -> None:
    async with running_server() as server:
        await created(server, "a", "b")
        server.engine.failure = StorageFailed("broken")
        replies = await server.peer().exchange(*in_turn("a", "b"))
        assert [reply.message for reply in replies if isinstance(reply, Failure)] == ["storage failed: broken"] * COUNT
