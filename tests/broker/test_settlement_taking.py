"""Settlement: what is taken, and from where on."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import Delivery, SettlementPolicy
from headrace.broker.settlement import Start
from headrace.engine.contract import Cleanup, TopicConfig
from headrace.errors import (
    InvalidRequest,
    OffsetOutOfRange,
)
from headrace.limits import IN_FLIGHT_MAX
from headrace.records import Run
from tests.broker.settling import POLICY, ids_of, let_pass, offsets_of, open_queue, progress_of
from tests.broker.stand import ANN, Stand, turns


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t")
    return stand


# Taking


async def test_deliveries_come_in_order_with_all_they_carry(stand: Stand) -> None:
    run = Run([b"a", None], [b"k", None], [(("h", b"1"),), ()], [5, 6])
    await stand.broker.publish(ANN, "t", run)
    assert await open_queue(stand).take(10) == [
        Delivery(id=1, partition=0, offset=0, attempt=1, timestamp=5, key=b"k", value=b"a", headers=(("h", b"1"),)),
        Delivery(id=2, partition=0, offset=1, attempt=1, timestamp=6, key=None, value=None, headers=()),
    ]


async def test_take_is_bounded_by_records_and_bytes(stand: Stand) -> None:
    await stand.put(*("x" * 100 for _ in range(10)))
    queue = open_queue(stand)
    assert offsets_of(await queue.take(3)) == [0, 1, 2]
    assert offsets_of(await queue.take(10, bytes_max=250)) == [3, 4]
    assert offsets_of(await queue.take(10, bytes_max=1)) == [5], "one comes however large"
    assert offsets_of(await queue.take(10)) == [6, 7, 8, 9]
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(InvalidRequest):
            await queue.take(*bad)


async def test_take_reads_on_where_what_was_read_ahead_ends(stand: Stand) -> None:
    await stand.put("a", "b")
    queue = open_queue(stand)
    assert offsets_of(await queue.take(1)) == [0]
    await stand.put("c", "d")
    assert offsets_of(await queue.take(2)) == [1, 2]


async def test_take_is_empty_when_there_is_nothing(stand: Stand) -> None:
    assert await open_queue(stand).take(10) == []


async def test_take_waits_for_the_first_record(stand: Stand) -> None:
    queue = open_queue(stand)
    taking = asyncio.ensure_future(queue.take(10, wait_ms=500))
    await turns()
    assert not taking.done()
    await stand.put("a", "b")
    assert offsets_of(await taking) == [0, 1]
    taking = asyncio.ensure_future(queue.take(10, wait_ms=500))
    await let_pass(stand, 499)
    assert not taking.done()
    await let_pass(stand, 1)
    assert await taking == []


async def test_take_waits_for_a_redelivery(stand: Stand) -> None:
    await stand.put("a")
    queue = open_queue(stand)
    first = await queue.take(1)
    taking = asyncio.ensure_future(queue.take(1, wait_ms=60_000))
    queue.nack(ids_of(first), delay_ms=200)
    await let_pass(stand, 199)
    assert not taking.done()
    await let_pass(stand, 1)
    assert offsets_of(await taking) == [0]


async def test_take_waits_for_room_in_flight(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    queue = open_queue(stand, SettlementPolicy(in_flight_max=2))
    taken = await queue.take(10)
    assert offsets_of(taken) == [0, 1]
    assert await queue.take(10) == []
    taking = asyncio.ensure_future(queue.take(10, wait_ms=1_000))
    await turns()
    assert not taking.done()
    queue.ack([taken[1].id])
    assert offsets_of(await taking) == [2]
    assert queue.in_flight == 2


async def test_no_queue_has_more_in_flight_than_the_limit(stand: Stand) -> None:
    await stand.broker.publish(ANN, "t", Run([b"x"] * (IN_FLIGHT_MAX + 1)))
    queue = open_queue(stand, SettlementPolicy(in_flight_max=IN_FLIGHT_MAX + 1))
    assert len(await queue.take(IN_FLIGHT_MAX + 1)) == IN_FLIGHT_MAX
    assert await queue.take(1) == []


async def test_what_waits_to_come_again_counts_too(stand: Stand) -> None:
    """Or a queue that refuses everything would list the whole topic in memory."""
    await stand.put(*(f"{number}" for number in range(10)))
    queue = open_queue(stand, SettlementPolicy(in_flight_max=3, backoff_ms=1_000))
    queue.nack(ids_of(await queue.take(10)))
    assert await queue.take(10) == []
    await let_pass(stand, 1_000)
    assert offsets_of(await queue.take(10)) == [0, 1, 2]


async def test_a_cancelled_take_loses_nothing_and_counts_no_attempt(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=0)
    await stand.put("b", partition=1)
    queue = open_queue(stand)
    read, gate = stand.engine.read, asyncio.Event()
    reads = 0

    async def stuck(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        if reads == 2:
            await gate.wait()
        return await read(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came

    monkeypatch.setattr(stand.engine, "read", stuck)
    taking = asyncio.ensure_future(queue.take(10))
    await turns()
    taking.cancel()
    gate.set()
    await turns()
    assert queue.in_flight == 0
    assert sorted((delivery.partition, delivery.attempt) for delivery in await queue.take(10)) == [(0, 1), (1, 1)]


async def test_all_partitions_get_their_turn(stand: Stand) -> None:
    await stand.broker.alter_topic(ANN, "t", partitions=3)
    for partition in range(3):
        await stand.put(*("x" for _ in range(5)), partition=partition)
    queue = open_queue(stand)
    assert {(await queue.take(1))[0].partition for _ in range(3)} == {0, 1, 2}


async def test_a_queue_may_take_from_some_partitions_only(stand: Stand) -> None:
    await stand.broker.alter_topic(ANN, "t", partitions=3)
    for partition in range(3):
        await stand.put("x", partition=partition)
    some = stand.broker.queue(ANN, "g", "t", policy=POLICY, partitions=[2, 0, 2], start="earliest")
    rest = stand.broker.queue(ANN, "g", "t", policy=POLICY, partitions=[1], start="earliest")
    assert sorted(delivery.partition for delivery in await some.take(10)) == [0, 2]
    assert [delivery.partition for delivery in await rest.take(10)] == [1]
    with pytest.raises(InvalidRequest):
        stand.broker.queue(ANN, "g", "t", policy=POLICY, partitions=[])


async def test_expired_records_are_settled_without_a_delivery(stand: Stand) -> None:
    now = stand.clock.now
    await stand.broker.publish(ANN, "t", Run([b"a", b"b", b"c"], expiries=[now + 5, 0, now + 50]))
    stand.clock.tick(5)
    queue = open_queue(stand)
    taken = await queue.take(10)
    assert offsets_of(taken) == [1, 2]
    queue.nack(ids_of(taken))
    await let_pass(stand, 100)
    again = await queue.take(10)
    assert offsets_of(again) == [1], "the other one expired while it waited"
    queue.ack(ids_of(again))
    assert await progress_of(stand) == 3


# Where it starts


@pytest.mark.parametrize(("start", "offsets"), [("earliest", [0, 1, 2]), ("latest", []), (1, [1, 2]), (3, [])])
async def test_a_new_group_starts_where_it_is_told(stand: Stand, start: Start, offsets: list[int]) -> None:
    await stand.put("a", "b", "c")
    queue = open_queue(stand, start=start)
    assert offsets_of(await queue.take(10)) == offsets
    await stand.put("d")
    assert offsets_of(await queue.take(10)) == [3]


@pytest.mark.parametrize("start", [-1, 4])
async def test_a_new_group_starts_only_inside_the_log(stand: Stand, start: int) -> None:
    await stand.put("a", "b", "c")
    with pytest.raises(OffsetOutOfRange):
        open_queue(stand, start=start)


async def test_a_group_that_was_here_goes_on_where_it_was(stand: Stand) -> None:
    await stand.put("a", "b", "c", "d")
    await stand.broker.commit(ANN, "g", {("t", 0): 2})
    assert offsets_of(await open_queue(stand, start="earliest").take(10)) == [2, 3]


@pytest.mark.parametrize(("committed", "offsets"), [(99, [4]), (0, [2, 3, 4])])
async def test_a_committed_offset_outside_the_log_is_brought_inside(stand: Stand, committed: int, offsets: list[int]) -> None:
    await stand.broker.alter_topic(ANN, "t", config=TopicConfig(retention_ms=10))
    await stand.put("a", "b")
    stand.clock.tick(50)
    await stand.put("c", "d")
    await stand.broker.maintain()
    await stand.broker.commit(ANN, "g", {("t", 0): committed})
    queue = open_queue(stand)
    await stand.put("e")
    assert offsets_of(await queue.take(10)) == offsets


async def test_a_group_that_dies_before_its_first_ack_finds_its_place_again(stand: Stand) -> None:
    await stand.put("before")
    queue = open_queue(stand, start="latest")
    await stand.put("a", "b")
    await queue.take(1)
    await let_pass(stand, stand.settings.settlement_commit_ms)
    await stand.crash()
    assert offsets_of(await open_queue(stand, start="latest").take(10)) == [1, 2]


async def test_a_partition_added_while_a_group_is_away_is_read_from_its_start(stand: Stand) -> None:
    queue = open_queue(stand, start="latest")
    await queue.close()
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=1)
    assert [delivery.partition for delivery in await open_queue(stand, start="latest").take(10)] == [1]


async def test_a_partition_added_while_a_queue_is_open_is_taken_from(stand: Stand) -> None:
    queue = open_queue(stand, start="latest")
    only = stand.broker.queue(ANN, "h", "t", policy=POLICY, partitions=[0])
    taking = asyncio.ensure_future(queue.take(10, wait_ms=1_000))
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=1)
    assert [delivery.partition for delivery in await taking] == [1]
    assert await only.take(10) == []


async def test_records_lost_to_retention_are_passed_over(stand: Stand) -> None:
    await stand.broker.alter_topic(ANN, "t", config=TopicConfig(retention_ms=500))
    await stand.put("a", "b")
    queue = open_queue(stand)
    taken = await queue.take(1)
    queue.nack(ids_of(taken))
    stand.clock.tick(600)
    await stand.put("c")
    await stand.broker.maintain()
    found: list[Delivery] = []
    for _ in range(3):
        found += await queue.take(10)
    assert [(delivery.offset, delivery.value) for delivery in found if delivery.offset != 1] == [(2, b"c")]
    queue.ack(ids_of(found))
    assert await progress_of(stand) == 3


async def test_where_compaction_left_nothing_the_group_moves_on(stand: Stand) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT, tombstone_retention_ms=1)
    await stand.broker.alter_topic(ANN, "t", config=config)
    await stand.broker.publish(ANN, "t", Run([b"1", None], [b"k", b"k"]))
    stand.clock.tick(10)
    await stand.broker.maintain()
    queue = open_queue(stand)
    assert await queue.take(10) == []
    assert await progress_of(stand) == 2
