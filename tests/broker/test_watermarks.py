"""Waiting for ends to move: woken by what matters and by nothing else, and never for ever."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.errors import Unavailable, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.stand import ANN, Stand, turns


async def test_what_has_moved_already_is_answered_at_once(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t", partitions=2)
    await stand.put("a", partition=0)
    timers = stand.clock.running
    assert await stand.broker.wait_for_growth(ANN, {"t": {0: 0, 1: 0}}, 1_000)
    assert await stand.broker.wait_for_growth(ANN, {"t": {0: 1}}, 1_000), "partition 1 is not known"
    assert not await stand.broker.wait_for_growth(ANN, {"t": {0: 1, 1: 0}}, 0)
    assert stand.clock.running == timers


async def test_a_record_in_any_topic_ends_the_wait(stand: Stand) -> None:
    for topic in ("a", "b"):
        await stand.broker.create_topic(ANN, topic, partitions=3)
    known = {topic: dict.fromkeys(range(3), 0) for topic in ("a", "b")}
    timers = stand.clock.running
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, known, 1_000))
    await turns()
    assert not waiting.done()
    await stand.broker.publish(ANN, "b", RecordBatch([b"x"]), partition=2)
    assert await waiting
    assert stand.clock.running == timers


async def test_the_time_ends_the_wait(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    stand.clock.tick(999)
    await turns()
    assert not waiting.done()
    stand.clock.tick(1)
    assert not await waiting


async def test_a_wait_for_more_than_there_is_goes_on_through_records_below_it(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"t": {0: 2}}, 1_000))
    for _ in range(2):
        await stand.put("a")
        await turns()
        assert not waiting.done()
    await stand.put("a")
    assert await waiting


async def test_a_new_partition_ends_the_wait(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    await stand.broker.alter_topic(ANN, "t", partitions=2)
    assert await waiting


async def test_a_topic_that_goes_ends_the_wait_with_an_error(stand: Stand) -> None:
    for topic in ("stays", "goes"):
        await stand.broker.create_topic(ANN, topic)
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"stays": {0: 0}, "goes": {0: 0}}, 1_000))
    await turns()
    await stand.broker.delete_topic(ANN, "goes")
    with pytest.raises(UnknownTopic):
        await waiting
    with pytest.raises(UnknownTopic):
        await stand.broker.wait_for_growth(ANN, {"goes": {}}, 1_000)


async def test_a_drain_answers_those_who_wait(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    await stand.broker.close()
    assert not await waiting


async def test_one_waiter_too_many_is_told_so() -> None:
    stand = Stand(BrokerSettings(waiting_fetches_max=1))
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    waiting = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    with pytest.raises(Unavailable, match="1 callers are waiting already"):
        await stand.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000)
    waiting.cancel()
    await turns()
    again = asyncio.ensure_future(stand.broker.wait_for_growth(ANN, {"t": {0: 0}}, 1_000))
    await turns()
    assert not again.done(), "whoever gives up makes room"
    await stand.broker.close()
    await again
