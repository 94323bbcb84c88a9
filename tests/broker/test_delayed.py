"""Delayed messages: none early, none lost, none twice."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import Broker, BrokerSettings, TopicConfig
from headrace.broker.delayed import Waiting
from headrace.broker.publishing.publish import Route
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import (
    DiskFull,
    InvalidRequest,
    LimitExceeded,
    RecordTooLarge,
    Unavailable,
    UnknownMessage,
    UnknownPartition,
    UnknownTopic,
)
from headrace.limits import DELAY_MS_MAX, DELAYED_RECORD_BYTES_MAX
from headrace.storage.files import DiskFiles
from tests.broker.stand import ANN, Stand, turns


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t")
    return stand


async def _tick(stand: Stand, ms: int) -> None:
    stand.clock.tick(ms)
    await turns()


async def _later(stand: Stand, value: str, delay_ms: int, topic: str = "t") -> str:
    id, due = await stand.broker.publish_delayed(ANN, topic, value.encode(), delay_ms=delay_ms, key=value[:1].encode())
    assert due == stand.clock.now + max(0, delay_ms)
    return id


async def test_a_message_comes_at_its_time_and_not_before(stand: Stand) -> None:
    await _later(stand, "a", 1_500)
    await _tick(stand, 1_499)
    assert await stand.values() == []
    await _tick(stand, 1)
    (record,) = await stand.records()
    assert (record.value, record.timestamp) == (b"a", stand.clock.now)
    assert stand.broker.delayed(ANN) == []


async def test_messages_come_in_the_order_of_their_times(stand: Stand) -> None:
    for value, delay in (("c", 300), ("a", 100), ("d", 300), ("b", 200)):
        await _later(stand, value, delay)
    assert [one.key for one in stand.broker.delayed(ANN)] == [b"a", b"b", b"c", b"d"]
    appends = stand.engine.appends
    await _tick(stand, 1_000)
    assert await stand.values() == ["a", "b", "c", "d"]
    assert stand.engine.appends <= appends + 3, "what is due together is delivered together"


@pytest.mark.parametrize("delay_ms", [0, -5])
async def test_no_delay_is_due_now(stand: Stand, delay_ms: int) -> None:
    await _later(stand, "a", delay_ms)
    await _tick(stand, 0)
    assert await stand.values() == ["a"]


async def test_key_headers_partition_and_time_to_live_are_kept(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "u", partitions=3)
    headers = (("h", b"1"),)
    await stand.broker.publish_delayed(ANN, "u", b"v", delay_ms=10, key=b"k", headers=headers, partition=2, ttl_ms=50)
    await _tick(stand, 10)
    (record,) = await stand.records("u", 2)
    assert (record.key, record.value, record.headers, record.expiry) == (b"k", b"v", headers, stand.clock.now + 50)


async def test_the_topics_time_to_live_counts_from_the_delivery(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "u", config=TopicConfig(ttl_ms=100))
    await _later(stand, "a", 5_000, "u")
    await _tick(stand, 5_000)
    assert (await stand.records("u"))[0].expiry == stand.clock.now + 100


async def test_what_is_delivered_leaves_the_schedule_in_the_same_append(stand: Stand) -> None:
    await _later(stand, "a", 100)
    appends = stand.engine.appends
    await _tick(stand, 100)
    assert stand.engine.appends == appends + 1
    rows = await stand.records("__delayed")
    assert [row.value is None for row in rows] == [False, True]


async def test_a_cancelled_message_never_comes(stand: Stand) -> None:
    id, other = await _later(stand, "a", 100), await _later(stand, "b", 100)
    await stand.broker.cancel_delayed(ANN, id, topic="t")
    with pytest.raises(UnknownMessage):
        await stand.broker.cancel_delayed(ANN, id)
    with pytest.raises(UnknownMessage):
        await stand.broker.cancel_delayed(ANN, other, topic="u")
    await stand.crash()
    await _tick(stand, 100)
    assert await stand.values() == ["b"]
    with pytest.raises(UnknownMessage):
        await stand.broker.cancel_delayed(ANN, other)


async def test_ids_tell_nothing_about_each_other_and_stay_what_they_are(stand: Stand) -> None:
    ids = [await _later(stand, "a", 100) for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(len(id) == 32 for id in ids), "128 bits"
    drawn = random.Random(7)
    assert ids == [drawn.randbytes(16).hex() for _ in ids], "nothing but what was drawn is in them"
    await stand.crash()
    assert [one.id for one in stand.broker.delayed(ANN)] == ids


async def test_an_id_that_is_drawn_twice_is_given_once(stand: Stand) -> None:
    first = await _later(stand, "a", 100)
    stand.dice.seed(7)
    assert await _later(stand, "b", 200) != first
    assert [one.key for one in stand.broker.delayed(ANN)] == [b"a", b"b"]


async def test_a_cancel_that_fails_leaves_the_message(stand: Stand) -> None:
    id = await _later(stand, "a", 100)
    stand.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await stand.broker.cancel_delayed(ANN, id)
    stand.engine.error = None
    await _tick(stand, 2_000)
    assert await stand.values() == ["a"]


async def test_a_cancel_and_a_delivery_at_once_are_one_of_the_two(stand: Stand) -> None:
    id = await _later(stand, "a", 100)
    stand.engine.hold()
    stand.clock.tick(100)
    await turns()
    with pytest.raises(UnknownMessage):
        await stand.broker.cancel_delayed(ANN, id)
    stand.engine.let_go()
    await turns()
    assert await stand.values() == ["a"]


async def test_a_message_that_cannot_be_written_comes_later(stand: Stand) -> None:
    await _later(stand, "a", 100)
    stand.engine.error = DiskFull("full")
    await _tick(stand, 5_000)
    assert await stand.values() == []
    stand.engine.error = None
    await _tick(stand, 1_000)
    await _tick(stand, 1_000)
    assert await stand.values() == ["a"]


async def test_thousands_that_are_due_at_once_take_a_turn_of_the_loop_for_each_thousand(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, taken, fired = stand.broker._schedule, list[tuple[int, int]](), 0
    deliver, on_timer = schedule._deliver, schedule._on_timer

    def told(due: list[Waiting]) -> None:
        taken.append((len(due), fired))
        deliver(due)

    def counted() -> None:
        nonlocal fired
        fired += 1
        on_timer()

    monkeypatch.setattr(schedule, "_deliver", told)
    monkeypatch.setattr(schedule, "_on_timer", counted)
    for _ in range(2_500):
        await _later(stand, "a", 100)
    await _tick(stand, 100)
    assert taken == [(1_000, 1), (1_000, 2), (500, 3)]
    assert len(await stand.values()) == 2_500


async def test_the_next_ones_are_listed_first_and_no_more_than_asked_for(stand: Stand) -> None:
    for delay_ms in (300, 100, 200):
        await _later(stand, "a", delay_ms)
    dues = [one.due - stand.clock.now for one in stand.broker.delayed(ANN, count_max=2)]
    assert dues == [100, 200]
    assert len(stand.broker.delayed(ANN)) == 3


async def test_what_could_not_be_written_is_tried_again_soon_then_ever_later(stand: Stand) -> None:
    await _later(stand, "a", 100)
    stand.engine.error = DiskFull("full")
    await _tick(stand, 100)
    tried = []
    for ms in range(4_000):
        before = stand.engine.appends
        await _tick(stand, 1)
        if stand.engine.appends > before:
            tried.append(ms + 1)
    pauses = [later - earlier for earlier, later in zip([0, *tried], tried, strict=False)]
    assert pauses == [20, 40, 80, 160, 320, 640, 1_000, 1_000]


async def test_what_became_due_while_nobody_ran_comes_at_the_start(stand: Stand) -> None:
    await _later(stand, "a", 100)
    await _later(stand, "b", 60_000)
    await stand.restart()
    stand.clock.now += 1_000
    await stand.restart()
    await _tick(stand, 0)
    assert await stand.values() == ["a"]
    await _tick(stand, 60_000)
    assert await stand.values() == ["a", "b"]


async def test_an_id_is_not_given_again_after_a_restart(stand: Stand) -> None:
    ids = {await _later(stand, "a", 10)}
    for _ in range(3):
        await _tick(stand, 10)
        await stand.engine.maintain()
        await stand.crash()
        ids.add(await _later(stand, "a", 10))
    assert len(ids) == 4


async def test_a_deleted_topic_takes_its_messages_along(stand: Stand) -> None:
    await _later(stand, "a", 100)
    await stand.broker.delete_topic(ANN, "t")
    await stand.broker.create_topic(ANN, "t")
    assert stand.broker.delayed(ANN) == []
    await _tick(stand, 200)
    assert await stand.values() == []


async def test_a_topic_lost_in_a_crash_takes_its_messages_along(stand: Stand) -> None:
    await _later(stand, "a", 100)
    await stand.engine.delete_topic("t")
    await stand.crash()
    assert stand.broker.delayed(ANN) == []


async def test_what_cannot_be_scheduled_is_refused(stand: Stand) -> None:
    broker = stand.broker
    with pytest.raises(UnknownTopic):
        await broker.publish_delayed(ANN, "none", b"", delay_ms=1)
    with pytest.raises(UnknownPartition):
        await broker.publish_delayed(ANN, "t", b"", delay_ms=1, partition=1)
    with pytest.raises(InvalidRequest):
        await broker.publish_delayed(ANN, "t", b"", delay_ms=DELAY_MS_MAX + 1)
    with pytest.raises(InvalidRequest):
        await broker.publish_delayed(ANN, "t", b"", delay_ms=1, ttl_ms=-1)
    with pytest.raises(RecordTooLarge):
        await broker.publish_delayed(ANN, "t", bytes(DELAYED_RECORD_BYTES_MAX + 1), delay_ms=1)
    await broker.publish_delayed(ANN, "t", bytes(DELAYED_RECORD_BYTES_MAX), delay_ms=DELAY_MS_MAX)


async def test_number_and_bytes_are_bounded_and_given_back() -> None:
    stand = Stand(BrokerSettings(delayed_max=2, delayed_bytes_max=3_000))
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    await _later(stand, "x" * 2_000, 100)
    with pytest.raises(LimitExceeded, match="3000 bytes"):
        await _later(stand, "x" * 2_000, 100)
    await _later(stand, "b", 100)
    with pytest.raises(LimitExceeded, match="2 delayed"):
        await _later(stand, "c", 100)
    await stand.crash()
    with pytest.raises(LimitExceeded, match="2 delayed"):
        await _later(stand, "c", 100)
    await _tick(stand, 100)
    stand.engine.error = DiskFull("full")
    for _ in range(5):
        with pytest.raises(DiskFull):
            await _later(stand, "x" * 2_000, 100)
    stand.engine.error = None
    await _later(stand, "x" * 2_000, 100)
    await _later(stand, "e", 100)
    await stand.broker.close()


async def test_after_the_drain_nothing_is_delivered(stand: Stand) -> None:
    await _later(stand, "a", 100)
    await stand.broker.close()
    await _tick(stand, 500)
    assert await stand.values() == []
    await stand.crash()
    await _tick(stand, 0)
    assert await stand.values() == ["a"]


_STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(-10, 300)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(0, 400)),
    st.tuples(st.sampled_from(["crash", "restart", "full", "room", "maintain"]), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEP, max_size=40))
async def test_whatever_happens_none_is_early_lost_or_twice(steps: list[tuple[str, int]]) -> None:
    stand = Stand()
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    due: dict[str, int] = {}
    ids: list[tuple[str, str]] = []
    cancelled: set[str] = set()
    for step, number in steps:
        if step == "publish":
            value = f"m{len(ids)}"
            try:
                id, at = await stand.broker.publish_delayed(ANN, "t", value.encode(), delay_ms=number)
            except DiskFull:
                continue
            due[value] = at
            ids.append((value, id))
        elif step == "cancel" and ids:
            value, id = ids[number % len(ids)]
            try:
                await stand.broker.cancel_delayed(ANN, id)
                cancelled.add(value)
            except (UnknownMessage, DiskFull):
                pass
        elif step == "tick":
            await _tick(stand, number)
        elif step == "crash":
            await turns()
            await stand.crash()
        elif step == "restart":
            await stand.restart()
        elif step == "maintain":
            await stand.engine.maintain()
        else:
            stand.engine.error = DiskFull("full") if step == "full" else None
    stand.engine.error = None
    for _ in range(4):
        await _tick(stand, 1_000)
    records = await stand.records()
    assert all(record.timestamp >= due[(record.value or b"").decode()] for record in records)
    assert sorted((record.value or b"").decode() for record in records) == sorted(set(due) - cancelled)
    await stand.broker.close()


async def test_on_disk_and_by_the_real_clock_it_comes_within_50_ms(tmp_path: Path) -> None:
    def clock() -> int:
        return time.time_ns() // 1_000_000

    broker = Broker(EmbeddedEngine(DiskFiles(tmp_path), clock=clock), clock=clock, random_bytes=os.urandom)
    await broker.open()
    await broker.create_topic(ANN, "t")
    dues = dict([await broker.publish_delayed(ANN, "t", b"%d" % number, delay_ms=20 * number) for number in range(20)])
    times: list[int] = []
    async with asyncio.timeout(60):
        while len(times) < 20:
            fetched = await broker.fetch(ANN, "t", 0, len(times), bytes_max=1 << 20, wait_ms=1_000)
            times += (at for batch in fetched.batches for at in batch.timestamps())
    late = [at - due for at, due in zip(times, dues.values(), strict=True)]
    assert min(late) >= 0
    assert sorted(late)[10] < 50, "the median: a busy machine may hold up single ones"
    await broker.close()


async def test_a_topic_that_cannot_take_its_messages_keeps_no_other_waiting(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    await stand.broker.create_topic(ANN, "stuck")
    for topic in ("stuck", "t", "stuck"):
        await _later(stand, topic, 100, topic)
    find = stand.broker._publisher.own_route

    def route(topic: str) -> Route:
        if topic == "stuck":
            raise Unavailable("its schema is missing")
        return find(topic)

    monkeypatch.setattr(stand.broker._publisher, "own_route", route)
    await _tick(stand, 100)
    assert (await stand.values("t"), await stand.values("stuck")) == (["t"], [])
    appends = stand.engine.appends
    await _tick(stand, 10_000)
    assert stand.engine.appends == appends, "nothing to write is not written"
    monkeypatch.undo()
    await _tick(stand, 1_000)
    assert await stand.values("stuck") == ["stuck", "stuck"]
