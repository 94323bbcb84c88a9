"""Delayed messages: none early, none lost, none twice."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import Broker, BrokerSettings, TopicConfig
from headrace.broker.delayed_batches import Waiting
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
from tests.broker.harness import ANN, Harness, turns


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


async def _tick(harness: Harness, ms: int) -> None:
    harness.clock.tick(ms)
    await turns()


async def _later(harness: Harness, value: str, delay_ms: int, topic: str = "t") -> str:
    id, due = await harness.broker.publish_delayed(ANN, topic, value.encode(), delay_ms=delay_ms, key=value[:1].encode())
    assert due == harness.clock.now + max(0, delay_ms)
    return id


async def test_a_message_comes_at_its_time_and_not_before(harness: Harness) -> None:
    await _later(harness, "a", 1_500)
    await _tick(harness, 1_499)
    assert await harness.values() == []
    await _tick(harness, 1)
    (record,) = await harness.records()
    assert (record.value, record.timestamp) == (b"a", harness.clock.now)
    assert harness.broker.delayed(ANN) == []


async def test_messages_come_in_the_order_of_their_times(harness: Harness) -> None:
    for value, delay in (("c", 300), ("a", 100), ("d", 300), ("b", 200)):
        await _later(harness, value, delay)
    assert [one.key for one in harness.broker.delayed(ANN)] == [b"a", b"b", b"c", b"d"]
    appends = harness.engine.appends
    await _tick(harness, 1_000)
    assert await harness.values() == ["a", "b", "c", "d"]
    assert harness.engine.appends <= appends + 3, "what is due together is delivered together"


@pytest.mark.parametrize("delay_ms", [0, -5])
async def test_no_delay_is_due_now(harness: Harness, delay_ms: int) -> None:
    await _later(harness, "a", delay_ms)
    await _tick(harness, 0)
    assert await harness.values() == ["a"]


async def test_key_headers_partition_and_time_to_live_are_kept(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "u", partitions=3)
    headers = (("h", b"1"),)
    await harness.broker.publish_delayed(ANN, "u", b"v", delay_ms=10, key=b"k", headers=headers, partition=2, ttl_ms=50)
    await _tick(harness, 10)
    (record,) = await harness.records("u", 2)
    assert (record.key, record.value, record.headers, record.expiry) == (b"k", b"v", headers, harness.clock.now + 50)


async def test_the_topics_time_to_live_counts_from_the_delivery(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "u", config=TopicConfig(ttl_ms=100))
    await _later(harness, "a", 5_000, "u")
    await _tick(harness, 5_000)
    assert (await harness.records("u"))[0].expiry == harness.clock.now + 100


async def test_what_is_delivered_leaves_the_schedule_in_the_same_append(harness: Harness) -> None:
    await _later(harness, "a", 100)
    appends = harness.engine.appends
    await _tick(harness, 100)
    assert harness.engine.appends == appends + 1
    rows = await harness.records("__delayed")
    assert [row.value is None for row in rows] == [False, True]


async def test_a_cancelled_message_never_comes(harness: Harness) -> None:
    id, other = await _later(harness, "a", 100), await _later(harness, "b", 100)
    await harness.broker.cancel_delayed(ANN, id, topic="t")
    with pytest.raises(UnknownMessage):
        await harness.broker.cancel_delayed(ANN, id)
    with pytest.raises(UnknownMessage):
        await harness.broker.cancel_delayed(ANN, other, topic="u")
    await harness.crash()
    await _tick(harness, 100)
    assert await harness.values() == ["b"]
    with pytest.raises(UnknownMessage):
        await harness.broker.cancel_delayed(ANN, other)


async def test_ids_tell_nothing_about_each_other_and_stay_what_they_are(harness: Harness) -> None:
    ids = [await _later(harness, "a", 100) for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(len(id) == 32 for id in ids), "128 bits"
    drawn = random.Random(7)
    assert ids == [drawn.randbytes(16).hex() for _ in ids], "an id holds only random bytes"
    await harness.crash()
    assert [one.id for one in harness.broker.delayed(ANN)] == ids


async def test_an_id_that_is_drawn_twice_is_given_once(harness: Harness) -> None:
    first = await _later(harness, "a", 100)
    harness.dice.seed(7)
    assert await _later(harness, "b", 200) != first
    assert [one.key for one in harness.broker.delayed(ANN)] == [b"a", b"b"]


async def test_a_cancel_that_fails_leaves_the_message(harness: Harness) -> None:
    id = await _later(harness, "a", 100)
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await harness.broker.cancel_delayed(ANN, id)
    harness.engine.error = None
    await _tick(harness, 2_000)
    assert await harness.values() == ["a"]


async def test_a_cancel_and_a_delivery_at_once_are_one_of_the_two(harness: Harness) -> None:
    id = await _later(harness, "a", 100)
    harness.engine.hold()
    harness.clock.tick(100)
    await turns()
    with pytest.raises(UnknownMessage):
        await harness.broker.cancel_delayed(ANN, id)
    harness.engine.let_go()
    await turns()
    assert await harness.values() == ["a"]


async def test_a_message_that_cannot_be_written_comes_later(harness: Harness) -> None:
    await _later(harness, "a", 100)
    harness.engine.error = DiskFull("full")
    await _tick(harness, 5_000)
    assert await harness.values() == []
    harness.engine.error = None
    await _tick(harness, 1_000)
    await _tick(harness, 1_000)
    assert await harness.values() == ["a"]


async def test_thousands_that_are_due_at_once_take_a_turn_of_the_loop_for_each_thousand(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, taken, fired = harness.broker._schedule, list[tuple[int, int]](), 0
    deliver, on_timer = schedule._deliver, schedule._on_timer

    def counted_delivery(due: list[Waiting]) -> None:
        taken.append((len(due), fired))
        deliver(due)

    def counted() -> None:
        nonlocal fired
        fired += 1
        on_timer()

    monkeypatch.setattr(schedule, "_deliver", counted_delivery)
    monkeypatch.setattr(schedule, "_on_timer", counted)
    for _ in range(2_500):
        await _later(harness, "a", 100)
    await _tick(harness, 100)
    assert taken == [(1_000, 1), (1_000, 2), (500, 3)]
    assert len(await harness.values()) == 2_500


async def test_messages_that_are_stored_together_come_in_their_order_also_if_some_are_cancelled(harness: Harness) -> None:
    values = [b"%d" % number for number in range(1_500)]
    delays = [200 if number % 500 == 499 else 100 for number in range(1_500)]
    none = [None] * 1_500
    staged = harness.broker.stage_delayed(ANN, "t", values, delays, none, none)
    await staged.outcome
    await turns()
    alone = await _later(harness, "alone", 100)
    for number in (0, 1, 700, 998, 1_499):
        await harness.broker.cancel_delayed(ANN, staged.ids[number])
    await _tick(harness, 100)
    left = [number for number in range(1_500) if number not in (0, 1, 700, 998, 1_499)]
    due = [str(number) for number in left if number % 500 != 499]
    assert await harness.values() == [*due, "alone"]
    assert [one.id for one in harness.broker.delayed(ANN)] == [staged.ids[499], staged.ids[999]] and alone
    await _tick(harness, 100)
    assert await harness.values() == [*due, "alone", "499", "999"]


async def test_messages_that_are_stored_together_are_listed_and_dropped_with_their_topic(harness: Harness) -> None:
    none = [None] * 50
    staged = harness.broker.stage_delayed(ANN, "t", [b"%02d" % number for number in range(50)], [100] * 50, none, none)
    await staged.outcome
    await turns()
    await _later(harness, "alone", 100)
    listed = harness.broker.delayed(ANN)
    assert [one.id for one in listed[:-1]] == staged.ids
    assert [(one.topic, one.due, one.size_bytes) for one in listed[:2]] == [("t", staged.dues[0], 2)] * 2
    await harness.broker.delete_topic(ANN, "t")
    assert harness.broker.delayed(ANN) == []
    assert len(harness.broker._schedule) == 0


@pytest.mark.parametrize("count", [1, 2, 500])
async def test_the_keys_of_the_table_are_those_that_it_reads(harness: Harness, count: int) -> None:
    none = [None] * count
    staged = harness.broker.stage_delayed(ANN, "t", [b"x"] * count, [100] * count, none, none)
    await staged.outcome
    rows = await harness.records("__delayed")
    assert [row.key for row in rows] == [msgspec.json.encode((id,)) for id in staged.ids]
    await harness.crash()
    assert [one.id for one in harness.broker.delayed(ANN)] == staged.ids


async def test_the_next_ones_are_listed_first_and_no_more_than_asked_for(harness: Harness) -> None:
    for delay_ms in (300, 100, 200):
        await _later(harness, "a", delay_ms)
    dues = [one.due - harness.clock.now for one in harness.broker.delayed(ANN, count_max=2)]
    assert dues == [100, 200]
    assert len(harness.broker.delayed(ANN)) == 3


async def test_what_could_not_be_written_is_tried_again_soon_then_ever_later(harness: Harness) -> None:
    await _later(harness, "a", 100)
    harness.engine.error = DiskFull("full")
    await _tick(harness, 100)
    tried = []
    for ms in range(4_000):
        before = harness.engine.appends
        await _tick(harness, 1)
        if harness.engine.appends > before:
            tried.append(ms + 1)
    pauses = [later - earlier for earlier, later in zip([0, *tried], tried, strict=False)]
    assert pauses == [20, 40, 80, 160, 320, 640, 1_000, 1_000]


async def test_what_became_due_while_the_broker_was_down_is_delivered_at_the_start(harness: Harness) -> None:
    await _later(harness, "a", 100)
    await _later(harness, "b", 60_000)
    await harness.restart()
    harness.clock.now += 1_000
    await harness.restart()
    await _tick(harness, 0)
    assert await harness.values() == ["a"]
    await _tick(harness, 60_000)
    assert await harness.values() == ["a", "b"]


async def test_an_id_is_not_given_again_after_a_restart(harness: Harness) -> None:
    ids = {await _later(harness, "a", 10)}
    for _ in range(3):
        await _tick(harness, 10)
        await harness.engine.maintain()
        await harness.crash()
        ids.add(await _later(harness, "a", 10))
    assert len(ids) == 4


async def test_a_deleted_topic_takes_its_messages_along(harness: Harness) -> None:
    await _later(harness, "a", 100)
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    assert harness.broker.delayed(ANN) == []
    await _tick(harness, 200)
    assert await harness.values() == []


async def test_a_topic_lost_in_a_crash_takes_its_messages_along(harness: Harness) -> None:
    await _later(harness, "a", 100)
    await harness.engine.delete_topic("t")
    await harness.crash()
    assert harness.broker.delayed(ANN) == []


async def test_what_cannot_be_scheduled_is_refused(harness: Harness) -> None:
    broker = harness.broker
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
    harness = Harness(BrokerSettings(delayed_max=2, delayed_bytes_max=3_000))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await _later(harness, "x" * 2_000, 100)
    with pytest.raises(LimitExceeded, match="3000 bytes"):
        await _later(harness, "x" * 2_000, 100)
    await _later(harness, "b", 100)
    with pytest.raises(LimitExceeded, match="2 delayed"):
        await _later(harness, "c", 100)
    await harness.crash()
    with pytest.raises(LimitExceeded, match="2 delayed"):
        await _later(harness, "c", 100)
    await _tick(harness, 100)
    harness.engine.error = DiskFull("full")
    for _ in range(5):
        with pytest.raises(DiskFull):
            await _later(harness, "x" * 2_000, 100)
    harness.engine.error = None
    await _later(harness, "x" * 2_000, 100)
    await _later(harness, "e", 100)
    await harness.broker.close()


async def test_after_the_drain_nothing_is_delivered(harness: Harness) -> None:
    await _later(harness, "a", 100)
    await harness.broker.close()
    await _tick(harness, 500)
    assert await harness.values() == []
    await harness.crash()
    await _tick(harness, 0)
    assert await harness.values() == ["a"]


_STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(-10, 300)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(0, 400)),
    st.tuples(st.sampled_from(["crash", "restart", "full", "room", "maintain"]), st.just(0)),
)


@settings(max_examples=60)
@given(st.lists(_STEP, max_size=40))
async def test_whatever_happens_none_is_early_lost_or_twice(steps: list[tuple[str, int]]) -> None:
    harness = Harness()
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    due: dict[str, int] = {}
    ids: list[tuple[str, str]] = []
    cancelled: set[str] = set()
    for step, number in steps:
        if step == "publish":
            value = f"m{len(ids)}"
            try:
                id, at = await harness.broker.publish_delayed(ANN, "t", value.encode(), delay_ms=number)
            except DiskFull:
                continue
            due[value] = at
            ids.append((value, id))
        elif step == "cancel" and ids:
            value, id = ids[number % len(ids)]
            try:
                await harness.broker.cancel_delayed(ANN, id)
                cancelled.add(value)
            except (UnknownMessage, DiskFull):
                pass
        elif step == "tick":
            await _tick(harness, number)
        elif step == "crash":
            await turns()
            await harness.crash()
        elif step == "restart":
            await harness.restart()
        elif step == "maintain":
            await harness.engine.maintain()
        else:
            harness.engine.error = DiskFull("full") if step == "full" else None
    harness.engine.error = None
    for _ in range(4):
        await _tick(harness, 1_000)
    records = await harness.records()
    assert all(record.timestamp >= due[(record.value or b"").decode()] for record in records)
    assert sorted((record.value or b"").decode() for record in records) == sorted(set(due) - cancelled)
    await harness.broker.close()


async def test_on_disk_and_by_the_real_clock_it_comes_within_50_ms(tmp_path: Path) -> None:
    def clock() -> int:
        return time.time_ns() // 1_000_000

    broker = Broker(EmbeddedEngine(DiskFiles(tmp_path), clock=clock), clock=clock, random_bytes=os.urandom)
    await broker.open()
    await broker.create_topic(ANN, "t")
    dues = dict([await broker.publish_delayed(ANN, "t", b"%d" % number, delay_ms=20 * number) for number in range(20)])
    times: list[int] = []
    async with asyncio.timeout(300):
        while len(times) < 20:
            fetched = await broker.fetch(ANN, "t", 0, len(times), bytes_max=1 << 20, wait_ms=1_000)
            times += (at for batch in fetched.batches for at in batch.timestamps())
    late = [at - due for at, due in zip(times, dues.values(), strict=True)]
    assert min(late) >= 0
    assert sorted(late)[10] < 50, "the median: a busy machine may delay single ones"
    await broker.close()


@pytest.mark.replaces_code
async def test_a_topic_that_cannot_take_its_messages_keeps_no_other_waiting(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.broker.create_topic(ANN, "stuck")
    for topic in ("stuck", "t", "stuck"):
        await _later(harness, topic, 100, topic)
    find = harness.broker._publisher.own_route

    def route(topic: str) -> Route:
        if topic == "stuck":
            raise Unavailable("its schema is missing")
        return find(topic)

    monkeypatch.setattr(harness.broker._publisher, "own_route", route)
    await _tick(harness, 100)
    assert (await harness.values("t"), await harness.values("stuck")) == (["t"], [])
    appends = harness.engine.appends
    await _tick(harness, 10_000)
    assert harness.engine.appends == appends, "an empty append is not written"
    monkeypatch.undo()
    await _tick(harness, 1_000)
    assert await harness.values("stuck") == ["stuck", "stuck"]
