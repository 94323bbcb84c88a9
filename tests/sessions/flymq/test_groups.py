"""Topics, subscriptions and groups."""

from __future__ import annotations

import pytest

from headrace.limits import PARTITIONS_PER_TOPIC_MAX
from headrace.wire.flymq import Dialect
from headrace.wire.flymq.messages import (
    ClusterMetadata,
    ClusterTopics,
    Commit,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeGroup,
    Done,
    Failure,
    GetLag,
    GetOffset,
    GroupEntry,
    GroupList,
    LagReply,
    ListGroups,
    ListTopics,
    Metadata,
    Mode,
    OffsetReply,
    PartitionBounds,
    PartitionLeadership,
    PartitionOffset,
    ProduceBatch,
    Request,
    ResetOffset,
    SeekToTimestamp,
    Subscribe,
    TopicLeadership,
    TopicList,
    TopicMetadata,
)

from .support import DEV, NOW, ListenerContext, Peer, running_server


async def filled(server: ListenerContext, count: int = 5, partitions: int = 1) -> Peer:
    peer = server.peer()
    await peer.one(CreateTopic("t", partitions))
    await peer.exchange(ProduceBatch("t", [b"v"] * count, None, [0] * count))
    return peer


def done(reply: object) -> bool:
    return isinstance(reply, Done) and reply.success


async def test_topics_are_created_listed_described_and_deleted() -> None:
    async with running_server() as server:
        peer = server.peer()
        assert done(await peer.one(CreateTopic("b", 2)))
        assert done(await peer.one(CreateTopic("a", 0)))
        assert await peer.one(ListTopics()) == TopicList(["a", "b"])
        await peer.exchange(ProduceBatch("b", [b"1", b"2"], None, [1, 1]))
        assert await peer.one(Metadata("b")) == TopicMetadata("b", [PartitionBounds(0, 0, 0, 0), PartitionBounds(1, 0, 0, 2)])
        assert await peer.one(Metadata("a")) == TopicMetadata("a", [PartitionBounds(0, 0, 0, 0)])
        assert done(await peer.one(DeleteTopic("b")))
        assert await peer.one(ListTopics()) == TopicList(["a"])
        assert await peer.refused(Metadata("b")) == "topic not found: b"


async def test_creating_what_is_there_and_deleting_what_is_not_succeed() -> None:
    async with running_server() as server:
        peer = await filled(server)
        assert await peer.one(CreateTopic("t", 9)) == Done(True, "topic already exists")
        assert await peer.one(Metadata("t")) == TopicMetadata("t", [PartitionBounds(0, 0, 0, 5)])
        assert await peer.one(DeleteTopic("none")) == Done(True, "topic does not exist")


@pytest.mark.parametrize(
    ("partitions", "fits"),
    [(1, True), (PARTITIONS_PER_TOPIC_MAX, True), (PARTITIONS_PER_TOPIC_MAX + 1, False), (-1, False), (-(2**31), False)],
)
async def test_a_topic_has_a_bounded_number_of_partitions(partitions: int, fits: bool) -> None:
    async with running_server() as server:
        assert done(await server.peer().one(CreateTopic("t", partitions))) is fits


@pytest.mark.parametrize("name", ["", "a b", "__own", ".", "n" * 250])
async def test_a_bad_topic_name_is_refused(name: str) -> None:
    async with running_server() as server:
        assert (await server.peer().refused(CreateTopic(name, 1))).startswith("topic name")


async def test_the_cluster_is_one_node() -> None:
    async with running_server() as server:
        peer = await filled(server, partitions=2)
        leaders = [PartitionLeadership(number, "headrace", "127.0.0.1:9092", 1, "online", ["headrace"], ["headrace"]) for number in (0, 1)]
        expected = ClusterTopics("standalone", [TopicLeadership("t", leaders)])
        assert await peer.one(ClusterMetadata("t"), Dialect.SDK) == expected
        assert await peer.one(ClusterMetadata(), Dialect.SDK) == expected
        assert await peer.refused(ClusterMetadata("none"), Dialect.SDK) == "topic not found: none"


@pytest.mark.parametrize(
    ("mode", "offset"),
    [("earliest", 0), ("beginning", 0), ("latest", 5), ("end", 5), ("", 5), ("commit", 3), ("committed", 3)],
)
@pytest.mark.parametrize("narrow", [False, True])
async def test_a_subscription_says_where_to_start(mode: str, offset: int, narrow: bool) -> None:
    async with running_server() as server:
        peer = await filled(server)
        await peer.one(Commit("t", "g", 0, 3))
        assert await peer.one(Subscribe("t", "g", 0, Mode(mode, narrow))) == OffsetReply(offset)


async def test_a_group_without_a_commit_starts_at_the_first_record_and_the_latest_of_nothing_is_zero() -> None:
    async with running_server() as server:
        peer = await filled(server, partitions=2)
        assert await peer.one(Subscribe("t", "new", 0, Mode("commit"))) == OffsetReply(0)
        assert await peer.one(Subscribe("t", "new", 1, Mode("latest"))) == OffsetReply(0)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Subscribe("t", "g", 0, Mode("sometimes")), "unknown subscribe mode: sometimes"),
        (Subscribe("none", "g", 0, Mode("earliest")), "topic not found: none"),
        (Subscribe("t", "g", 1, Mode("earliest")), "partition 1 not found"),
        (Subscribe("t", "g", -1, Mode("earliest")), "partition -1 not found"),
        (ResetOffset("t", "g", 0, Mode("sometimes")), "unknown reset mode: sometimes"),
        (ResetOffset("t", "g", 0, Mode("")), "unknown reset mode: "),
        (ResetOffset("none", "g", 0, Mode("earliest")), "topic not found: none"),
        (ResetOffset("t", "g", -1, Mode("offset"), 1), "partition -1 not found"),
        (Commit("t", "g", 0, 2**64 - 1), "offset 18446744073709551615 out of range"),
        (Commit("t", "g", -5, 1), "partition -5 not found"),
        (GetOffset("t", "nobody", 0), "consumer group not found: t:nobody"),
        (GetLag("none", "g", 0), "topic not found: none"),
        (GetLag("t", "g", -1), "partition -1 not found"),
        (DescribeGroup("nobody", "t"), "consumer group not found: t:nobody"),
        (DescribeGroup("nobody"), "consumer group not found: nobody"),
        (DeleteGroup("nobody", "t"), "consumer group not found: t:nobody"),
        (SeekToTimestamp("none", 0, 0), "topic not found: none"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_the_words_clients_know(request_: Request, text: str) -> None:
    async with running_server() as server:
        assert await (await filled(server)).refused(request_) == text


async def test_an_empty_group_name_is_refused_where_it_would_be_stored() -> None:
    async with running_server() as server:
        assert "group name" in await (await filled(server)).refused(Commit("t", "", 0, 1))


async def test_a_commit_is_the_next_offset_to_read_and_may_go_back() -> None:
    async with running_server() as server:
        peer = await filled(server, partitions=2)
        assert done(await peer.one(Commit("t", "g", 0, 4)))
        assert await peer.one(GetOffset("t", "g", 0)) == OffsetReply(4)
        assert await peer.one(GetOffset("t", "g", 1)) == OffsetReply(0), "a known group that has not been there"
        assert done(await peer.one(Commit("t", "g", 0, 1)))
        assert await peer.one(GetOffset("t", "g", 0)) == OffsetReply(1)
        assert server.broker.committed(DEV, "g", "t", 0) == 1, "the same number through every protocol"


async def test_lag_is_what_is_left_to_read() -> None:
    async with running_server() as server:
        peer = await filled(server, partitions=2)
        assert await peer.one(GetLag("t", "new", 0)) == LagReply(0, 0, 5, 5)
        await peer.one(Commit("t", "g", 0, 3))
        assert await peer.one(GetLag("t", "g", 0)) == LagReply(3, 3, 5, 2)
        await peer.one(Commit("t", "g", 0, 99))
        assert await peer.one(GetLag("t", "g", 0)) == LagReply(99, 99, 5, 0)
        assert await peer.one(GetLag("t", "g", 1)) == LagReply(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("mode", "target", "offset"),
    [("earliest", 0, 0), ("latest", 0, 5), ("offset", 2, 2), ("timestamp", NOW + 1, 5), ("timestamp", -1, 0)],
)
@pytest.mark.parametrize("narrow", [False, True])
async def test_an_offset_is_reset_to_a_named_place(mode: str, target: int, offset: int, narrow: bool) -> None:
    async with running_server() as server:
        peer = await filled(server)
        await peer.one(Commit("t", "g", 0, 3))
        assert done(await peer.one(ResetOffset("t", "g", 0, Mode(mode, narrow), target)))
        assert await peer.one(GetOffset("t", "g", 0)) == OffsetReply(offset)


async def test_a_seek_finds_the_first_record_at_or_after_the_time_and_moves_a_named_group() -> None:
    async with running_server() as server:
        peer = await filled(server, 2)
        server.now += 1_000
        await peer.exchange(ProduceBatch("t", [b"late"]))
        assert await peer.one(SeekToTimestamp("t", 0, NOW)) == OffsetReply(0)
        assert await peer.one(SeekToTimestamp("t", 0, NOW + 1)) == OffsetReply(2)
        assert await peer.one(SeekToTimestamp("t", 0, NOW + 1_001)) == OffsetReply(3)
        assert isinstance(await peer.one(GetOffset("t", "g", 0)), Failure), "nothing was moved"
        assert await peer.one(SeekToTimestamp("t", 0, NOW + 500, "g")) == OffsetReply(2)
        assert await peer.one(GetOffset("t", "g", 0)) == OffsetReply(2)


async def test_groups_are_listed_and_described_by_topic() -> None:
    async with running_server() as server:
        peer = await filled(server, partitions=2)
        await peer.one(CreateTopic("s", 1))
        for request in (Commit("t", "g", 1, 2), Commit("t", "g", 0, 1), Commit("s", "g", 0, 7), Commit("t", "f", 0, 4)):
            await peer.one(request)
        on_t = GroupEntry("t", "g", 0, [PartitionOffset(0, 1), PartitionOffset(1, 2)])
        on_s = GroupEntry("s", "g", 0, [PartitionOffset(0, 7)])
        assert await peer.one(ListGroups()) == GroupList([on_s, GroupEntry("t", "f", 0, [PartitionOffset(0, 4)]), on_t])
        assert await peer.one(DescribeGroup("g", "t")) == on_t
        assert await peer.one(DescribeGroup("g")) == on_s, "the first by name"


async def test_deleting_a_group_on_a_topic_leaves_its_other_topics_alone() -> None:
    async with running_server() as server:
        peer = await filled(server)
        await peer.one(CreateTopic("s", 1))
        for topic in ("s", "t"):
            await peer.one(Commit(topic, "g", 0, 1))
        assert done(await peer.one(DeleteGroup("g", "t")))
        assert await peer.one(ListGroups()) == GroupList([GroupEntry("s", "g", 0, [PartitionOffset(0, 1)])])
        assert done(await peer.one(DeleteGroup("g")))
        assert await peer.one(ListGroups()) == GroupList([])


async def test_the_offsets_of_a_deleted_topic_are_gone() -> None:
    async with running_server() as server:
        peer = await filled(server)
        await peer.one(Commit("t", "g", 0, 1))
        await peer.one(DeleteTopic("t"))
        assert await peer.one(ListGroups()) == GroupList([])
