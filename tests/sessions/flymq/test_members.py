"""Members of groups over FlyMQ: they belong to their connection, and what they settle is durable."""

from __future__ import annotations

import pytest

from headrace.broker import SettlementPolicy
from headrace.limits import SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.records import RecordBatch
from headrace.wire.flymq.messages import (
    ACK,
    ACK_UP_TO,
    NACK,
    DescribeGroup,
    Done,
    Failure,
    GroupEntry,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupSettle,
    GroupSettled,
    GroupTake,
    GroupTaken,
    Mode,
    PartitionOffset,
    ResetOffset,
)
from tests.sessions.flymq.support import DEV, ListenerContext, Peer, running_server


async def _put(server: ListenerContext, count: int, partitions: int = 1) -> None:
    await server.broker.create_topic(DEV, "t", partitions=partitions)
    for partition in range(partitions):
        await server.broker.publish(DEV, "t", RecordBatch([b"%d" % number for number in range(count)]), partition=partition)


async def _join(peer: Peer, mode: str = "", start: str = "earliest", target: int = 0) -> GroupJoined:
    joined = await peer.one(GroupJoin("t", "g", mode, -1, start, target))
    assert isinstance(joined, GroupJoined)
    return joined


async def _take(peer: Peer, member: int, count: int = 100) -> list[tuple[int, int]]:
    taken = await peer.one(GroupTake(member, count))
    assert isinstance(taken, GroupTaken)
    return [(record.partition, record.offset) for record in taken.records]


async def test_a_member_takes_records_and_what_it_settles_is_durable() -> None:
    async with running_server() as server:
        await _put(server, 3)
        peer = server.peer()
        joined = await _join(peer)
        assert joined.mode == "ordered"
        assert await _take(peer, joined.member) == [(0, 0), (0, 1), (0, 2)]
        places = [PartitionOffset(0, 0), PartitionOffset(0, 9)]
        assert await peer.one(GroupSettle(joined.member, ACK, places)) == GroupSettled([True, False])
        assert server.broker.committed(DEV, "g", "t", 0) == 1
        assert await peer.one(GroupSettle(joined.member, ACK_UP_TO, [PartitionOffset(0, 2)])) == GroupSettled([True])
        assert server.broker.committed(DEV, "g", "t", 0) == 3


async def test_a_lost_connection_returns_what_its_members_hold() -> None:
    async with running_server() as server:
        await _put(server, 2, partitions=2)
        lost, peer = server.peer(), server.peer()
        first, second = await _join(lost), await _join(peer)
        held, mine = await _take(lost, first.member), await _take(peer, second.member)
        assert sorted(held + mine) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await lost.one(GroupSettle(first.member, ACK, [PartitionOffset(*held[0])]))
        lost.session.lost()
        assert await _take(peer, second.member) == held[1:]
        assert [member.topic for member in server.broker.members(DEV, "g")] == ["t"]


async def test_a_record_of_a_shared_group_is_delivered_again_after_the_time_of_the_settings() -> None:
    async with running_server() as server:
        await _put(server, 1)
        peer = server.peer(shared=SettlementPolicy(ack_timeout_ms=70_000))
        joined = await _join(peer, "shared")
        assert await _take(peer, joined.member) == [(0, 0)]
        server.now += 69_999
        assert await _take(peer, joined.member) == []
        server.now += 1
        assert await _take(peer, joined.member) == [(0, 0)]


async def test_a_member_that_leaves_is_unknown_and_so_is_that_of_another_connection() -> None:
    async with running_server() as server:
        await _put(server, 1)
        peer, other = server.peer(), server.peer()
        joined = await _join(peer)
        unknown = await other.one(GroupTake(joined.member, 1))
        assert isinstance(unknown, Failure) and unknown.message.startswith("group member not found")
        assert await peer.one(GroupLeave(joined.member)) == Done(True, "left the group")
        assert isinstance(await peer.one(GroupSettle(joined.member, ACK, [])), Failure)
        assert server.broker.members(DEV, "g") == []


async def test_a_nacked_record_of_a_shared_group_comes_again() -> None:
    async with running_server() as server:
        await _put(server, 1)
        peer = server.peer()
        joined = await _join(peer, "shared")
        assert await _take(peer, joined.member) == [(0, 0)]
        assert await peer.one(GroupSettle(joined.member, NACK, [PartitionOffset(0, 0)])) == GroupSettled([True])
        server.now += 1_000
        assert await _take(peer, joined.member) == [(0, 0)]


@pytest.mark.parametrize(
    ("start", "target", "places"),
    [("latest", 0, []), ("offset", 1, [(0, 1), (0, 2)]), ("timestamp", 1 << 60, []), ("timestamp", 0, [(0, 0), (0, 1), (0, 2)])],
)
async def test_a_new_group_begins_where_its_first_member_says(start: str, target: int, places: list[tuple[int, int]]) -> None:
    async with running_server() as server:
        await _put(server, 3)
        peer = server.peer()
        joined = await _join(peer, start=start, target=target)
        assert await _take(peer, joined.member) == places


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (GroupJoin("t", "g", "random"), "unknown group mode"),
        (GroupJoin("t", "g", "", 9), "partition"),
        (GroupJoin("t", "g", "", -1, "yesterday"), "unknown start"),
        (GroupJoin("none", "g"), "topic not found"),
        (GroupJoin("t", ""), "group"),
    ],
)
async def test_a_join_that_makes_no_sense_is_an_error(request_: GroupJoin, text: str) -> None:
    async with running_server() as server:
        await _put(server, 1)
        answer = await server.peer().one(request_)
        assert isinstance(answer, Failure) and text in answer.message


async def test_a_connection_has_only_so_many_members() -> None:
    async with running_server() as server:
        await _put(server, 1)
        peer = server.peer()
        for _ in range(SUBSCRIPTIONS_PER_CONNECTION_MAX):
            await _join(peer)
        answer = await peer.one(GroupJoin("t", "g"))
        assert isinstance(answer, Failure) and "limit" in answer.message


async def test_requests_for_groups_count_members_and_do_not_reset_under_them() -> None:
    async with running_server() as server:
        await _put(server, 3)
        peer = server.peer()
        joined = await _join(peer)
        await peer.one(GroupSettle(joined.member, ACK, []))
        entry = await peer.one(DescribeGroup("g", "t"))
        assert isinstance(entry, GroupEntry) and entry.members == 1
        refused = await peer.one(ResetOffset("t", "g", 0, Mode("latest")))
        assert isinstance(refused, Failure) and "active member" in refused.message
