"""Settlement: ack, nack, time-out and redelivery; several consumers, and the progress of their group."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.broker import SettlementPolicy
from headrace.errors import (
    DiskFull,
    InvalidRequest,
)
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns
from tests.broker.settling import POLICY, ids_of, let_pass, offsets_of, open_queue, progress_of


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


# Ack and nack


async def test_an_ack_settles_once(harness: Harness) -> None:
    await harness.put("a", "b")
    queue = open_queue(harness)
    first, second = await queue.take(10)
    assert queue.ack([first.id, 99, first.id, second.id]) == [True, False, False, True]
    assert queue.nack([first.id]) == [False]
    await let_pass(harness, 100_000)
    assert await queue.take(10) == []


async def test_a_nacked_record_comes_again_after_a_pause_that_doubles_up_to_a_cap(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness, SettlementPolicy(ack_timeout_ms=10**6, backoff_ms=100, backoff_max_ms=350, attempts_max=0))
    (delivery,) = await queue.take(1)
    for attempt, pause in enumerate([100, 200, 350, 350, 350], start=2):
        assert queue.nack([delivery.id]) == [True]
        await let_pass(harness, pause - 1)
        assert await queue.take(1) == []
        await let_pass(harness, 1)
        (again,) = await queue.take(1)
        assert (again.id, again.offset, again.attempt, again.value) == (delivery.id, 0, attempt, b"a")


async def test_a_nack_may_name_its_own_pause(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness)
    queue.nack(ids_of(await queue.take(1)), delay_ms=0)
    taken = await queue.take(1)
    assert taken[0].attempt == 2
    queue.nack(ids_of(taken), delay_ms=5_000)
    await let_pass(harness, 4_999)
    assert await queue.take(1) == []
    await let_pass(harness, 1)
    assert offsets_of(await queue.take(1)) == [0]
    with pytest.raises(InvalidRequest):
        queue.nack([1], delay_ms=-1)


async def test_redeliveries_do_not_hold_up_what_is_new(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    queue = open_queue(harness)
    queue.nack(ids_of(await queue.take(1)))
    assert offsets_of(await queue.take(1)) == [1]
    await let_pass(harness, 100)
    assert offsets_of(await queue.take(10)) == [0, 2]


async def test_what_does_not_fit_a_take_comes_with_the_next(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    queue = open_queue(harness)
    queue.nack(ids_of(await queue.take(10)), delay_ms=0)
    assert offsets_of(await queue.take(10, bytes_max=1)) == [0]
    assert offsets_of(await queue.take(10, bytes_max=1)) == [1]
    assert offsets_of(await queue.take(10)) == [2]


async def test_a_delivery_that_is_not_acked_in_time_comes_again_at_once(harness: Harness) -> None:
    await harness.put("a", "b")
    queue = open_queue(harness)
    first = await queue.take(10)
    await let_pass(harness, 999)
    assert await queue.take(10) == []
    await let_pass(harness, 1)
    again = await queue.take(10)
    assert [(delivery.id, delivery.attempt) for delivery in again] == [(delivery.id, 2) for delivery in first]


async def test_the_clock_alone_is_enough_where_no_timer_has_rung(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness)
    await queue.take(10)
    harness.clock.now += 1_000
    assert [delivery.attempt for delivery in await queue.take(10)] == [2]


async def test_a_late_ack_before_the_redelivery_counts(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness)
    taken = await queue.take(1)
    await let_pass(harness, 5_000)
    assert queue.ack(ids_of(taken)) == [True]
    assert await queue.take(1) == []
    assert await progress_of(harness) == 1


async def test_a_late_ack_after_the_redelivery_to_another_does_not(harness: Harness) -> None:
    await harness.put("a")
    slow, quick = open_queue(harness), open_queue(harness)
    taken = await slow.take(1)
    await let_pass(harness, 1_000)
    again = await quick.take(1)
    assert slow.ack(ids_of(taken)) == [False]
    assert slow.nack(ids_of(taken)) == [False]
    assert quick.ack(ids_of(again)) == [True]


async def test_a_large_wave_of_redeliveries_costs_few_reads(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x" * 10] * 1_000))
    queue = open_queue(harness, replace(POLICY, credit=1_000))
    await queue.take(1_000)
    await let_pass(harness, 1_000)
    reads = 0
    read = harness.engine.read

    async def counted(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        return await read(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came

    monkeypatch.setattr(harness.engine, "read", counted)
    assert len(await queue.take(1_000)) == 1_000
    assert reads <= 3


# Several consumers


async def test_queues_of_one_group_split_the_work(harness: Harness) -> None:
    await harness.put(*(f"{number}" for number in range(10)))
    one, two = open_queue(harness), open_queue(harness)
    first, second, third = await asyncio.gather(one.take(4), two.take(4), one.take(4))
    assert sorted(offsets_of(first + second + third)) == list(range(10))
    assert one.ack(ids_of(second)) == [False] * len(second), "only the queue that received it may ack it"


async def test_groups_do_not_touch_each_other(harness: Harness) -> None:
    await harness.put("a")
    one, two = open_queue(harness, group="one"), open_queue(harness, group="two")
    assert offsets_of(await one.take(10)) == offsets_of(await two.take(10)) == [0]


async def test_what_a_leaving_consumer_had_in_flight_goes_to_the_others(harness: Harness) -> None:
    await harness.put("a", "b")
    leaving, staying = open_queue(harness), open_queue(harness)
    taken = await leaving.take(10)
    taking = asyncio.ensure_future(staying.take(10, wait_ms=1_000))
    await turns()
    leaving.ack([taken[0].id])
    await leaving.close()
    (again,) = await taking
    assert (again.offset, again.attempt) == (1, 2)
    assert leaving.ack([again.id]) == [False]
    with pytest.raises(InvalidRequest):
        await leaving.take(1)


async def test_the_next_consumer_of_a_group_resumes_where_the_last_one_left(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    queue = open_queue(harness)
    taken = await queue.take(2)
    queue.ack([taken[0].id])
    await queue.close()
    await queue.close()
    assert harness.broker.committed(ANN, "g", "t", 0) == 1
    assert offsets_of(await open_queue(harness).take(10)) == [1, 2]


async def test_a_consumer_that_comes_while_the_last_one_is_leaving_takes_over(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    leaving = open_queue(harness)
    taken = await leaving.take(2)
    leaving.ack([taken[0].id])
    harness.engine.hold()
    closing = leaving.close()
    await turns()
    coming = open_queue(harness)
    harness.engine.let_go()
    await closing
    assert [(delivery.offset, delivery.attempt) for delivery in await coming.take(10)] == [(1, 2), (2, 1)]
    coming.ack([1, 2, 3])
    assert await progress_of(harness) == 3


# Progress


async def test_progress_is_the_lowest_unsettled_offset(harness: Harness) -> None:
    await harness.put(*(f"{number}" for number in range(6)))
    queue = open_queue(harness)
    ids = ids_of(await queue.take(5))
    for settled, committed in ((1, 0), (2, 0), (0, 3), (4, 3), (3, 5)):
        queue.ack([ids[settled]])
        assert await progress_of(harness) == committed


async def test_many_acks_are_one_commit(harness: Harness) -> None:
    await harness.put(*(f"{number}" for number in range(50)))
    queue = open_queue(harness, replace(POLICY, credit=50))
    await progress_of(harness)
    taken = await queue.take(50)
    before = harness.engine.appends
    for delivery in taken:
        queue.ack([delivery.id])
    assert await progress_of(harness) == 50
    assert harness.engine.appends == before + 1
    await let_pass(harness, 10_000)
    assert harness.engine.appends == before + 1, "nothing new, nothing written"


async def test_a_commit_the_log_refuses_is_tried_again(harness: Harness) -> None:
    await harness.put("a")
    queue = open_queue(harness)
    queue.ack(ids_of(await queue.take(1)))
    harness.engine.error = DiskFull("full")
    assert await progress_of(harness) is None
    harness.engine.error = None
    await let_pass(harness, 1_000)
    assert harness.broker.committed(ANN, "g", "t", 0) == 1
