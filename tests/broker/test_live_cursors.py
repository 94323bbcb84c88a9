"""Cursors at the end of a partition share one read, and their receivers one encoding."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.reading.cursor import DELIVERED_BYTES_A_TURN, DELIVERIES_A_TURN, Cursor, Delivered
from headrace.engine.contract import Batch
from headrace.errors import BrokerError
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


@dataclass(eq=False)
class Receiver:
    offsets: list[int] = field(default_factory=list)
    received: list[Delivered] = field(default_factory=list)
    errors: list[BrokerError] = field(default_factory=list)

    def deliver(self, delivered: Delivered) -> None:
        assert delivered, "empty delivery"
        self.received.append(delivered)
        self.offsets += [offset for batch in delivered for offset in batch.offsets()]

    def start(self, harness: Harness, offset: int = 0, credit_bytes: int = 1_000_000) -> Cursor:
        return harness.broker.cursor(ANN, "t", 0, offset, self.deliver, credit_bytes=credit_bytes, failed=self.errors.append)


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


def started(harness: Harness, count: int) -> list[Receiver]:
    receivers = [Receiver() for _ in range(count)]
    for receiver in receivers:
        receiver.start(harness)
    return receivers


async def test_a_batch_is_read_and_encoded_once_for_all_subscribers(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers, reads, read = started(harness, 50), [], harness.engine.read

    async def counted(topic: str, partition: int, offset: int, **bounds: int) -> list[Batch]:
        reads.append(offset)
        return await read(topic, partition, offset, **bounds)

    monkeypatch.setattr(harness.engine, "read", counted)
    await harness.put("a")
    await turns()
    await harness.put("b")
    await turns()
    assert reads == [0, 1]
    assert all(receiver.offsets == [0, 1] for receiver in receivers)
    encode = Mock(return_value=b"frames")
    assert {receiver.received[0].encoded("form", encode) for receiver in receivers} == {b"frames"}
    assert encode.call_count == 1


async def most_a_turn(receivers: list[Receiver]) -> int:
    """Return the most deliveries of one turn of the loop, until every receiver has one record."""
    counts = [sum(len(receiver.offsets) for receiver in receivers)]
    while counts[-1] < len(receivers):
        await asyncio.sleep(0)
        counts.append(sum(len(receiver.offsets) for receiver in receivers))
    return max(after - before for before, after in itertools.pairwise(counts))


async def test_one_turn_of_the_loop_serves_a_bounded_number_of_subscribers(harness: Harness) -> None:
    receivers = started(harness, 3 * DELIVERIES_A_TURN)
    await harness.put("a")
    assert await most_a_turn(receivers) == DELIVERIES_A_TURN


async def test_one_turn_of_the_loop_delivers_a_bounded_number_of_bytes(harness: Harness) -> None:
    receivers = started(harness, 20)
    await harness.put("x" * (DELIVERED_BYTES_A_TURN // 2))
    assert await most_a_turn(receivers) == 2


async def test_a_subscriber_without_credit_does_not_hold_back_the_others(harness: Harness) -> None:
    poor, rich = Receiver(), Receiver()
    cursor = poor.start(harness, credit_bytes=5)
    rich.start(harness)
    for _ in range(3):
        await harness.put("x" * 10)
        await turns()
    assert (poor.offsets, rich.offsets) == ([0], [0, 1, 2])
    cursor.grant(1_000)
    await turns()
    await harness.put("y")
    await turns()
    assert poor.offsets == rich.offsets == [0, 1, 2, 3]
    assert poor.received[-1] is rich.received[-1], "with credit again it shares the deliveries"


async def test_a_receiver_may_grant_credit_while_it_is_served(harness: Harness) -> None:
    receiver = Receiver()

    def deliver(delivered: Delivered) -> None:
        receiver.deliver(delivered)
        cursor.grant(delivered.size_bytes)

    cursor = harness.broker.cursor(ANN, "t", 0, 0, deliver, credit_bytes=5)
    for _ in range(4):
        await harness.put("x" * 10)
        await turns()
        assert cursor.is_live
    assert receiver.offsets == [0, 1, 2, 3]


async def test_a_defect_of_one_receiver_ends_only_its_own_delivery(harness: Harness) -> None:
    errors: list[BrokerError] = []

    def broken(_delivered: Delivered) -> None:
        raise ValueError("a defect")

    before = Receiver()
    before.start(harness)
    harness.broker.cursor(ANN, "t", 0, 0, broken, credit_bytes=100, failed=errors.append)
    after = Receiver()
    after.start(harness)
    await harness.put("a")
    await turns()
    await harness.put("b")
    await turns()
    assert before.offsets == after.offsets == [0, 1]
    assert len(errors) == 1
    assert "a defect" in str(errors[0])


async def test_a_topic_of_the_same_name_has_its_own_cursors(harness: Harness) -> None:
    old, new = Receiver(), Receiver()
    old.start(harness)
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    new.start(harness)
    await harness.put("of the successor")
    await turns()
    assert (old.offsets, len(old.errors), new.offsets) == ([], 1, [0])


STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 6)),
    st.tuples(st.just("start"), st.integers(0, 80)),
    st.tuples(st.just("grant"), st.integers(0, 400)),
    st.tuples(st.just("close"), st.integers(0, 9)),
    st.tuples(st.just("turn"), st.integers(1, 5)),
)


@settings(max_examples=80)
@given(st.lists(STEPS, max_size=80))
def test_whoever_comes_and_goes_each_receives_every_record_once_in_order(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        harness = Harness()
        await harness.broker.open()
        await harness.broker.create_topic(ANN, "t")
        found: list[tuple[Receiver, Cursor, int]] = []
        published = 0
        for step, number in steps:
            if step == "put":
                harness.broker.publish(ANN, "t", RecordBatch([b"%20d" % index for index in range(number)]))
                published += number
            elif step == "start":
                receiver, end = Receiver(), harness.broker.bounds(ANN, "t", 0).end
                first = min(number, end)
                found.append((receiver, receiver.start(harness, first, credit_bytes=number), first))
            elif step == "turn":
                await turns(number)
            elif found:
                _, cursor, _ = found[number % len(found)]
                if step == "grant":
                    cursor.grant(number)
                else:
                    cursor.close()
                    del found[number % len(found)]
        for _, cursor, _ in found:
            cursor.grant(20 * published + 1_000)
        await turns()
        for receiver, _, first in found:
            assert receiver.offsets == list(range(first, published))
        await harness.broker.close()

    asyncio.run(run())
