"""Closing: no staged record is lost, and no caller keeps waiting."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import SettlementPolicy
from headrace.engine.contract import Batch
from headrace.errors import InvalidTransaction, Unavailable
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


async def test_what_is_staged_is_waited_for_and_what_is_new_is_refused(harness: Harness) -> None:
    harness.engine.hold()
    staged = harness.broker.publish(ANN, "t", RecordBatch([b"a"]))
    closing = asyncio.ensure_future(harness.broker.close())
    await turns()
    assert not closing.done()
    with pytest.raises(Unavailable):
        harness.broker.publish(ANN, "t", RecordBatch([b"b"]))
    harness.engine.let_go()
    await closing
    assert (await staged).base_offset == 0
    assert await harness.values() == ["a"]


async def test_everything_that_writes_is_refused_while_draining(harness: Harness) -> None:
    broker = harness.broker
    transaction = broker.begin(ANN)
    await broker.close()
    with pytest.raises(Unavailable):
        broker.begin(ANN)
    with pytest.raises(InvalidTransaction):
        await transaction.commit()
    with pytest.raises(Unavailable):
        await broker.create_topic(ANN, "u")
    with pytest.raises(Unavailable):
        await broker.ensure_topic(ANN, "u")
    with pytest.raises(Unavailable):
        broker.join(ANN, "g", "t", policy=SettlementPolicy())
    with pytest.raises(Unavailable):
        broker.cursor(ANN, "t", 0, 0, lambda _: None, credit_bytes=1)


async def test_long_polls_end_at_once(harness: Harness) -> None:
    fetching = asyncio.ensure_future(harness.broker.fetch(ANN, "t", 0, 0, bytes_max=10, wait_ms=60_000))
    queue = harness.broker.join(ANN, "g", "t", policy=SettlementPolicy())
    taking = asyncio.ensure_future(queue.take(1, wait_ms=60_000))
    await turns()
    await harness.broker.close()
    assert (await fetching).batches == []
    assert await taking == []


async def test_cursors_fall_silent(harness: Harness) -> None:
    delivered: list[list[Batch]] = []
    harness.broker.cursor(ANN, "t", 0, 0, delivered.append, credit_bytes=100)
    await turns()
    closing = asyncio.ensure_future(harness.broker.close())
    staged = harness.broker.publish(ANN, "t", RecordBatch([b"late"]))
    await closing
    await staged
    await turns()
    assert delivered == []


async def test_settlement_progress_is_committed(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    queue = harness.broker.join(ANN, "g", "t", policy=SettlementPolicy(), start="earliest")
    first, *_ = await queue.take(10)
    queue.ack([first.id])
    await harness.restart()
    assert harness.broker.committed(ANN, "g", "t", 0) == 1


async def test_no_timer_is_left(harness: Harness) -> None:
    await harness.put("a", "b")
    queue = harness.broker.join(ANN, "g", "t", policy=SettlementPolicy(), start="earliest")
    taken = await queue.take(10)
    queue.nack([taken[0].id])
    harness.broker.begin(ANN)
    fetching = asyncio.ensure_future(harness.broker.fetch(ANN, "t", 0, 2, bytes_max=10, wait_ms=60_000))
    await turns()
    await harness.broker.close()
    await fetching
    assert harness.clock.running == 0


async def test_closing_twice_is_closing_once(harness: Harness) -> None:
    await asyncio.gather(harness.broker.close(), harness.broker.close())
    await harness.broker.close()
