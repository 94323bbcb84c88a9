"""Groups, which only Headrace adds to SUBSCRIBE: members share the messages and leave with their connection."""

from __future__ import annotations

from typing import Literal

import pytest

from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.wire.blipmq import AckBatch, Nack, encoder
from tests.sessions.blipmq.support import KEYS, Peer, running_server

DEV = KEYS[b"dev-key"]
SLOW = BlipMqSettings(retry_backoff_ms=60_000)


async def _join(peer: Peer, mode: Literal["", "ordered", "shared"] = "", *, earliest: bool = False) -> int:
    (reply,) = await peer.exchange(encoder.subscribe(7, "demo", 1, "g", mode, earliest=earliest))
    assert isinstance(reply, AckBatch), reply
    return reply.subscription


async def test_each_message_goes_to_one_member_and_without_a_group_to_all() -> None:
    async with running_server(SLOW) as broker:
        one, other, alone = await broker.client(), await broker.client(), await broker.client()
        mine, theirs, all_of_them = await _join(one), await _join(other), await alone.subscribe("demo")
        await one.publish("demo", *(b"%d" % number for number in range(10)))
        shares = [value for _, _, value in await one.poll(mine, 5)], [value for _, _, value in await other.poll(theirs, 9)]
        assert sorted(shares[0] + shares[1]) == [b"%d" % number for number in range(10)] and len(shares[0]) == 5
        assert len(await alone.poll(all_of_them, 20)) == 10


async def test_a_lost_connection_returns_what_its_member_has_not_acknowledged() -> None:
    async with running_server(SLOW) as broker:
        lost, peer = await broker.client(), await broker.client()
        first, second = await _join(lost), await _join(peer)
        await peer.publish("demo", b"a", b"b", b"c")
        (_, tag, _), *_ = await lost.poll(first, 3)
        assert await lost.exchange(encoder.acks(first, [tag])) == []
        assert await peer.poll(second, 3) == []
        lost.session.lost()
        assert [value for _, _, value in await peer.poll(second, 3)] == [b"b", b"c"]
        assert await peer.exchange(encoder.polls(first, [9])) == [Nack(9, 404, "unknown subscription or delivery tag")]
        assert len(broker.broker.members(DEV, "g")) == 1


async def test_a_group_resumes_where_it_was_and_begins_at_the_end_or_the_start() -> None:
    async with running_server(SLOW) as broker:
        peer = await broker.client()
        await peer.publish("demo", b"before")
        member = await _join(peer)
        assert await peer.poll(member, 3) == []
        await peer.publish("demo", b"a")
        await peer.exchange(encoder.acks(member, [tag for _, tag, _ in await peer.poll(member, 3)]))
        peer.session.lost()
        again = await broker.client()
        await again.publish("demo", b"b")
        assert [value for _, _, value in await again.poll(await _join(again), 3)] == [b"b"]
        (reply,) = await again.exchange(encoder.subscribe(8, "demo", 1, "from the start", earliest=True))
        assert isinstance(reply, AckBatch)
        assert [value for _, _, value in await again.poll(reply.subscription, 5)] == [b"before", b"a", b"b"]


async def test_the_mode_of_a_group_is_shared_unless_its_first_member_says_otherwise() -> None:
    async with running_server(SLOW) as broker:
        peer = await broker.client()
        await _join(peer)
        assert [member.mode for member in broker.broker.members(DEV, "g")] == ["shared"]
        (refused,) = await peer.exchange(encoder.subscribe(7, "demo", 1, "g", "ordered"))
        assert isinstance(refused, Nack) and refused.code == 400 and "shared" in refused.text


@pytest.mark.parametrize("qos", [0, 2])
async def test_a_group_needs_acknowledgements(qos: int) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        assert await peer.exchange(encoder.subscribe(7, "demo", qos, "g")) == [Nack(7, 400, "invalid QoS value")]
