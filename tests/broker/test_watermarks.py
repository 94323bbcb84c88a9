"""Waits for end offsets: woken only by relevant changes, and never forever."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.errors import Unavailable, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


async def test_what_has_moved_already_is_answered_at_once(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.put("a", partition=0)
    timers = harness.clock.running
    assert await harness.broker.wait_for_growth(ANN, {"t": {0: 0, 1: 0}}, 1_000)
    assert await harness.broker.wait_for_growth(ANN, {"t": {0: 1}}, 1_000), "partition 1 is not known"
    assert not await harness.broker.wait_for_growth(ANN, {"t": {0: 1, 1: 0}}, 0)
    assert harness.clock.running == timers


async def test_a_record_in_any_topic_ends_the_wait(harness: Harness) -> None:
    for topic in ("a", "b"):
        await harness.broker.create_topic(ANN, topic, partitions=3)
    known = {topic: dict.fromkeys(range(3), 0) for topic in ("a", "b")}
    timers = harness.clock.running
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, known, 1_000))
    await turns()
    assert not waiting.done()
    await harness.broker.publish(ANN, "b", RecordBatch([b"x"]), partition=2)
    assert await waiting
    assert harness.clock.running == timers


async def test_the_time_ends_the_wait(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    harness.clock.tick(999)
    await turns()
    assert not waiting.done()
    harness.clock.tick(1)
    assert not await waiting


async def test_a_wait_for_more_than_there_is_continues_through_records_below_it(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"t": {0: 2}}, 1_000))
    for _ in range(2):
        await harness.put("a")
        await turns()
        assert not waiting.done()
    await harness.put("a")
    assert await waiting


async def test_a_new_partition_ends_the_wait(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    await harness.broker.alter_topic(ANN, "t", partitions=2)
    assert await waiting


async def test_a_topic_that_goes_ends_the_wait_with_an_error(harness: Harness) -> None:
    for topic in ("stays", "goes"):
        await harness.broker.create_topic(ANN, topic)
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"stays": {0: 0}, "goes": {0: 0}}, 1_000))
    await turns()
    await harness.broker.delete_topic(ANN, "goes")
    with pytest.raises(UnknownTopic):
        await waiting
    with pytest.raises(UnknownTopic):
        await harness.broker.wait_for_growth(ANN, {"goes": {}}, 1_000)


async def test_a_drain_answers_those_who_wait(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    await harness.broker.close()
    assert not await waiting


async def test_one_waiter_too_many_gets_an_error() -> None:
    harness = Harness(BrokerSettings(waiting_fetches_max=1))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    with pytest.raises(Unavailable, match="1 callers are waiting already"):
        await harness.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000)
    waiting.cancel()
    await turns()
    again = asyncio.ensure_future(harness.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    assert not again.done(), "a cancelled caller makes room"
    await harness.broker.close()
    await again
