"""Transactions through the FlyMQ protocol: unseen until the commit, then all there."""

from __future__ import annotations

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.errors import DiskFull
from headrace.limits import FLYMQ_TRANSACTIONS_MAX
from headrace.wire.flymq.advanced_messages import Placed, TxnBegin, TxnBegun, TxnCommit, TxnEnded, TxnProduceBatch, TxnRollback
from headrace.wire.flymq.messages import Commit, CreateTopic, Done, Failure, Fetch, Fetched, ProduceBatch, RecordMetadataBatch, Reply
from tests.sessions.flymq.support import DEV, NOW, Peer, rest, running_server


async def _begin(peer: Peer) -> str:
    reply = await peer.one(TxnBegin())
    assert isinstance(reply, TxnBegun) and reply.success
    return reply.transaction


async def _values(peer: Peer, topic: str, partition: int = 0) -> list[bytes]:
    reply = await peer.one(Fetch(topic, partition, 0, 1_000))
    assert isinstance(reply, Fetched)
    return list(reply.values)


async def _produce(peer: Peer, batch: TxnProduceBatch) -> list[Reply]:
    peer.send(batch)
    return await peer.replies(len(batch))


async def test_records_offsets_and_their_places_come_with_the_commit() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.exchange(CreateTopic("a", 1), CreateTopic("b", 3))
        id = await _begin(peer)
        replies = await _produce(peer, TxnProduceBatch(id, "a", [b"1", b"22"]))
        assert replies == [Placed("a", 0, 0, NOW, -1, 1), Placed("a", 0, 0, NOW, -1, 2)]
        assert await _produce(peer, TxnProduceBatch(id, "b", [b"333"], [b"k"], [2])) == [Placed("b", 2, 0, NOW, 1, 3)]
        assert await peer.one(Commit("a", "g", 0, 1, id)) == Done(True, "offset staged")
        other = server.peer()
        assert await _values(other, "a") == [] and await _values(other, "b", 2) == []
        assert server.broker.committed(DEV, "g", "a", 0) is None
        ended = await peer.one(TxnCommit(id))
        assert isinstance(ended, TxnEnded) and (ended.transaction, ended.success) == (id, True)
        assert ended.records == [Placed("a", 0, 0, NOW, -1, 1), Placed("a", 0, 1, NOW, -1, 2), Placed("b", 2, 0, NOW, 1, 3)]
        assert await _values(other, "a") == [b"1", b"22"] and await _values(other, "b", 2) == [b"333"]
        assert server.broker.committed(DEV, "g", "a", 0) == 1


async def test_a_rollback_leaves_nothing() -> None:
    async with running_server() as server:
        peer = server.peer()
        id = await _begin(peer)
        await _produce(peer, TxnProduceBatch(id, "a", [b"1"]))
        assert await peer.one(TxnRollback(id)) == TxnEnded(id)
        assert await _values(peer, "a") == []
        for request in (TxnCommit(id), TxnRollback(id), Commit("a", "g", 0, 1, id)):
            assert await peer.refused(request) == f"transaction not found: {id}"
        (reply,) = await _produce(peer, TxnProduceBatch(id, "a", [b"1"]))
        assert reply == Failure(f"transaction not found: {id}")


async def test_a_transaction_belongs_to_its_connection() -> None:
    async with running_server() as server:
        first, second = server.peer(), server.peer()
        id = await _begin(first)
        await _produce(first, TxnProduceBatch(id, "a", [b"1"]))
        assert await second.refused(TxnCommit(id)) == f"transaction not found: {id}"
        first.session.lost()
        await rest()
        assert await _values(second, "a") == []
        assert server.broker._transactions._open == 0, "what the lost one held is given back"


async def test_a_refused_record_takes_no_other_down_with_it() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 2))
        id = await _begin(peer)
        replies = await _produce(peer, TxnProduceBatch(id, "a", [b"1", b"2", b"3"], None, [0, 7, 1]))
        assert [reply.message if isinstance(reply, Failure) else "" for reply in replies] == ["", "partition 7 out of range", ""]
        assert isinstance(ended := await peer.one(TxnCommit(id)), TxnEnded)
        assert [(one.partition, one.value_size) for one in ended.records] == [(0, 1), (1, 1)]


async def test_a_commit_that_met_a_full_disk_may_be_tried_again() -> None:
    async with running_server() as server:
        peer = server.peer()
        id = await _begin(peer)
        await _produce(peer, TxnProduceBatch(id, "a", [b"1"]))
        server.engine.failure = DiskFull("no room")
        assert (await peer.refused(TxnCommit(id))).startswith("disk full")
        server.engine.failure = None
        assert isinstance(await peer.one(TxnCommit(id)), TxnEnded)
        assert await _values(peer, "a") == [b"1"]


async def test_an_empty_transaction_is_committed_too() -> None:
    async with running_server() as server:
        peer = server.peer()
        id = await _begin(peer)
        assert await peer.one(TxnCommit(id)) == TxnEnded(id)


async def test_transactions_under_way_wait_for_the_disk_together_and_are_answered_in_order() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        first, second = await _begin(peer), await _begin(peer)
        server.engine.hold("a")
        peer.send(TxnProduceBatch(first, "a", [b"1"]), TxnCommit(first), ProduceBatch("a", [b"2"]))
        peer.send(TxnProduceBatch(second, "a", [b"3"]), TxnCommit(second), TxnBegin())
        await rest()
        server.engine.release("a")
        replies = await peer.replies(6)
        assert [type(reply) for reply in replies] == [Placed, TxnEnded, RecordMetadataBatch, Placed, TxnEnded, TxnBegun]
        assert [reply.records[0].offset for reply in replies if isinstance(reply, TxnEnded)] == [0, 2], "the order of the requests"
        assert await _values(peer, "a") == [b"1", b"2", b"3"]


async def test_what_follows_a_commit_finds_its_records() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        id = await _begin(peer)
        server.engine.hold("a")
        peer.send(TxnProduceBatch(id, "a", [b"1"]), TxnCommit(id), Fetch("a", 0, 0, 10))
        await rest()
        server.engine.release("a")
        *_, fetched = await peer.replies(3)
        assert isinstance(fetched, Fetched) and list(fetched.values) == [b"1"]


async def test_a_commit_whose_connection_was_lost_stands_and_holds_nothing() -> None:
    async with running_server() as server:
        peer, other = server.peer(), server.peer()
        await peer.one(CreateTopic("a", 1))
        id = await _begin(peer)
        server.engine.hold("a")
        peer.send(TxnProduceBatch(id, "a", [b"1"]), TxnCommit(id))
        await rest()
        peer.session.lost()
        server.engine.release("a")
        await rest()
        assert await _values(other, "a") == [b"1"]
        assert server.broker._transactions._open == 0


async def test_a_commit_that_fails_after_its_connection_was_lost_holds_nothing() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        id = await _begin(peer)
        server.engine.failure = DiskFull("full")
        peer.send(TxnProduceBatch(id, "a", [b"1"]), TxnCommit(id))
        peer.session.lost()
        await rest()
        assert server.broker._transactions._open == 0


async def test_one_connection_has_so_many_open_and_not_one_more() -> None:
    async with running_server() as server:
        peer, other = server.peer(), server.peer()
        ids = [await _begin(peer) for _ in range(FLYMQ_TRANSACTIONS_MAX)]
        assert await peer.refused(TxnBegin()) == f"{FLYMQ_TRANSACTIONS_MAX} transactions are open on this connection: the limit is reached"
        await _begin(other)
        assert isinstance(await peer.one(TxnCommit(ids[0])), TxnEnded)
        await _begin(peer)


async def test_records_of_all_sizes_get_the_same_reply_as_one_by_one() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("a", 1))
        id = await _begin(peer)
        sizes = [3, 0, 3, 70, 3]
        assert await _produce(peer, TxnProduceBatch(id, "a", [b"x" * size for size in sizes])) == [
            Placed("a", 0, 0, NOW, -1, size) for size in sizes
        ]


async def test_one_transaction_too_many_is_refused() -> None:
    async with running_server(BrokerSettings(transactions_open_max=2)) as server:
        peer = server.peer()
        ids = [await _begin(peer) for _ in range(2)]
        assert len(set(ids)) == 2
        assert "2 transactions are open already" in await peer.refused(TxnBegin())
        await peer.one(TxnRollback(ids[0]))
        await _begin(peer)


async def test_a_transaction_that_takes_too_long_is_aborted() -> None:
    async with running_server() as server:
        peer = server.peer()
        reply = await peer.one(TxnBegin(1))
        assert isinstance(reply, TxnBegun)
        held = server.broker._transactions._by_id[reply.transaction]
        held.time_out()
        assert "took too long" in await peer.refused(TxnCommit(reply.transaction))


@pytest.mark.parametrize("count", [100, 5_000])
async def test_long_rows_of_records_are_one_batch(count: int) -> None:
    async with running_server() as server:
        peer = server.peer()
        id = await _begin(peer)
        values = [b"%d" % number for number in range(count)]
        replies = await _produce(peer, TxnProduceBatch(id, "a", values))
        assert len(replies) == count
        staged = server.broker._transactions._by_id[id].placings
        assert len(staged) == 1
        ended = await peer.one(TxnCommit(id))
        assert isinstance(ended, TxnEnded) and [one.offset for one in ended.records] == list(range(count))


async def test_transactions_that_are_being_committed_do_not_count_as_open() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("slow", 1))
        ids = [await _begin(peer) for _ in range(FLYMQ_TRANSACTIONS_MAX)]
        server.engine.hold("slow")
        peer.send(*(request for id in ids for request in (TxnProduceBatch(id, "slow", [b"x"]), TxnCommit(id))))
        peer.send(TxnBegin(), TxnCommit(ids[0]))
        await rest()
        server.engine.release("slow")
        *ended, begun, again = await peer.replies(2 * FLYMQ_TRANSACTIONS_MAX + 2)
        assert all(isinstance(reply, TxnEnded) for reply in ended[1::2])
        assert isinstance(begun, TxnBegun)
        assert isinstance(again, Failure) and "is being committed" in again.message
