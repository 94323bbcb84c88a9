"""Settlement: what is taken, and from which position."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from headrace.broker import Delivery, SettlementPolicy
from headrace.broker.groups.members import Start
from headrace.broker.reading.batches import STEP_RECORDS_MAX
from headrace.engine.contract import Batch, Cleanup, TopicConfig
from headrace.errors import (
    InvalidRequest,
    OffsetOutOfRange,
)
from headrace.limits import IN_FLIGHT_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns
from tests.broker.settling import POLICY, ids_of, let_pass, offsets_of, open_queue, progress_of


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


# Taking


async def test_deliveries_come_in_order_with_all_they_carry(harness: Harness) -> None:
    batch = RecordBatch([b"a", None], [b"k", None], [(("h", b"1"),), ()], [5, 6])
    await harness.broker.publish(ANN, "t", batch)
    assert await open_queue(harness).take(10) == [
        Delivery(id=1, partition=0, offset=0, attempt=1, timestamp=5, key=b"k", value=b"a", headers=(("h", b"1"),)),
        Delivery(id=2, partition=0, offset=1, attempt=1, timestamp=6, key=None, value=None, headers=()),
    ]


async def test_take_is_bounded_by_records_and_bytes(harness: Harness) -> None:
    await harness.put(*("x" * 100 for _ in range(10)))
    queue = open_queue(harness)
    assert offsets_of(await queue.take(3)) == [0, 1, 2]
    assert offsets_of(await queue.take(10, bytes_max=250)) == [3, 4]
    assert offsets_of(await queue.take(10, bytes_max=1)) == [5], "at least one, whatever its size"
    assert offsets_of(await queue.take(10)) == [6, 7, 8, 9]
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(InvalidRequest):
            await queue.take(*bad)


async def test_take_reads_on_where_what_was_read_ahead_ends(harness: Harness) -> None:
    await harness.put("a", "b")
    queue = open_queue(harness)
    assert offsets_of(await queue.take(1)) == [0]
    await harness.put("c", "d")
    assert offsets_of(await queue.take(2)) == [1, 2]


async def test_expired_records_are_skipped_over_many_turns(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    expired, reads, read = 6 * STEP_RECORDS_MAX, [], harness.engine.read
    await harness.broker.publish(ANN, "t", RecordBatch([b""] * expired, expiries=[harness.clock.now + 10] * expired))
    await harness.put("alive")
    harness.clock.tick(10)

    async def counted(topic: str, partition: int, offset: int, **bounds: int) -> list[Batch]:
        batches = await read(topic, partition, offset, **bounds)
        reads.append(sum(map(len, batches)))
        return batches

    monkeypatch.setattr(harness.engine, "read", counted)
    queue = open_queue(harness)
    taking = asyncio.ensure_future(queue.take(1))
    while not taking.done():
        await asyncio.sleep(0)
        reads.append(0)
    assert offsets_of(taking.result()) == [expired]
    assert max(len(list(group)) for is_read, group in itertools.groupby(reads, bool) if is_read) == 1, "two reads in one turn"
    assert max(reads) <= STEP_RECORDS_MAX
    queue.ack(ids_of(taking.result()))
    await queue.flush()
    assert harness.broker.committed(ANN, "g", "t", 0) == expired + 1


async def test_take_is_empty_when_there_is_nothing(harness: Harness) -> None:
    assert await open_queue(harness).take(10) == []


async def test_take_waits_for_the_first_record(harness: Harness) -> None:
    queue = open_queue(harness)
    taking = asyncio.ensure_future(queue.take(10, wait_ms=500))
    await turns()
    assert not taking.done()
    await harness.put("a", "b")
    assert offsets_of(await taking) == [0, 1]
    taking = asyncio.ensure_future(queue.take(10, wait_ms=500))
    await let_pass(harness, 499)
    assert not taking.done()
    await let_pass(harness, 1)
    assert await taking == []


async def test_take_waits_for_a_redelivery(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness)
    first = await queue.take(1)
    taking = asyncio.ensure_future(queue.take(1, wait_ms=60_000))
    queue.nack(ids_of(first), delay_ms=200)
    await let_pass(harness, 199)
    assert not taking.done()
    await let_pass(harness, 1)
    assert offsets_of(await taking) == [0]


async def test_take_waits_for_room_in_flight(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    queue = open_queue(harness, SettlementPolicy(in_flight_max=2))
    taken = await queue.take(10)
    assert offsets_of(taken) == [0, 1]
    assert await queue.take(10) == []
    taking = asyncio.ensure_future(queue.take(10, wait_ms=1_000))
    await turns()
    assert not taking.done()
    queue.ack([taken[1].id])
    assert offsets_of(await taking) == [2]
    assert queue.in_flight == 2


async def test_no_queue_has_more_in_flight_than_the_limit(harness: Harness) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"] * (IN_FLIGHT_MAX + 1)))
    queue = open_queue(harness, SettlementPolicy(credit=IN_FLIGHT_MAX + 1, in_flight_max=IN_FLIGHT_MAX + 1))
    assert len(await queue.take(IN_FLIGHT_MAX + 1)) == IN_FLIGHT_MAX
    assert await queue.take(1) == []


async def test_what_waits_to_come_again_counts_too(harness: Harness) -> None:
    """Otherwise a queue that nacks everything would list the whole topic in memory."""
    await harness.put(*(f"{number}" for number in range(10)))
    queue = open_queue(harness, SettlementPolicy(in_flight_max=3, backoff_ms=1_000))
    queue.nack(ids_of(await queue.take(10)))
    assert await queue.take(10) == []
    await let_pass(harness, 1_000)
    assert offsets_of(await queue.take(10)) == [0, 1, 2]


async def test_a_cancelled_take_loses_nothing_and_counts_no_attempt(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.broker.alter_topic(ANN, "t", partitions=2)
    await harness.put("a", partition=0)
    await harness.put("b", partition=1)
    queue = open_queue(harness)
    read, resume = harness.engine.read, asyncio.Event()
    reads = 0

    async def stuck(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        if reads == 2:
            await resume.wait()
        return await read(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came

    monkeypatch.setattr(harness.engine, "read", stuck)
    taking = asyncio.ensure_future(queue.take(10))
    await turns()
    taking.cancel()
    resume.set()
    await turns()
    assert queue.in_flight == 0
    assert sorted((delivery.partition, delivery.attempt) for delivery in await queue.take(10)) == [(0, 1), (1, 1)]


async def test_all_partitions_get_their_turn(harness: Harness) -> None:
    await harness.broker.alter_topic(ANN, "t", partitions=3)
    for partition in range(3):
        await harness.put(*("x" for _ in range(5)), partition=partition)
    queue = open_queue(harness)
    assert {(await queue.take(1))[0].partition for _ in range(3)} == {0, 1, 2}


async def test_a_queue_may_take_from_some_partitions_only(harness: Harness) -> None:
    await harness.broker.alter_topic(ANN, "t", partitions=3)
    for partition in range(3):
        await harness.put("x", partition=partition)
    some = harness.broker.join(ANN, "g", "t", policy=POLICY, partitions=[2, 0, 2], start="earliest")
    rest = harness.broker.join(ANN, "g", "t", policy=POLICY, partitions=[1], start="earliest")
    assert sorted(delivery.partition for delivery in await some.take(10)) == [0, 2]
    assert [delivery.partition for delivery in await rest.take(10)] == [1]
    with pytest.raises(InvalidRequest):
        harness.broker.join(ANN, "g", "t", policy=POLICY, partitions=[])


async def test_expired_records_are_settled_without_a_delivery(harness: Harness) -> None:
    now = harness.clock.now
    await harness.broker.publish(ANN, "t", RecordBatch([b"a", b"b", b"c"], expiries=[now + 5, 0, now + 50]))
    harness.clock.tick(5)
    queue = open_queue(harness)
    taken = await queue.take(10)
    assert offsets_of(taken) == [1, 2]
    queue.nack(ids_of(taken))
    await let_pass(harness, 100)
    again = await queue.take(10)
    assert offsets_of(again) == [1], "the other one expired while it waited"
    queue.ack(ids_of(again))
    assert await progress_of(harness) == 3


# Start position


@pytest.mark.parametrize(("start", "offsets"), [("earliest", [0, 1, 2]), ("latest", []), (1, [1, 2]), (3, [])])
async def test_a_new_group_starts_at_the_requested_position(harness: Harness, start: Start, offsets: list[int]) -> None:
    await harness.put("a", "b", "c")
    queue = open_queue(harness, start=start)
    assert offsets_of(await queue.take(10)) == offsets
    await harness.put("d")
    assert offsets_of(await queue.take(10)) == [3]


@pytest.mark.parametrize("start", [-1, 4])
async def test_a_new_group_starts_only_inside_the_log(harness: Harness, start: int) -> None:
    await harness.put("a", "b", "c")
    with pytest.raises(OffsetOutOfRange):
        open_queue(harness, start=start)


async def test_a_known_group_resumes_at_its_committed_offset(harness: Harness) -> None:
    await harness.put("a", "b", "c", "d")
    await harness.broker.commit(ANN, "g", {("t", 0): 2})
    assert offsets_of(await open_queue(harness, start="earliest").take(10)) == [2, 3]


@pytest.mark.parametrize(("committed", "offsets"), [(99, [4]), (0, [2, 3, 4])])
async def test_a_committed_offset_outside_the_log_is_brought_inside(harness: Harness, committed: int, offsets: list[int]) -> None:
    await harness.broker.alter_topic(ANN, "t", config=TopicConfig(retention_ms=10))
    await harness.put("a", "b")
    harness.clock.tick(50)
    await harness.put("c", "d")
    await harness.broker.maintain()
    await harness.broker.commit(ANN, "g", {("t", 0): committed})
    queue = open_queue(harness)
    await harness.put("e")
    assert offsets_of(await queue.take(10)) == offsets


async def test_a_group_that_dies_before_its_first_ack_finds_its_place_again(harness: Harness) -> None:
    await harness.put("before")
    queue = open_queue(harness, start="latest")
    await harness.put("a", "b")
    await queue.take(1)
    await let_pass(harness, harness.settings.settlement_commit_ms)
    await harness.crash()
    assert offsets_of(await open_queue(harness, start="latest").take(10)) == [1, 2]


async def test_a_partition_added_while_a_group_is_away_is_read_from_its_start(harness: Harness) -> None:
    queue = open_queue(harness, start="latest")
    await queue.close()
    await harness.broker.alter_topic(ANN, "t", partitions=2)
    await harness.put("a", partition=1)
    assert [delivery.partition for delivery in await open_queue(harness, start="latest").take(10)] == [1]


async def test_a_partition_added_while_a_queue_is_open_is_taken_from(harness: Harness) -> None:
    queue = open_queue(harness, start="latest")
    only = harness.broker.join(ANN, "h", "t", policy=POLICY, partitions=[0])
    taking = asyncio.ensure_future(queue.take(10, wait_ms=1_000))
    await harness.broker.alter_topic(ANN, "t", partitions=2)
    await harness.put("a", partition=1)
    assert [delivery.partition for delivery in await taking] == [1]
    assert await only.take(10) == []


async def test_records_lost_to_retention_are_passed_over(harness: Harness) -> None:
    await harness.broker.alter_topic(ANN, "t", config=TopicConfig(retention_ms=500))
    await harness.put("a", "b")
    queue = open_queue(harness)
    taken = await queue.take(1)
    queue.nack(ids_of(taken))
    harness.clock.tick(600)
    await harness.put("c")
    await harness.broker.maintain()
    found: list[Delivery] = []
    for _ in range(3):
        found += await queue.take(10)
    assert [(delivery.offset, delivery.value) for delivery in found if delivery.offset != 1] == [(2, b"c")]
    queue.ack(ids_of(found))
    assert await progress_of(harness) == 3


async def test_where_compaction_left_nothing_the_group_moves_on(harness: Harness) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT, tombstone_retention_ms=1)
    await harness.broker.alter_topic(ANN, "t", config=config)
    await harness.broker.publish(ANN, "t", RecordBatch([b"1", None], [b"k", b"k"]))
    harness.clock.tick(10)
    await harness.broker.maintain()
    queue = open_queue(harness)
    assert await queue.take(10) == []
    assert await progress_of(harness) == 2
