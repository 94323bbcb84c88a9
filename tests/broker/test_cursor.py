from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import Cursor
from headrace.broker.reading.batches import STEP_RECORDS_MAX
from headrace.broker.reading.cursor import BATCHES_A_TURN
from headrace.engine.contract import Batch, Cleanup, TopicConfig
from headrace.errors import BrokerError, CorruptData, OffsetOutOfRange, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


class Receiver:
    """Collects what a cursor delivers."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.values: list[str] = []
        self.calls: list[int] = []
        self.errors: list[BrokerError] = []

    def deliver(self, batches: list[Batch]) -> None:
        assert batches, "empty delivery"
        for batch in batches:
            self.offsets += batch.offsets()
            self.values += ((value or b"").decode() for value in batch.values())
        self.calls.append(sum(map(len, batches)))

    def start(self, harness: Harness, offset: int = 0, credit_bytes: int = 1_000_000, topic: str = "t") -> Cursor:
        return harness.broker.cursor(ANN, topic, 0, offset, self.deliver, credit_bytes=credit_bytes, failed=self.errors.append)


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


def counted_reads(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each read of the engine adds its number of records."""
    reads: list[int] = []
    read = harness.engine.read

    async def counted(topic: str, partition: int, offset: int, **bounds: int) -> list[Batch]:
        batches = await read(topic, partition, offset, **bounds)
        reads.append(sum(map(len, batches)))
        return batches

    monkeypatch.setattr(harness.engine, "read", counted)
    return reads


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


async def test_history_comes_first_and_live_records_follow(harness: Harness, receiver: Receiver) -> None:
    await harness.put("a", "b", "c")
    cursor = receiver.start(harness, 1)
    await turns()
    await harness.put("d")
    await harness.put("e", "f")
    await turns()
    assert receiver.values == ["b", "c", "d", "e", "f"]
    assert receiver.offsets == [1, 2, 3, 4, 5]
    assert cursor.position == 6


async def test_nothing_is_delivered_inside_the_call_that_starts_the_cursor(harness: Harness, receiver: Receiver) -> None:
    await harness.put("a")
    receiver.start(harness)
    assert receiver.values == []


async def test_one_wake_is_one_read_and_one_delivery(harness: Harness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.start(harness)
    await turns()
    reads: list[int] = []
    read = harness.engine.read

    async def counted(topic: str, partition: int, offset: int, **bounds: int) -> list[Batch]:
        reads.append(offset)
        return await read(topic, partition, offset, **bounds)

    monkeypatch.setattr(harness.engine, "read", counted)
    await asyncio.gather(*(harness.put(f"{number}") for number in range(100)))
    await turns()
    assert reads == [0]
    assert receiver.calls == [100]


async def test_without_credit_nothing_comes_and_each_grant_brings_a_little(harness: Harness, receiver: Receiver) -> None:
    for number in range(6):
        await harness.put(f"{number}" * 10)
    cursor = receiver.start(harness, credit_bytes=0)
    await turns()
    assert receiver.calls == []
    cursor.grant(10)
    await turns()
    assert (receiver.calls, cursor.position) == ([1], 1)
    cursor.grant(15)
    await turns()
    assert (receiver.calls, cursor.position) == ([1, 2], 3)
    cursor.grant(5)
    await turns()
    assert receiver.calls == [1, 2], "the overdraft of the second delivery must be paid back first"
    cursor.grant(1)
    await turns()
    assert cursor.position == 4


async def test_a_batch_larger_than_the_credit_comes_whole(harness: Harness, receiver: Receiver) -> None:
    await harness.put("x" * 500_000, "y" * 500_000)
    receiver.start(harness, credit_bytes=1)
    await turns()
    assert receiver.calls[0] >= 1
    assert receiver.offsets[0] == 0


async def test_keys_spend_credit_too(harness: Harness, receiver: Receiver) -> None:
    for _ in range(3):
        await harness.broker.publish(ANN, "t", RecordBatch([b""], [b"k" * 10]))
    receiver.start(harness, credit_bytes=20)
    await turns()
    assert receiver.offsets == [0, 1]


async def test_after_close_nothing_comes(harness: Harness, receiver: Receiver) -> None:
    await harness.put("a")
    cursor = receiver.start(harness)
    cursor.close()
    cursor.close()
    await turns()
    await harness.put("b")
    cursor.grant(100)
    await turns()
    assert (receiver.values, receiver.errors) == ([], [])
    assert harness.engine._partitions["t"][0].watchers == {}


async def test_a_receiver_may_close_its_cursor_while_it_is_served(harness: Harness) -> None:
    for _ in range(3):
        await harness.put("x" * 300_000)
    seen: list[int] = []

    def deliver(batches: list[Batch]) -> None:
        seen.append(batches[0].first_offset)
        cursor.close()

    cursor = harness.broker.cursor(ANN, "t", 0, 0, deliver, credit_bytes=10_000_000)
    await turns()
    assert seen == [0]


async def test_a_cursor_starts_only_inside_the_log(harness: Harness, receiver: Receiver) -> None:
    await harness.put("a")
    for offset in (-1, 2):
        with pytest.raises(OffsetOutOfRange):
            receiver.start(harness, offset)
    receiver.start(harness, 1)


@pytest.mark.parametrize("credit", [0, 1_000])
async def test_when_the_topic_is_deleted_the_receiver_gets_one_error(harness: Harness, receiver: Receiver, credit: int) -> None:
    receiver.start(harness, credit_bytes=credit)
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    await harness.put("of the successor")
    await turns()
    assert [type(error) for error in receiver.errors] == [UnknownTopic]
    assert receiver.values == []


async def test_a_damaged_log_is_reported_and_ends_the_cursor(harness: Harness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> list[Batch]:
        raise CorruptData("segment 0: checksum")

    monkeypatch.setattr(harness.engine, "read", broken)
    await harness.put("a")
    receiver.start(harness)
    await turns()
    await harness.put("b")
    await turns()
    assert [type(error) for error in receiver.errors] == [CorruptData]


async def test_a_reader_that_retention_overtakes_continues_at_the_first_offset(harness: Harness, receiver: Receiver) -> None:
    await harness.broker.create_topic(ANN, "short", config=TopicConfig(retention_ms=10))
    await harness.put("old", "older", topic="short")
    cursor = receiver.start(harness, credit_bytes=0, topic="short")
    harness.clock.tick(100)
    await harness.put("new", topic="short")
    await harness.broker.maintain()
    cursor.grant(100)
    await turns()
    assert (receiver.offsets, receiver.values) == ([2], ["new"])


async def test_expired_records_and_gaps_are_passed_over(harness: Harness, receiver: Receiver) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT)
    await harness.broker.create_topic(ANN, "c", config=config)
    later = harness.clock.now + 10
    record_batch = RecordBatch([b"1", b"2", b"3", b"4"], [b"a", b"b", b"a", b"c"], expiries=[0, later, 0, 0])
    await harness.broker.publish(ANN, "c", record_batch)
    await harness.broker.maintain()
    harness.clock.tick(10)
    cursor = receiver.start(harness, topic="c")
    await turns()
    assert receiver.offsets == [2, 3]
    assert cursor.position == 4


async def test_one_turn_of_the_loop_delivers_a_bounded_number_of_batches(harness: Harness, receiver: Receiver) -> None:
    count = 4 * BATCHES_A_TURN
    later = harness.clock.now + 10
    await harness.broker.publish(ANN, "t", RecordBatch([b"v"] * 2 * count, expiries=[later, 0] * count))
    harness.clock.tick(10)
    receiver.start(harness)
    delivered = [0]
    while delivered[-1] < count:
        await asyncio.sleep(0)
        delivered.append(len(receiver.offsets))
    assert max(after - before for before, after in itertools.pairwise(delivered)) == BATCHES_A_TURN
    assert receiver.offsets == list(range(1, 2 * count, 2))


async def test_a_million_expired_records_are_skipped_over_many_turns(
    harness: Harness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, expired = counted_reads(harness, monkeypatch), 6 * STEP_RECORDS_MAX
    await harness.broker.publish(ANN, "t", RecordBatch([b""] * expired, expiries=[harness.clock.now + 10] * expired))
    await harness.put("alive")
    harness.clock.tick(10)
    receiver.start(harness)
    while not receiver.values:
        await asyncio.sleep(0)
        reads.append(0)
    assert max(len(list(group)) for is_read, group in itertools.groupby(reads, bool) if is_read) == 1, "two reads in one turn"
    assert max(reads) <= STEP_RECORDS_MAX and sum(map(bool, reads)) >= 6


async def test_where_compaction_left_nothing_a_cursor_waits_and_does_not_spin(harness: Harness, receiver: Receiver) -> None:
    await harness.broker.create_topic(ANN, "c", config=TopicConfig(cleanup=Cleanup.COMPACT, tombstone_retention_ms=1))
    await harness.broker.publish(ANN, "c", RecordBatch([b"1", None], [b"k", b"k"]))
    harness.clock.tick(10)
    await harness.broker.maintain()
    cursor = receiver.start(harness, topic="c")
    await turns()
    assert (receiver.calls, cursor.position) == ([], 2)
    await harness.broker.publish(ANN, "c", RecordBatch([b"2"], [b"k"]))
    await turns()
    assert receiver.offsets == [2]


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 6)),
            st.tuples(st.just("grant"), st.integers(1, 200)),
            st.tuples(st.just("turn"), st.integers(1, 5)),
        ),
        max_size=60,
    ),
    st.integers(0, 300),
)
def test_however_credit_and_records_come_every_record_comes_once_in_order(steps: list[tuple[str, int]], credit: int) -> None:
    async def run() -> None:
        harness, receiver = Harness(), Receiver()
        await harness.broker.open()
        await harness.broker.create_topic(ANN, "t")
        granted, published = credit, 0
        cursor = receiver.start(harness, credit_bytes=credit)
        for step, count in steps:
            if step == "put":
                harness.broker.publish(ANN, "t", RecordBatch([b"%20d" % (published + index) for index in range(count)]))
                published += count
            elif step == "grant":
                cursor.grant(count)
                granted += count
            else:
                await turns(count)
            assert receiver.offsets == list(range(len(receiver.offsets)))
            assert 20 * len(receiver.offsets) < granted + 20 * 6 or not receiver.offsets, "overdrawn by more than a batch"
        await turns()
        assert 20 * len(receiver.offsets) >= min(granted, 20 * published), "no delivery in spite of credit and records"
        cursor.grant(20 * published + 1)
        await turns()
        assert receiver.values == [f"{number:20d}" for number in range(published)]
        await harness.broker.close()

    asyncio.run(run())
