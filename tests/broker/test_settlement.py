"""Settlement: take, ack, nack, time-out, redelivery, dead letters, progress."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings, Delivery, SettlementPolicy, SettlementQueue
from headrace.broker.settlement import Start
from headrace.engine.contract import Cleanup, TopicConfig
from headrace.errors import (
    DiskFull,
    InvalidRequest,
    InvalidTopicName,
    LimitExceeded,
    OffsetOutOfRange,
    UnknownTopic,
)
from headrace.limits import HEADERS_MAX, IN_FLIGHT_MAX
from headrace.records import Run
from tests.broker.stand import ANN, Stand, turns

POLICY = SettlementPolicy(ack_timeout_ms=1_000, backoff_ms=100, backoff_max_ms=350, attempts_max=4)


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t")
    return stand


def _queue(
    stand: Stand, policy: SettlementPolicy = POLICY, *, group: str = "g", topic: str = "t", start: Start = "earliest"
) -> SettlementQueue:
    return stand.broker.queue(ANN, group, topic, policy=policy, start=start)


def _offsets(deliveries: list[Delivery]) -> list[int]:
    return [delivery.offset for delivery in deliveries]


def _ids(deliveries: list[Delivery]) -> list[int]:
    return [delivery.id for delivery in deliveries]


async def _later(stand: Stand, ms: int) -> None:
    await turns()
    stand.clock.tick(ms)
    await turns()


async def _progress(stand: Stand, group: str = "g", partition: int = 0) -> int | None:
    """What the group has committed once the background commit is through."""
    await _later(stand, stand.settings.settlement_commit_ms)
    return stand.broker.committed(ANN, group, "t", partition)


# Taking


async def test_deliveries_come_in_order_with_all_they_carry(stand: Stand) -> None:
    run = Run([b"a", None], [b"k", None], [(("h", b"1"),), ()], [5, 6])
    await stand.broker.publish(ANN, "t", run)
    assert await _queue(stand).take(10) == [
        Delivery(id=1, partition=0, offset=0, attempt=1, timestamp=5, key=b"k", value=b"a", headers=(("h", b"1"),)),
        Delivery(id=2, partition=0, offset=1, attempt=1, timestamp=6, key=None, value=None, headers=()),
    ]


async def test_take_is_bounded_by_records_and_bytes(stand: Stand) -> None:
    await stand.put(*("x" * 100 for _ in range(10)))
    queue = _queue(stand)
    assert _offsets(await queue.take(3)) == [0, 1, 2]
    assert _offsets(await queue.take(10, bytes_max=250)) == [3, 4]
    assert _offsets(await queue.take(10, bytes_max=1)) == [5], "one comes however large"
    assert _offsets(await queue.take(10)) == [6, 7, 8, 9]
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(InvalidRequest):
            await queue.take(*bad)


async def test_take_is_empty_when_there_is_nothing(stand: Stand) -> None:
    assert await _queue(stand).take(10) == []


async def test_take_waits_for_the_first_record(stand: Stand) -> None:
    queue = _queue(stand)
    taking = asyncio.ensure_future(queue.take(10, wait_ms=500))
    await turns()
    assert not taking.done()
    await stand.put("a", "b")
    assert _offsets(await taking) == [0, 1]
    taking = asyncio.ensure_future(queue.take(10, wait_ms=500))
    await _later(stand, 499)
    assert not taking.done()
    await _later(stand, 1)
    assert await taking == []


async def test_take_waits_for_a_redelivery(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand)
    first = await queue.take(1)
    taking = asyncio.ensure_future(queue.take(1, wait_ms=60_000))
    queue.nack(_ids(first), delay_ms=200)
    await _later(stand, 199)
    assert not taking.done()
    await _later(stand, 1)
    assert _offsets(await taking) == [0]


async def test_take_waits_for_room_in_flight(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    queue = _queue(stand, SettlementPolicy(in_flight_max=2))
    taken = await queue.take(10)
    assert _offsets(taken) == [0, 1]
    assert await queue.take(10) == []
    taking = asyncio.ensure_future(queue.take(10, wait_ms=1_000))
    await turns()
    assert not taking.done()
    queue.ack([taken[1].id])
    assert _offsets(await taking) == [2]
    assert queue.in_flight == 2


async def test_no_queue_has_more_in_flight_than_the_limit(stand: Stand) -> None:
    await stand.broker.publish(ANN, "t", Run([b"x"] * (IN_FLIGHT_MAX + 1)))
    queue = _queue(stand, SettlementPolicy(in_flight_max=IN_FLIGHT_MAX + 1))
    assert len(await queue.take(IN_FLIGHT_MAX + 1)) == IN_FLIGHT_MAX
    assert await queue.take(1) == []


async def test_what_waits_to_come_again_counts_too(stand: Stand) -> None:
    """Or a queue that refuses everything would list the whole topic in memory."""
    await stand.put(*(f"{number}" for number in range(10)))
    queue = _queue(stand, SettlementPolicy(in_flight_max=3, backoff_ms=1_000))
    queue.nack(_ids(await queue.take(10)))
    assert await queue.take(10) == []
    await _later(stand, 1_000)
    assert _offsets(await queue.take(10)) == [0, 1, 2]


async def test_a_cancelled_take_loses_nothing_and_counts_no_attempt(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=0)
    await stand.put("b", partition=1)
    queue = _queue(stand)
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
    queue = _queue(stand)
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
    queue = _queue(stand)
    taken = await queue.take(10)
    assert _offsets(taken) == [1, 2]
    queue.nack(_ids(taken))
    await _later(stand, 100)
    again = await queue.take(10)
    assert _offsets(again) == [1], "the other one expired while it waited"
    queue.ack(_ids(again))
    assert await _progress(stand) == 3


# Where it starts


@pytest.mark.parametrize(("start", "offsets"), [("earliest", [0, 1, 2]), ("latest", []), (1, [1, 2]), (3, [])])
async def test_a_new_group_starts_where_it_is_told(stand: Stand, start: Start, offsets: list[int]) -> None:
    await stand.put("a", "b", "c")
    queue = _queue(stand, start=start)
    assert _offsets(await queue.take(10)) == offsets
    await stand.put("d")
    assert _offsets(await queue.take(10)) == [3]


@pytest.mark.parametrize("start", [-1, 4])
async def test_a_new_group_starts_only_inside_the_log(stand: Stand, start: int) -> None:
    await stand.put("a", "b", "c")
    with pytest.raises(OffsetOutOfRange):
        _queue(stand, start=start)


async def test_a_group_that_was_here_goes_on_where_it_was(stand: Stand) -> None:
    await stand.put("a", "b", "c", "d")
    await stand.broker.commit(ANN, "g", {("t", 0): 2})
    assert _offsets(await _queue(stand, start="earliest").take(10)) == [2, 3]


@pytest.mark.parametrize(("committed", "offsets"), [(99, [4]), (0, [2, 3, 4])])
async def test_a_committed_offset_outside_the_log_is_brought_inside(stand: Stand, committed: int, offsets: list[int]) -> None:
    await stand.broker.alter_topic(ANN, "t", config=TopicConfig(retention_ms=10))
    await stand.put("a", "b")
    stand.clock.tick(50)
    await stand.put("c", "d")
    await stand.broker.maintain()
    await stand.broker.commit(ANN, "g", {("t", 0): committed})
    queue = _queue(stand)
    await stand.put("e")
    assert _offsets(await queue.take(10)) == offsets


async def test_a_group_that_dies_before_its_first_ack_finds_its_place_again(stand: Stand) -> None:
    await stand.put("before")
    queue = _queue(stand, start="latest")
    await stand.put("a", "b")
    await queue.take(1)
    await _later(stand, stand.settings.settlement_commit_ms)
    await stand.crash()
    assert _offsets(await _queue(stand, start="latest").take(10)) == [1, 2]


async def test_a_partition_added_while_a_group_is_away_is_read_from_its_start(stand: Stand) -> None:
    queue = _queue(stand, start="latest")
    await queue.close()
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=1)
    assert [delivery.partition for delivery in await _queue(stand, start="latest").take(10)] == [1]


async def test_a_partition_added_while_a_queue_is_open_is_taken_from(stand: Stand) -> None:
    queue = _queue(stand, start="latest")
    only = stand.broker.queue(ANN, "h", "t", policy=POLICY, partitions=[0])
    taking = asyncio.ensure_future(queue.take(10, wait_ms=1_000))
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=1)
    assert [delivery.partition for delivery in await taking] == [1]
    assert await only.take(10) == []


async def test_records_lost_to_retention_are_passed_over(stand: Stand) -> None:
    await stand.broker.alter_topic(ANN, "t", config=TopicConfig(retention_ms=500))
    await stand.put("a", "b")
    queue = _queue(stand)
    taken = await queue.take(1)
    queue.nack(_ids(taken))
    stand.clock.tick(600)
    await stand.put("c")
    await stand.broker.maintain()
    found: list[Delivery] = []
    for _ in range(3):
        found += await queue.take(10)
    assert [(delivery.offset, delivery.value) for delivery in found if delivery.offset != 1] == [(2, b"c")]
    queue.ack(_ids(found))
    assert await _progress(stand) == 3


async def test_where_compaction_left_nothing_the_group_moves_on(stand: Stand) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT, tombstone_retention_ms=1)
    await stand.broker.alter_topic(ANN, "t", config=config)
    await stand.broker.publish(ANN, "t", Run([b"1", None], [b"k", b"k"]))
    stand.clock.tick(10)
    await stand.broker.maintain()
    queue = _queue(stand)
    assert await queue.take(10) == []
    assert await _progress(stand) == 2


# Ack and nack


async def test_an_ack_settles_once(stand: Stand) -> None:
    await stand.put("a", "b")
    queue = _queue(stand)
    first, second = await queue.take(10)
    assert queue.ack([first.id, 99, first.id, second.id]) == [True, False, False, True]
    assert queue.nack([first.id]) == [False]
    await _later(stand, 100_000)
    assert await queue.take(10) == []


async def test_a_nacked_record_comes_again_after_a_pause_that_doubles_up_to_a_cap(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand, SettlementPolicy(ack_timeout_ms=10**6, backoff_ms=100, backoff_max_ms=350, attempts_max=0))
    (delivery,) = await queue.take(1)
    for attempt, pause in enumerate([100, 200, 350, 350, 350], start=2):
        assert queue.nack([delivery.id]) == [True]
        await _later(stand, pause - 1)
        assert await queue.take(1) == []
        await _later(stand, 1)
        (again,) = await queue.take(1)
        assert (again.id, again.offset, again.attempt, again.value) == (delivery.id, 0, attempt, b"a")


async def test_a_nack_may_name_its_own_pause(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand)
    queue.nack(_ids(await queue.take(1)), delay_ms=0)
    taken = await queue.take(1)
    assert taken[0].attempt == 2
    queue.nack(_ids(taken), delay_ms=5_000)
    await _later(stand, 4_999)
    assert await queue.take(1) == []
    await _later(stand, 1)
    assert _offsets(await queue.take(1)) == [0]
    with pytest.raises(InvalidRequest):
        queue.nack([1], delay_ms=-1)


async def test_redeliveries_do_not_hold_up_what_is_new(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    queue = _queue(stand)
    queue.nack(_ids(await queue.take(1)))
    assert _offsets(await queue.take(1)) == [1]
    await _later(stand, 100)
    assert _offsets(await queue.take(10)) == [0, 2]


async def test_what_does_not_fit_a_take_comes_with_the_next(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    queue = _queue(stand)
    queue.nack(_ids(await queue.take(10)), delay_ms=0)
    assert _offsets(await queue.take(10, bytes_max=1)) == [0]
    assert _offsets(await queue.take(10, bytes_max=1)) == [1]
    assert _offsets(await queue.take(10)) == [2]


async def test_a_delivery_that_is_not_acked_in_time_comes_again_at_once(stand: Stand) -> None:
    await stand.put("a", "b")
    queue = _queue(stand)
    first = await queue.take(10)
    await _later(stand, 999)
    assert await queue.take(10) == []
    await _later(stand, 1)
    again = await queue.take(10)
    assert [(delivery.id, delivery.attempt) for delivery in again] == [(delivery.id, 2) for delivery in first]


async def test_the_clock_alone_is_enough_where_no_timer_has_rung(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand)
    await queue.take(10)
    stand.clock.now += 1_000
    assert [delivery.attempt for delivery in await queue.take(10)] == [2]


async def test_a_late_ack_before_the_redelivery_counts(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand)
    taken = await queue.take(1)
    await _later(stand, 5_000)
    assert queue.ack(_ids(taken)) == [True]
    assert await queue.take(1) == []
    assert await _progress(stand) == 1


async def test_a_late_ack_after_the_redelivery_to_another_does_not(stand: Stand) -> None:
    await stand.put("a")
    slow, quick = _queue(stand), _queue(stand)
    taken = await slow.take(1)
    await _later(stand, 1_000)
    again = await quick.take(1)
    assert slow.ack(_ids(taken)) == [False]
    assert slow.nack(_ids(taken)) == [False]
    assert quick.ack(_ids(again)) == [True]


async def test_a_large_wave_of_redeliveries_costs_few_reads(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await stand.broker.publish(ANN, "t", Run([b"x" * 10] * 1_000))
    queue = _queue(stand)
    await queue.take(1_000)
    await _later(stand, 1_000)
    reads = 0
    read = stand.engine.read

    async def counted(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        return await read(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came

    monkeypatch.setattr(stand.engine, "read", counted)
    assert len(await queue.take(1_000)) == 1_000
    assert reads <= 3


# Several consumers


async def test_queues_of_one_group_split_the_work(stand: Stand) -> None:
    await stand.put(*(f"{number}" for number in range(10)))
    one, two = _queue(stand), _queue(stand)
    first, second, third = await asyncio.gather(one.take(4), two.take(4), one.take(4))
    assert sorted(_offsets(first + second + third)) == list(range(10))
    assert one.ack(_ids(second)) == [False] * len(second), "only who got it may ack it"


async def test_groups_do_not_touch_each_other(stand: Stand) -> None:
    await stand.put("a")
    one, two = _queue(stand, group="one"), _queue(stand, group="two")
    assert _offsets(await one.take(10)) == _offsets(await two.take(10)) == [0]


async def test_what_a_leaving_consumer_had_in_flight_goes_to_the_others(stand: Stand) -> None:
    await stand.put("a", "b")
    leaving, staying = _queue(stand), _queue(stand)
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


async def test_the_next_consumer_of_a_group_goes_on_where_the_last_one_left(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    queue = _queue(stand)
    taken = await queue.take(2)
    queue.ack([taken[0].id])
    await queue.close()
    await queue.close()
    assert stand.broker.committed(ANN, "g", "t", 0) == 1
    assert _offsets(await _queue(stand).take(10)) == [1, 2]


async def test_a_consumer_that_comes_while_the_last_one_is_leaving_takes_over(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    leaving = _queue(stand)
    taken = await leaving.take(2)
    leaving.ack([taken[0].id])
    stand.engine.hold()
    closing = leaving.close()
    await turns()
    coming = _queue(stand)
    stand.engine.let_go()
    await closing
    assert [(delivery.offset, delivery.attempt) for delivery in await coming.take(10)] == [(1, 2), (2, 1)]
    coming.ack([1, 2, 3])
    assert await _progress(stand) == 3


# Progress


async def test_progress_is_the_lowest_unsettled_offset(stand: Stand) -> None:
    await stand.put(*(f"{number}" for number in range(6)))
    queue = _queue(stand)
    ids = _ids(await queue.take(5))
    for settled, committed in ((1, 0), (2, 0), (0, 3), (4, 3), (3, 5)):
        queue.ack([ids[settled]])
        assert await _progress(stand) == committed


async def test_many_acks_are_one_commit(stand: Stand) -> None:
    await stand.put(*(f"{number}" for number in range(50)))
    queue = _queue(stand)
    await _progress(stand)
    taken = await queue.take(50)
    before = stand.engine.appends
    for delivery in taken:
        queue.ack([delivery.id])
    assert await _progress(stand) == 50
    assert stand.engine.appends == before + 1
    await _later(stand, 10_000)
    assert stand.engine.appends == before + 1, "nothing new, nothing written"


async def test_a_commit_the_log_refuses_is_tried_again(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand)
    queue.ack(_ids(await queue.take(1)))
    stand.engine.error = DiskFull("full")
    assert await _progress(stand) is None
    stand.engine.error = None
    await _later(stand, 1_000)
    assert stand.broker.committed(ANN, "g", "t", 0) == 1


# Dead letters


async def _use_up(stand: Stand, queue: SettlementQueue, attempts: int) -> None:
    for _ in range(attempts):
        queue.nack(_ids(await queue.take(10)), delay_ms=0)
    await turns()


async def test_a_record_that_used_up_its_attempts_goes_to_the_dead_letters(stand: Stand) -> None:
    await stand.put("first")
    await stand.broker.publish(ANN, "t", Run([b"bad"], [b"k"], [(("own", b"1"),)]))
    queue = _queue(stand)
    queue.ack([(await queue.take(1))[0].id])
    await _use_up(stand, queue, 4)
    (letter,) = await stand.records("t.dlq")
    assert (letter.key, letter.value, letter.timestamp) == (b"k", b"bad", stand.clock.now)
    assert letter.headers == (
        ("own", b"1"),
        ("x-headrace-reason", b"refused"),
        ("x-headrace-source-topic", b"t"),
        ("x-headrace-source-partition", b"0"),
        ("x-headrace-source-offset", b"1"),
        ("x-headrace-attempts", b"4"),
        ("x-headrace-first-failure", b"%d" % stand.clock.now),
        ("x-headrace-last-failure", b"%d" % stand.clock.now),
    )
    assert await queue.take(10) == []
    assert await _progress(stand) == 2


async def test_time_outs_use_up_attempts_without_any_call(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand, SettlementPolicy(ack_timeout_ms=1_000, attempts_max=1))
    await queue.take(1)
    await _later(stand, 1_000)
    assert await stand.values("t.dlq") == ["a"]
    assert dict((await stand.records("t.dlq"))[0].headers)["x-headrace-reason"] == b"timed out"


async def test_a_dead_letter_counts_as_settled_only_when_it_is_durable(stand: Stand) -> None:
    await stand.put("bad", "good")
    queue = _queue(stand, SettlementPolicy(attempts_max=1))
    bad, good = await queue.take(10)
    await stand.broker.create_topic(ANN, "t.dlq")
    stand.engine.error, stand.engine.topic = DiskFull("full"), "t.dlq"
    queue.nack([bad.id])
    queue.ack([good.id])
    assert await _progress(stand) == 0
    await _later(stand, 5_000)
    assert stand.broker.committed(ANN, "g", "t", 0) == 0
    stand.engine.error = None
    await _later(stand, 1_000)
    assert await stand.values("t.dlq") == ["bad"]
    assert await _progress(stand) == 2


async def test_many_dead_letters_are_written_together(stand: Stand) -> None:
    await stand.put(*(f"{number}" for number in range(250)))
    queue = _queue(stand, SettlementPolicy(attempts_max=1))
    taken = await queue.take(250)
    before = stand.engine.appends
    queue.nack(_ids(taken))
    await turns(100)
    assert await stand.values("t.dlq") == [f"{number}" for number in range(250)]
    assert stand.engine.appends - before <= 4


async def test_without_dead_letters_the_record_is_dropped(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand, SettlementPolicy(attempts_max=2, dead_letters=False))
    await _use_up(stand, queue, 2)
    assert await queue.take(1) == []
    assert "t.dlq" not in stand.engine.topics()
    assert await _progress(stand) == 1


async def test_without_a_limit_a_record_comes_for_ever(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand, SettlementPolicy(attempts_max=0))
    await _use_up(stand, queue, 100)
    assert (await queue.take(1))[0].attempt == 101


async def test_a_late_ack_of_a_dying_record_is_accepted(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand, SettlementPolicy(attempts_max=1))
    taken = await queue.take(1)
    await stand.broker.create_topic(ANN, "t.dlq")
    stand.engine.error, stand.engine.topic = DiskFull("full"), "t.dlq"
    queue.nack(_ids(taken))
    await turns()
    assert queue.nack(_ids(taken)) == [True]
    assert queue.ack(_ids(taken)) == [True]
    assert await _progress(stand) == 1


async def test_leaving_counts_as_an_attempt_where_dead_letters_are_kept(stand: Stand) -> None:
    await stand.put("poison")
    policy = SettlementPolicy(attempts_max=2)
    for _ in range(2):
        queue = _queue(stand, policy)
        other = _queue(stand, policy)
        assert _offsets(await queue.take(1)) == [0]
        await queue.close()
    assert await stand.values("t.dlq") == ["poison"]
    assert await other.take(1) == []


async def test_leaving_never_drops_a_record(stand: Stand) -> None:
    await stand.put("a")
    policy = SettlementPolicy(attempts_max=1, dead_letters=False)
    leaving, staying = _queue(stand, policy), _queue(stand, policy)
    await leaving.take(1)
    await leaving.close()
    assert _offsets(await staying.take(1)) == [0]


async def test_the_notes_find_room_among_too_many_headers(stand: Stand) -> None:
    own = tuple((f"h{number}", b"x" * 100) for number in range(HEADERS_MAX))
    await stand.broker.publish(ANN, "t", Run([b"a"], headers=[own]))
    queue = _queue(stand, SettlementPolicy(attempts_max=1))
    await _use_up(stand, queue, 1)
    (letter,) = await stand.records("t.dlq")
    assert len(letter.headers) == HEADERS_MAX
    assert letter.headers[:10] == own[:10]
    assert dict(letter.headers)["x-headrace-attempts"] == b"1"


async def test_a_topic_whose_name_leaves_no_room_for_its_dead_letters_is_refused(stand: Stand) -> None:
    name = "x" * 247
    await stand.broker.create_topic(ANN, name)
    with pytest.raises(InvalidTopicName):
        _queue(stand, topic=name)
    _queue(stand, SettlementPolicy(dead_letters=False), topic=name)


# The end


async def test_when_the_topic_goes_the_queue_says_so(stand: Stand) -> None:
    await stand.put("a")
    queue = _queue(stand)
    taken = await queue.take(1)
    taking = asyncio.ensure_future(queue.take(1, wait_ms=1_000))
    await turns()
    await stand.broker.delete_topic(ANN, "t")
    await stand.broker.create_topic(ANN, "t")
    with pytest.raises(UnknownTopic):
        await taking
    with pytest.raises(UnknownTopic):
        await queue.take(1)
    queue.ack(_ids(taken))
    await queue.close()
    await _later(stand, 10_000)
    assert stand.broker.groups(ANN) == [], "the successor inherits no offset"
    assert await _queue(stand).take(1) == []


@pytest.mark.parametrize(
    "policy",
    [
        SettlementPolicy(ack_timeout_ms=0),
        SettlementPolicy(in_flight_max=0),
        SettlementPolicy(backoff_ms=-1),
        SettlementPolicy(backoff_max_ms=-1),
        SettlementPolicy(attempts_max=-1),
    ],
)
async def test_a_policy_that_cannot_work_is_refused(stand: Stand, policy: SettlementPolicy) -> None:
    with pytest.raises(InvalidRequest):
        _queue(stand, policy)


async def test_only_so_many_groups_consume_at_once() -> None:
    stand = Stand(BrokerSettings(groups_max=1))
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    queue = _queue(stand, group="one")
    with pytest.raises(LimitExceeded):
        _queue(stand, group="two")
    await queue.close()
    await stand.broker.delete_group(ANN, "one")
    _queue(stand, group="two")
    await stand.broker.close()
