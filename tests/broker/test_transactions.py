from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings
from headrace.broker.transactions import weight
from headrace.errors import (
    DiskFull,
    InvalidRequest,
    InvalidTransaction,
    LimitExceeded,
    RecordTooLarge,
    StorageFailed,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.limits import TRANSACTION_BYTES_MAX, VALUE_BYTES_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.broker.create_topic(ANN, "u")
    return harness


async def test_nothing_is_seen_before_the_commit_and_all_of_it_after(harness: Harness) -> None:
    await harness.put("before", partition=0)
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", RecordBatch([b"a", b"b"]), 0)
    transaction.publish("u", RecordBatch([b"c"]))
    transaction.publish("t", RecordBatch([b"d"]), 0)
    transaction.commit_offsets("g", {("t", 1): 5})
    await turns()
    assert (await harness.values("t"), await harness.values("u")) == (["before"], [])
    assert harness.broker.committed(ANN, "g", "t", 1) is None
    appends = harness.engine.appends
    published = await transaction.commit()
    assert harness.engine.appends == appends + 1, "one append is what makes it atomic"
    assert [(one.partition, one.base_offset, one.count) for one in published] == [(0, 1, 2), (0, 0, 1), (0, 3, 1)]
    assert (await harness.values("t"), await harness.values("u")) == (["before", "a", "b", "d"], ["c"])
    assert harness.broker.committed(ANN, "g", "t", 1) == 5
    await harness.crash()
    assert harness.broker.committed(ANN, "g", "t", 1) == 5


async def test_a_spread_batch_in_a_transaction_knows_its_places(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("u", RecordBatch([b"x"]))
    transaction.publish("t", RecordBatch([b"%d" % number for number in range(10)], [b"k%d" % number for number in range(10)]))
    transaction.publish("u", RecordBatch([b"y"]))
    _, spread, last = await transaction.commit()
    logs = [await harness.values("t", partition) for partition in (0, 1)]
    for index in range(10):
        partition, offset = spread.placement(index)
        assert logs[partition][offset] == str(index)
    assert last.base_offset == 1


async def test_an_aborted_transaction_leaves_nothing(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN, id="x")
    transaction.publish("t", RecordBatch([b"a"]), 0)
    transaction.abort()
    transaction.abort()
    with pytest.raises(InvalidTransaction, match="aborted"):
        await transaction.commit()
    with pytest.raises(InvalidTransaction):
        transaction.publish("t", RecordBatch([b"a"]), 0)
    assert await harness.values() == []
    harness.broker.begin(ANN, id="x")


async def test_a_transaction_is_committed_once(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("u", RecordBatch([b"a"]))
    await transaction.commit()
    with pytest.raises(InvalidTransaction, match="has been committed"):
        await transaction.commit()
    transaction.abort()
    assert await harness.values("u") == ["a"]


async def test_while_it_is_being_committed_nothing_is_added(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("u", RecordBatch([b"a"]))
    committing = asyncio.ensure_future(transaction.commit())
    await asyncio.sleep(0)
    with pytest.raises(InvalidTransaction, match="being committed"):
        transaction.publish("u", RecordBatch([b"b"]))
    with pytest.raises(InvalidTransaction):
        await transaction.commit()
    transaction.abort()
    await committing
    assert await harness.values("u") == ["a"]


async def test_an_empty_transaction_commits_to_nothing(harness: Harness) -> None:
    assert await harness.broker.begin(ANN).commit() == []


async def test_a_transaction_that_takes_too_long_is_aborted(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN, id="slow", timeout_ms=1_000)
    transaction.publish("u", RecordBatch([b"a"]))
    harness.clock.tick(999)
    transaction.publish("u", RecordBatch([b"b"]))
    harness.clock.tick(1)
    with pytest.raises(InvalidTransaction, match="too long"):
        await transaction.commit()
    assert await harness.values("u") == []
    harness.broker.begin(ANN, id="slow")


async def test_time_running_out_during_the_commit_changes_nothing(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN, timeout_ms=1_000)
    transaction.publish("u", RecordBatch([b"a"]))
    committing = asyncio.ensure_future(transaction.commit())
    await asyncio.sleep(0)
    harness.clock.tick(1_000)
    assert len(await committing) == 1


async def test_after_a_full_disk_the_commit_may_be_tried_again(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("u", RecordBatch([b"a"]))
    transaction.commit_offsets("g", {("t", 0): 1})
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await transaction.commit()
    assert harness.broker.committed(ANN, "g", "t", 0) is None
    harness.engine.error = None
    await transaction.commit()
    assert await harness.values("u") == ["a"]
    assert harness.broker.committed(ANN, "g", "t", 0) == 1


async def test_a_full_disk_is_not_tried_again_when_the_time_ran_out_meanwhile(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN, timeout_ms=1_000)
    transaction.publish("u", RecordBatch([b"a"]))
    harness.engine.error = DiskFull("full")
    committing = asyncio.ensure_future(transaction.commit())
    await asyncio.sleep(0)
    harness.clock.tick(1_000)
    with pytest.raises(DiskFull):
        await committing
    harness.engine.error = None
    with pytest.raises(InvalidTransaction, match="too long"):
        await transaction.commit()


async def test_a_failed_log_ends_the_transaction(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("u", RecordBatch([b"a"]))
    harness.engine.error = StorageFailed("sync failed")
    with pytest.raises(StorageFailed):
        await transaction.commit()
    harness.engine.error = None
    with pytest.raises(InvalidTransaction):
        await transaction.commit()


async def test_a_topic_deleted_before_the_commit_fails_all_of_it(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", RecordBatch([b"a"]), 0)
    transaction.publish("u", RecordBatch([b"b"]))
    await harness.broker.delete_topic(ANN, "u")
    with pytest.raises(UnknownTopic):
        await transaction.commit()
    assert await harness.values("t") == []


async def test_what_cannot_be_staged_is_refused_at_once_and_the_rest_stands(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    transaction.publish("u", RecordBatch([b"good"]))
    with pytest.raises(UnknownTopic):
        transaction.publish("nowhere", RecordBatch([b"x"]))
    with pytest.raises(UnknownPartition):
        transaction.publish("t", RecordBatch([b"x"]), 7)
    with pytest.raises(InvalidRequest):
        transaction.publish("t", RecordBatch([]))
    with pytest.raises(RecordTooLarge):
        transaction.publish("t", RecordBatch([bytes(VALUE_BYTES_MAX + 1)]))
    with pytest.raises(UnknownPartition):
        transaction.commit_offsets("g", {("t", 7): 1})
    with pytest.raises(InvalidRequest):
        transaction.commit_offsets("g", {("t", 0): -1})
    assert len(await transaction.commit()) == 1


async def test_an_id_is_open_once(harness: Harness) -> None:
    harness.broker.begin(ANN, id="x")
    with pytest.raises(InvalidTransaction, match="open already"):
        harness.broker.begin(ANN, id="x")
    with pytest.raises(InvalidRequest):
        harness.broker.begin(ANN, id="")
    with pytest.raises(InvalidRequest):
        harness.broker.begin(ANN, timeout_ms=0)


async def test_only_so_many_are_open_at_once() -> None:
    harness = Harness(BrokerSettings(transactions_open_max=2))
    await harness.broker.open()
    first, _ = harness.broker.begin(ANN), harness.broker.begin(ANN)
    with pytest.raises(LimitExceeded):
        harness.broker.begin(ANN)
    first.abort()
    harness.broker.begin(ANN)
    await harness.broker.close()


async def test_many_are_begun_as_far_as_the_limit_allows() -> None:
    harness = Harness(BrokerSettings(transactions_open_max=5))
    await harness.broker.open()
    named = harness.broker.begin(ANN, id="mine")
    begun = harness.broker.begin_all(ANN, 9)
    assert len({transaction.id for transaction in (named, *begun)}) == 5
    with pytest.raises(LimitExceeded):
        harness.broker.begin_all(ANN, 1)
    begun[0].abort()
    assert len(harness.broker.begin_all(ANN, 9)) == 1
    await harness.broker.close()


async def test_a_new_id_is_never_one_that_a_caller_has_chosen(harness: Harness) -> None:
    (first,) = harness.broker.begin_all(ANN, 1)
    front, _, number = first.id.rpartition("-")
    chosen = harness.broker.begin(ANN, id=f"{front}-{int(number, 16) + 2:0{len(number)}x}")
    ids = [transaction.id for transaction in harness.broker.begin_all(ANN, 3)]
    assert len({first.id, chosen.id, *ids}) == 5


async def test_all_ids_have_one_size_and_differ_also_after_the_largest_number(harness: Harness) -> None:
    first = harness.broker.begin_all(ANN, 3)
    harness.broker._transactions._begun = (1 << 32) - 3
    ids = [transaction.id for count in (2, 3, 2) for transaction in harness.broker.begin_all(ANN, count)]
    assert [id.rpartition("-")[2] for id in ids] == ["fffffffe", "ffffffff", *(f"{number:08x}" for number in (6, 7, 8, 9, 10))], (
        "open ones are left out"
    )
    assert len({*ids, *(transaction.id for transaction in first)}) == 10
    assert {len(id) for id in ids} == {len(first[0].id)}


async def test_transactions_that_were_begun_together_time_out_one_by_one(harness: Harness) -> None:
    left, kept, ended = harness.broker.begin_all(ANN, 3, timeout_ms=1_000)
    left.abort()
    ended.publish("u", RecordBatch([b"x"]))
    await ended.commit()
    harness.clock.tick(1_000)
    assert kept.has_ended and not kept.is_open
    with pytest.raises(InvalidTransaction, match="took too long"):
        kept.publish("u", RecordBatch([b"y"]))
    assert await harness.values("u") == ["x"]


async def test_a_transaction_holds_so_much_and_not_a_byte_more(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN)
    value = bytes(VALUE_BYTES_MAX)
    whole, rest = divmod(TRANSACTION_BYTES_MAX, weight(RecordBatch([value])))
    transaction.publish("u", RecordBatch([value] * whole))
    overhead = weight(RecordBatch([b""]))
    with pytest.raises(InvalidTransaction):
        transaction.publish("u", RecordBatch([bytes(rest - overhead + 1)]))
    transaction.publish("u", RecordBatch([bytes(rest - overhead)]))
    with pytest.raises(InvalidTransaction):
        transaction.publish("u", RecordBatch([b""]))
    transaction.abort()


async def test_all_transactions_together_hold_so_much() -> None:
    harness = Harness(BrokerSettings(transactions_bytes_max=100))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "u")
    first, second = harness.broker.begin(ANN), harness.broker.begin(ANN)
    first.publish("u", RecordBatch([b"x" * 40]))
    with pytest.raises(Unavailable):
        second.publish("u", RecordBatch([b"x" * 40]))
    await first.commit()
    second.publish("u", RecordBatch([b"x" * 40]))
    await second.commit()
    await harness.broker.close()


def test_headers_and_empty_records_weigh_something() -> None:
    bare = weight(RecordBatch([b""]))
    assert bare > 0
    assert weight(RecordBatch([b"ab"], [b"k"], [(("h", b"12"),)])) == bare + 3 + 3


async def test_a_caller_cancelled_during_the_commit_does_not_undo_it(harness: Harness) -> None:
    transaction = harness.broker.begin(ANN, id="x")
    transaction.publish("u", RecordBatch([b"a"]))
    committing = asyncio.ensure_future(transaction.commit())
    await asyncio.sleep(0)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    await turns()
    assert await harness.values("u") == ["a"]
    harness.broker.begin(ANN, id="x")
