"""Transactions whose records and commit arrive together share the work and keep every promise of one alone."""

from __future__ import annotations

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.errors import DiskFull
from headrace.limits import FLYMQ_TRANSACTIONS_MAX, MIB
from headrace.wire.flymq import encode_request
from headrace.wire.flymq.advanced_messages import Placed, TxnBegin, TxnBegun, TxnCommit, TxnEnded, TxnProduceBatch, TxnRollback
from headrace.wire.flymq.messages import CreateTopic, Failure, Fetch, Fetched, ProduceBatch, Reply
from tests.sessions.flymq.support import DEV, NOW, ListenerContext, Peer, rest, running_server


async def begun(peer: Peer, count: int) -> list[str]:
    peer.send(*[TxnBegin()] * count)
    replies = await peer.replies(count)
    assert all(isinstance(reply, TxnBegun) for reply in replies)
    return [reply.transaction for reply in replies if isinstance(reply, TxnBegun)]


def requests(ids: list[str], topic: str = "a", records: int = 1) -> list[TxnProduceBatch | TxnCommit]:
    return [request for number, id in enumerate(ids) for request in (TxnProduceBatch(id, topic, [b"%d" % number] * records), TxnCommit(id))]


async def values(peer: Peer, topic: str = "a", partition: int = 0) -> list[bytes]:
    reply = await peer.one(Fetch(topic, partition, 0, 1_000))
    assert isinstance(reply, Fetched)
    return list(reply.values)


def offsets(replies: list[Reply]) -> list[list[int]]:
    return [[one.offset for one in reply.records] for reply in replies if isinstance(reply, TxnEnded)]


async def test_transactions_sent_together_share_an_append_and_each_is_answered() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 50)
        appended: list[int] = []
        append = server.engine.append

        def counted(writes: object, **options: object) -> object:
            appended.append(1)
            return append(writes, **options)  # type: ignore[arg-type]  # passed on

        server.engine.append = counted  # type: ignore[method-assign, assignment]
        peer.send(*requests(ids, records=2))
        replies = await peer.replies(150)
        assert len(appended) == 1
        assert replies[:2] == [Placed("a", 0, 0, NOW, -1, 1)] * 2
        assert [reply.transaction for reply in replies if isinstance(reply, TxnEnded)] == ids
        assert offsets(replies) == [[2 * number, 2 * number + 1] for number in range(50)]
        assert await values(peer) == [b"%d" % number for number in range(50) for _ in range(2)]
        assert server.broker._transactions._by_id == {} and server.broker._transactions._bytes == 0
        meter = server.broker.meters.meter("a", "flymq")
        assert (meter.published_records, meter.published_batches) == (100, 50)
        assert all(isinstance(reply, Failure) for reply in await peer.exchange(*map(TxnCommit, ids)))


async def test_after_a_full_disk_each_transaction_has_its_records_and_can_be_committed_again() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 3)
        server.engine.failure = DiskFull("full")
        peer.send(*requests(ids, records=2))
        replies = await peer.replies(9)
        assert [type(reply) for reply in replies] == [Placed, Placed, Failure] * 3
        server.engine.failure = None
        assert await values(peer) == []
        ended = await peer.exchange(TxnCommit(ids[2]), TxnRollback(ids[1]), TxnCommit(ids[0]))
        assert offsets(ended) == [[0, 1], [], [2, 3]]
        assert await values(peer) == [b"2", b"2", b"0", b"0"]
        assert server.broker._transactions._bytes == 0


async def test_a_failed_transaction_whose_records_cannot_be_kept_is_aborted_and_the_others_are_not() -> None:
    async with running_server(BrokerSettings(transactions_bytes_max=40)) as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 3)
        server.engine.failure = DiskFull("full")
        peer.send(*requests(ids))
        assert [type(reply) for reply in await peer.replies(6)] == [Placed, Failure] * 3
        server.engine.failure = None
        assert [type(reply) for reply in await peer.exchange(*map(TxnCommit, ids))] == [TxnEnded, TxnEnded, Failure]
        assert await values(peer) == [b"0", b"1"]


async def test_a_connection_lost_before_the_failure_leaves_no_open_transaction() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 3)
        server.engine.failure = DiskFull("full")
        peer.send(*requests(ids))
        peer.session.lost()
        await rest()
        assert server.broker._transactions._by_id == {} and server.broker._transactions._bytes == 0


async def test_a_transaction_with_earlier_records_is_committed_with_them() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 4)
        peer.send(TxnProduceBatch(ids[1], "a", [b"earlier"]))
        await peer.replies(1)
        peer.send(*requests(ids))
        assert offsets(await peer.replies(8)) == [[0], [1, 2], [3], [4]]
        assert await values(peer) == [b"0", b"earlier", b"1", b"2", b"3"]


async def test_an_unknown_or_repeated_transaction_fails_alone() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 2)
        peer.send(*requests([ids[0], "txn-nobody", ids[1], ids[1]]))
        replies = await peer.replies(8)
        assert [isinstance(reply, Failure) for reply in replies] == [False, False, True, True, False, False, True, True]
        peer.send(*requests(twice := await begun(peer, 1) * 2))
        assert len(set(twice)) == 1
        assert [isinstance(reply, Failure) for reply in await peer.replies(4)] == [False, False, True, True]
        assert await values(peer) == [b"0", b"2", b"0"]


async def test_records_keep_their_place_among_those_published_before_and_after() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        ids = await begun(peer, 3)
        stream = [ProduceBatch("a", [b"before"]), *requests(ids), ProduceBatch("a", [b"after"])]
        peer.session.receive(b"".join(map(encode_request, stream)))
        await peer.replies(8)
        assert await values(peer) == [b"before", b"0", b"1", b"2", b"after"]


async def test_a_new_topic_several_partitions_and_large_records_work_as_one_by_one() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("wide", 3))
        ids = await begun(peer, 6)
        peer.send(*requests(ids[:2], "new"), *requests(ids[2:4], "wide"))
        replies = await peer.replies(8)
        assert [type(reply) for reply in replies] == [Placed, TxnEnded] * 4
        assert await values(peer, "new") == [b"0", b"1"]
        assert sorted([value for partition in range(3) for value in await values(peer, "wide", partition)]) == [b"0", b"1"]
        large = b"x" * MIB
        peer.send(*(request for id in ids[4:] for request in (TxnProduceBatch(id, "large", [large]), TxnCommit(id))))
        assert offsets(await peer.replies(4)) == [[0], [1]]


async def test_a_topic_whose_permission_has_ended_refuses_each_commit() -> None:
    allowed = [True]

    async def body(server: ListenerContext) -> None:
        peer = server.peer()
        await server.broker.create_topic(DEV, "a")
        ids = await begun(peer, 2)
        allowed.clear()
        server.broker.access_changed()
        peer.send(*requests(ids))
        replies = await peer.replies(4)
        assert all(isinstance(replies[index], Failure) for index in (0, 2))

    async with running_server(authorize=lambda who, action, resource: bool(allowed) or resource.kind != "topic") as server:
        await body(server)


async def test_begins_beyond_the_limit_fail_and_the_others_succeed() -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.send(*[TxnBegin()] * (FLYMQ_TRANSACTIONS_MAX + 2))
        replies = await peer.replies(FLYMQ_TRANSACTIONS_MAX + 2)
        assert [isinstance(reply, TxnBegun) for reply in replies] == [True] * FLYMQ_TRANSACTIONS_MAX + [False] * 2
    async with running_server(BrokerSettings(transactions_open_max=2)) as server:
        peer = server.peer()
        peer.send(*[TxnBegin()] * 3)
        assert [type(reply) for reply in await peer.replies(3)] == [TxnBegun, TxnBegun, Failure]


@pytest.mark.parametrize("timeout_ms", [0, 1234])
async def test_transactions_begun_together_have_the_timeout_they_ask_for(timeout_ms: int) -> None:
    async with running_server() as server:
        peer = server.peer()
        peer.send(*[TxnBegin(timeout_ms)] * 2)
        first, second = await peer.replies(2)
        assert isinstance(first, TxnBegun) and isinstance(second, TxnBegun) and first != second
        held = server.broker._transactions._by_id[second.transaction]
        assert held.deadline.timeout_ms == (timeout_ms or 60_000)
