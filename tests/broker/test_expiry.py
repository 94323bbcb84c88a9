"""A topic's time to live, on every publish path and every read path."""

from __future__ import annotations

import pytest

from headrace.broker import Batch, ProducerStamp, SettlementPolicy, TopicConfig
from headrace.errors import InvalidRequest
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", config=TopicConfig(ttl_ms=1_000))
    return harness


async def _fetched(harness: Harness) -> list[bytes | None]:
    fetched = await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1 << 20)
    return [value for batch in fetched.batches for value in batch.values()]


async def test_every_way_in_gives_the_topics_time_to_live(harness: Harness) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"plain"]))
    await harness.broker.publish(ANN, "t", RecordBatch([b"stamped"]), producer=ProducerStamp("p", 0))
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", RecordBatch([b"transaction"]))
    await transaction.commit()
    await harness.broker.publish_delayed(ANN, "t", b"delayed", delay_ms=0)
    harness.clock.tick(0)
    await turns()
    assert {record.value: record.expiry - harness.clock.now for record in await harness.records()} == {
        b"plain": 1_000,
        b"stamped": 1_000,
        b"transaction": 1_000,
        b"delayed": 1_000,
    }


async def test_a_records_own_time_goes_before_the_topics(harness: Harness) -> None:
    now = harness.clock.now
    await harness.broker.publish(ANN, "t", RecordBatch([b"own", b"topic's"], expiries=[now + 9_000, 0]))
    assert [record.expiry for record in await harness.records()] == [now + 9_000, now + 1_000]


async def test_a_change_of_the_time_to_live_is_for_what_comes_after_it(harness: Harness) -> None:
    await harness.put("before")
    await harness.broker.alter_topic(ANN, "t", config=TopicConfig(ttl_ms=0))
    await harness.put("after")
    assert [record.expiry for record in await harness.records()] == [harness.clock.now + 1_000, 0]


async def test_no_way_out_shows_what_has_expired(harness: Harness) -> None:
    await harness.put("gone")
    delivered: list[bytes | None] = []

    def deliver(batches: list[Batch]) -> None:
        delivered.extend(value for batch in batches for value in batch.values())

    queue = harness.broker.join(ANN, "g", "t", policy=SettlementPolicy(backoff_ms=0), start="earliest")
    again = await queue.take(1)
    assert [one.value for one in again] == [b"gone"]
    harness.clock.tick(1_000)
    await harness.put("kept")
    assert await _fetched(harness) == [b"kept"]
    harness.broker.cursor(ANN, "t", 0, 0, deliver, credit_bytes=1 << 20)
    await turns()
    assert delivered == [b"kept"]
    queue.nack([again[0].id])
    assert [one.value for one in await queue.take(10)] == [b"kept"], "an expired record is not redelivered"


async def test_a_time_that_cannot_be_is_refused(harness: Harness) -> None:
    with pytest.raises(InvalidRequest, match="ttl_ms cannot be -1"):
        await harness.broker.create_topic(ANN, "u", config=TopicConfig(ttl_ms=-1))
    with pytest.raises(InvalidRequest, match="segment_bytes cannot be 0"):
        await harness.broker.alter_topic(ANN, "t", config=TopicConfig(segment_bytes=0))
