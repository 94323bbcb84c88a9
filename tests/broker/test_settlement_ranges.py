"""Ranges: adjacent records are one entry of the settlement, whatever part of them is settled, and in whatever order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.broker import Member
from headrace.broker.groups.consumer import GroupConsumer
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness
from tests.broker.settling import POLICY, ids_of, let_pass, offsets_of, open_queue, progress_of

RANGES = replace(POLICY, ranges=True, credit=1_000)


async def opened(count: int = 100, **columns: object) -> tuple[Harness, Member]:
    harness = Harness()
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.publish(ANN, "t", RecordBatch([b"%d" % number for number in range(count)], **columns))  # type: ignore[arg-type]
    return harness, open_queue(harness, RANGES)


def entries_of(member: Member) -> int:
    consumer: GroupConsumer = member._consumer
    return consumer.unsettled


async def test_a_range_is_one_entry_and_its_ids_are_consecutive() -> None:
    harness, queue = await opened()
    singles, (taken,) = await queue.take_ranges(60)
    assert (singles, taken.first_id, taken.values) == ([], 1, [b"%d" % number for number in range(60)])
    assert (entries_of(queue), queue.in_flight) == (1, 60)
    assert all(queue.ack(range(1, 61)))
    assert (entries_of(queue), queue.in_flight) == (0, 0)
    _, (taken,) = await queue.take_ranges(60)
    assert (taken.first_id, len(taken.values)) == (61, 40)
    await harness.broker.close()


async def test_acks_in_order_leave_one_entry_and_move_the_progress() -> None:
    harness, queue = await opened()
    await queue.take_ranges(100)
    for first in range(1, 91, 10):
        assert all(queue.ack(range(first, first + 10)))
        assert entries_of(queue) == 1
    assert queue.in_flight == 10
    assert await progress_of(harness) == 90
    assert queue.ack([90, 91]) == [False, True]
    assert await progress_of(harness) == 91
    await harness.broker.close()


@pytest.mark.parametrize("seed", range(5))
async def test_acks_in_any_order_settle_each_record_once(seed: int) -> None:
    harness, queue = await opened()
    await queue.take_ranges(100)
    ids = list(range(1, 101))
    random.Random(seed).shuffle(ids)
    while ids:
        some, ids = ids[:7], ids[7:]
        assert queue.ack([*some, some[0], 1_000]) == [*([True] * len(some)), False, False]
        assert queue.in_flight == len(ids)
    assert await progress_of(harness) == 100
    await harness.broker.close()


async def test_the_rest_of_a_range_comes_again_with_the_same_ids() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(10)
    queue.ack([1, 2, 3])
    await let_pass(harness, RANGES.ack_timeout_ms)
    again = await queue.take(100)
    assert (offsets_of(again), ids_of(again), {delivery.attempt for delivery in again}) == ([*range(3, 10)], [*range(4, 11)], {2})
    assert all(queue.ack(ids_of(again)))
    assert await progress_of(harness) == 10
    await harness.broker.close()


async def test_a_nack_inside_a_range_delays_only_its_record() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(10)
    assert queue.nack([5], delay_ms=50) == [True]
    assert all(queue.ack([1, 2, 3, 4, 6, 7, 8, 9, 10]))
    assert await progress_of(harness) == 4
    (again,) = await queue.take(10)
    assert (again.id, again.offset, again.attempt) == (5, 4, 2)
    await harness.broker.close()


async def test_a_member_that_leaves_gives_back_what_it_has_not_settled() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(10)
    queue.ack([1, 2])
    await queue.close()
    other = open_queue(harness)
    taken = await other.take(100)
    assert offsets_of(taken) == list(range(2, 10))
    assert queue.ack([3]) == [False], "it belongs to the other member now"
    assert all(other.ack(ids_of(taken)))
    assert await progress_of(harness) == 10
    await harness.broker.close()


async def test_a_commit_inside_a_range_settles_what_is_below_it() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(10)
    await harness.broker.commit(ANN, "g", {("t", 0): 6})
    assert queue.in_flight == 4
    assert queue.ack(range(1, 11)) == [False] * 6 + [True] * 4
    assert await progress_of(harness) == 10
    await harness.broker.close()


async def test_records_with_headers_or_an_expiry_are_single_and_keep_their_order() -> None:
    harness, queue = await opened(4)
    now = harness.clock.now
    await harness.broker.publish(ANN, "t", RecordBatch([b"a", b"b"], expiries=[now + 10_000, now]))
    await harness.broker.publish(ANN, "t", RecordBatch([b"c"], headers=[(("x", b"y"),)]))
    await harness.broker.publish(ANN, "t", RecordBatch([b"d"]))
    seen: list[bytes | None] = []
    while True:
        singles, ranges = await queue.take_ranges(100)
        if not singles and not ranges:
            break
        seen += [delivery.value for delivery in singles]
        for taken in ranges:
            seen += taken.values
    assert seen == [b"0", b"1", b"2", b"3", b"a", b"c", b"d"]
    await harness.broker.close()


async def test_what_was_not_settled_comes_again_after_a_restart() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(10)
    queue.ack([1, 2, 3, 4])
    assert await progress_of(harness) == 4
    await harness.crash()
    _, (taken,) = await open_queue(harness, RANGES).take_ranges(100)
    assert taken.values == [b"%d" % number for number in range(4, 10)]
    await harness.broker.close()


async def taken_now(queue: Member, count: int) -> tuple[int, list[bytes | None]] | None:
    found = queue.take_range_now(count)
    return None if found is None else (found.first_id, found.values)


async def test_records_in_memory_are_taken_without_a_wait_and_settled_as_others_are() -> None:
    harness, queue = await opened(10)
    assert await taken_now(queue, 1) is None, "nothing is read yet, and nothing checked"
    await queue.take_ranges(1)
    assert await taken_now(queue, 1) == (2, [b"1"])
    assert await taken_now(queue, 3) == (3, [b"2", b"3", b"4"])
    assert (queue.in_flight, entries_of(queue)) == (5, 3)
    assert await taken_now(queue, 6) is None, "five are left"
    assert queue.ack([2, 2]) == [True, False]
    assert queue.ack([2]) == [False]
    assert queue.ack([1]) == [True]
    assert queue.ack([4]) == [True]
    assert await progress_of(harness) == 2
    assert queue.ack([3, 5]) == [True, True]
    assert await progress_of(harness) == 5
    assert await taken_now(queue, 5) == (6, [b"5", b"6", b"7", b"8", b"9"])
    assert await taken_now(queue, 1) is None
    await harness.broker.close()


async def test_a_record_taken_without_a_wait_comes_again_with_the_same_id_before_new_ones() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(1)
    queue.ack([1])
    assert await taken_now(queue, 1) == (2, [b"1"])
    await let_pass(harness, RANGES.ack_timeout_ms)
    assert await taken_now(queue, 1) is None, "a redelivery is due"
    (again,), _ = await queue.take_ranges(1)
    assert (again.id, again.value, again.attempt) == (2, b"1", 2)
    assert await taken_now(queue, 1) == (3, [b"2"])
    await harness.broker.close()


async def test_a_take_without_a_wait_stays_within_bytes_credit_and_room() -> None:
    harness, queue = await opened(10)
    await queue.take_ranges(1)
    assert queue.take_range_now(2, 1) is None
    found = queue.take_range_now(1, 1)
    assert found is not None and found.values == [b"1"], "a single record is taken whatever its size"
    small = harness.broker.join(ANN, "h", "t", policy=replace(RANGES, credit=2), mode="shared", start="earliest")
    await small.take_ranges(1)
    assert await taken_now(small, 2) is None
    assert await taken_now(small, 1) == (2, [b"1"])
    assert await taken_now(small, 1) is None
    await harness.broker.close()


async def test_a_take_without_a_wait_relies_on_a_check_only_until_the_rules_change() -> None:
    harness, queue = await opened(10)
    checks: list[str] = []
    queue.guard(ANN, lambda who: checks.append(who.name))
    assert await taken_now(queue, 1) is None
    await queue.take_ranges(1)
    assert await taken_now(queue, 1) == (2, [b"1"])
    harness.broker.access_changed()
    assert await taken_now(queue, 1) is None
    await queue.take_ranges(1)
    assert await taken_now(queue, 1) == (4, [b"3"])
    queue.who = replace(ANN, address="elsewhere")
    assert await taken_now(queue, 1) is None, "another connection"
    assert len(checks) == 2
    await harness.broker.close()


async def test_nothing_is_taken_without_a_wait_by_a_member_that_left_or_after_the_end_of_the_topic() -> None:
    harness, queue = await opened(10)
    other = open_queue(harness, RANGES, group="h")
    await queue.take_ranges(1)
    await other.take_ranges(1)
    await other.close()
    assert await taken_now(other, 1) is None
    await harness.broker.delete_topic(ANN, "t")
    assert await taken_now(queue, 1) is None
    await harness.broker.close()


async def test_records_with_headers_or_an_expiry_are_left_to_a_take_of_single_records() -> None:
    for columns in ({"headers": [(("a", b"b"),)] * 5}, {"expiries": [1 << 60] * 5}):
        harness, queue = await opened(5, **columns)
        assert len((await queue.take_ranges(1))[0]) == 1
        assert await taken_now(queue, 1) is None
        await harness.broker.close()
