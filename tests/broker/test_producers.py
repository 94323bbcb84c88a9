from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import BrokerSettings, ProducerStamp, Published
from headrace.errors import BrokerError, DiskFull, InvalidRequest, LimitExceeded, OutOfSequence, UnknownPartition
from headrace.limits import PRODUCER_BATCHES_REMEMBERED
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


def _send(harness: Harness, first: int, last: int, *, producer: str = "p", partition: int | None = 0) -> asyncio.Future[Published]:
    """Return records that contain their own sequence numbers, from `first` to `last` inclusive."""
    batch = RecordBatch([b"%d" % number for number in range(first, last + 1)])
    return harness.broker.publish(ANN, "t", batch, partition=partition, producer=ProducerStamp(producer, first))


@pytest.fixture
async def harness() -> Harness:
    harness = Harness()
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    return harness


async def test_a_resend_is_answered_with_the_original_offsets(harness: Harness) -> None:
    await harness.put("before")
    original = await _send(harness, 0, 2)
    harness.clock.tick(1_000)
    assert await _send(harness, 0, 2) == original == Published(0, 1, 3, harness.clock.now - 1_000)
    assert await harness.values() == ["before", "0", "1", "2"]


async def test_a_resend_of_a_batch_in_flight_waits_for_that_batch(harness: Harness) -> None:
    original, resend = _send(harness, 0, 2), _send(harness, 0, 2)
    assert await resend == await original
    assert await harness.values() == ["0", "1", "2"]


async def test_giving_up_on_one_of_them_does_not_harm_the_other(harness: Harness) -> None:
    original, resend = _send(harness, 0, 2), _send(harness, 0, 2)
    original.cancel()
    assert (await resend).base_offset == 0


async def test_a_resend_may_be_cut_in_another_way(harness: Harness) -> None:
    await _send(harness, 0, 2)
    await harness.put("between")
    await _send(harness, 3, 5)
    assert await _send(harness, 1, 1) == Published(0, 1, 1, harness.clock.now)
    joined = await _send(harness, 1, 4)
    assert [joined.placement(index) for index in range(joined.count)] == [(0, 1), (0, 2), (0, 4), (0, 5)]
    assert len(await harness.values()) == 7


async def test_of_a_resend_with_new_records_only_the_new_part_is_appended(harness: Harness) -> None:
    first = _send(harness, 0, 2)
    longer = _send(harness, 1, 4)
    assert await longer == Published(0, 1, 4, harness.clock.now)
    assert await first == Published(0, 0, 3, harness.clock.now)
    assert await harness.values() == ["0", "1", "2", "3", "4"]


async def test_a_gap_is_refused_and_says_what_was_expected(harness: Harness) -> None:
    await _send(harness, 0, 2)
    with pytest.raises(OutOfSequence) as caught:
        _send(harness, 4, 5)
    assert (caught.value.producer, caught.value.wanted, caught.value.got) == ("p", 3, 4)
    await _send(harness, 3, 5)
    assert await harness.values() == ["0", "1", "2", "3", "4", "5"]


async def test_so_many_batches_are_remembered_and_no_more(harness: Harness) -> None:
    for number in range(PRODUCER_BATCHES_REMEMBERED + 1):
        await _send(harness, number, number)
    with pytest.raises(OutOfSequence):
        _send(harness, 0, 0)
    for number in range(1, PRODUCER_BATCHES_REMEMBERED + 1):
        assert (await _send(harness, number, number)).base_offset == number


async def test_a_new_producer_may_start_at_any_number(harness: Harness) -> None:
    await _send(harness, 1_000, 1_001)
    await _send(harness, 1_002, 1_002)
    assert await harness.values() == ["1000", "1001", "1002"]


async def test_producers_and_partitions_count_on_their_own(harness: Harness) -> None:
    await harness.broker.alter_topic(ANN, "t", partitions=2)
    for producer in ("p", "q"):
        for partition in (0, 1):
            await _send(harness, 0, 1, producer=producer, partition=partition)
            await _send(harness, 0, 1, producer=producer, partition=partition)
    assert [len(await harness.values("t", partition)) for partition in (0, 1)] == [4, 4]


async def test_where_the_broker_chooses_the_partition_the_whole_topic_is_one_count(harness: Harness) -> None:
    await harness.broker.alter_topic(ANN, "t", partitions=3)
    first, second = await _send(harness, 0, 1, partition=None), await _send(harness, 2, 3, partition=None)
    assert first.partition != second.partition
    assert await _send(harness, 0, 1, partition=None) == first
    both = await _send(harness, 0, 3, partition=None)
    assert [both.placement(index)[0] for index in range(4)] == [first.partition] * 2 + [second.partition] * 2


async def test_a_spread_batch_is_remembered_record_by_record(harness: Harness) -> None:
    await harness.broker.alter_topic(ANN, "t", partitions=4)
    batch = RecordBatch([b"%d" % number for number in range(20)], [b"k%d" % number for number in range(20)])
    original = await harness.broker.publish(ANN, "t", batch, producer=ProducerStamp("p", 0))
    assert original.placements is not None
    await harness.crash()
    assert await harness.broker.publish(ANN, "t", batch, producer=ProducerStamp("p", 0)) == original
    part = await harness.broker.publish(ANN, "t", batch[5:9], producer=ProducerStamp("p", 5))
    assert [part.placement(index) for index in range(4)] == original.placements[5:9]
    assert sum([len(await harness.values("t", partition)) for partition in range(4)]) == 20


async def test_memory_survives_a_crash(harness: Harness) -> None:
    originals = [await _send(harness, 10 * number, 10 * number + 9) for number in range(8)]
    for _ in range(2):
        await harness.crash()
        for number in range(8 - PRODUCER_BATCHES_REMEMBERED, 8):
            assert await _send(harness, 10 * number, 10 * number + 9) == originals[number]
        with pytest.raises(OutOfSequence):
            _send(harness, 20, 29)
        with pytest.raises(OutOfSequence):
            _send(harness, 81, 90)
    await _send(harness, 80, 89)
    assert await harness.values() == [str(number) for number in range(90)]


async def test_memory_survives_compaction_of_its_table(harness: Harness) -> None:
    originals = [await _send(harness, number, number) for number in range(12)]
    harness.clock.tick(10**8)
    await harness.engine.maintain()
    assert len(await harness.records("__producers")) == PRODUCER_BATCHES_REMEMBERED
    await harness.crash()
    assert await _send(harness, 11, 11) == originals[11]
    assert await _send(harness, 7, 7) == originals[7]


async def test_records_and_memory_are_one_append(harness: Harness) -> None:
    before = harness.engine.appends
    await _send(harness, 0, 2)
    assert harness.engine.appends == before + 1


async def test_after_a_full_disk_the_same_batch_may_be_sent_again(harness: Harness) -> None:
    await _send(harness, 0, 1)
    harness.engine.error = DiskFull("full")
    failing = [_send(harness, 2, 3), _send(harness, 4, 5), _send(harness, 2, 3)]
    for future in failing:
        with pytest.raises(DiskFull):
            await future
    harness.engine.error = None
    await _send(harness, 2, 3)
    await _send(harness, 4, 5)
    assert await harness.values() == ["0", "1", "2", "3", "4", "5"]
    await harness.crash()
    assert (await _send(harness, 4, 5)).base_offset == 4


async def test_a_producer_whose_first_batch_failed_is_unknown_again(harness: Harness) -> None:
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await _send(harness, 7, 8)
    harness.engine.error = None
    await _send(harness, 0, 1)
    assert await harness.values() == ["0", "1"]


async def test_a_failed_batch_is_not_appended_after_its_successor(harness: Harness) -> None:
    await _send(harness, 0, 0)
    harness.engine.error = DiskFull("full")
    failing = _send(harness, 1, 1)
    harness.engine.error = None
    await _send(harness, 2, 2)
    with pytest.raises(DiskFull):
        await failing
    with pytest.raises(OutOfSequence):
        _send(harness, 1, 1)
    assert await harness.values() == ["0", "2"]


async def test_what_is_refused_at_once_is_not_counted(harness: Harness) -> None:
    with pytest.raises(UnknownPartition):
        _send(harness, 0, 0, partition=9)
    with pytest.raises(InvalidRequest):
        harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", -1))
    with pytest.raises(InvalidRequest):
        harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("", 0))
    await _send(harness, 5, 5)
    with pytest.raises(InvalidRequest):
        harness.broker.publish(ANN, "t", RecordBatch([]), producer=ProducerStamp("p", 6))
    await _send(harness, 6, 6)


async def test_a_silent_producer_is_forgotten_for_good() -> None:
    harness = Harness(BrokerSettings(producer_idle_ms=1_000, expire_every_ms=100))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await _send(harness, 0, 0, producer="silent")
    for number in range(12):
        await _send(harness, number, number, producer="busy")
        harness.clock.tick(100)
        await turns()
    with pytest.raises(OutOfSequence):
        _send(harness, 0, 0, producer="busy")
    await harness.crash()
    assert (await _send(harness, 0, 0, producer="silent")).base_offset == 13
    assert (await _send(harness, 11, 11, producer="busy")).base_offset == 12
    await harness.broker.close()


async def test_a_producer_the_log_refused_to_forget_is_remembered_whole(harness: Harness) -> None:
    for number in range(3):
        await _send(harness, 100 + number, 100 + number)
    harness.clock.tick(harness.settings.producer_idle_ms + 1)
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await harness.broker.maintain()
    harness.engine.error = None
    with pytest.raises(OutOfSequence):
        _send(harness, 0, 0)
    await _send(harness, 103, 103)
    await harness.crash()
    assert (await _send(harness, 103, 103)).base_offset == 3


async def test_only_so_many_producers_are_remembered() -> None:
    harness = Harness(BrokerSettings(producers_max=2))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await _send(harness, 0, 0, producer="a")
    await _send(harness, 0, 0, producer="b")
    with pytest.raises(LimitExceeded):
        _send(harness, 0, 0, producer="c")
    await _send(harness, 1, 1, producer="a")
    await harness.broker.close()


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "send", "send", "resend", "turn", "crash", "fail"]), st.integers(0, 12), st.integers(1, 5)),
        max_size=40,
    )
)
def test_against_a_model_every_record_lands_once_and_in_order(steps: list[tuple[str, int, int]]) -> None:
    """Model: sequence n of the producer is in the log once, after n - 1, at the offset in every answer."""

    async def run() -> None:
        harness = Harness()
        await harness.broker.open()
        await harness.broker.create_topic(ANN, "t")
        sent = 0
        answers: list[tuple[int, asyncio.Future[Published]]] = []

        async def calm() -> None:
            """Wait for all answers. A client resends what failed, so the count returns to the first failure."""
            nonlocal sent
            for first, answer in answers:
                try:
                    published = await answer
                except BrokerError:
                    sent = min(sent, first)
                    continue
                logged = await harness.values()
                for index in range(published.count):
                    assert logged[published.placement(index)[1]] == str(first + index)
            answers.clear()

        for step, back, count in steps:
            if step == "send":
                answers.append((sent, _send(harness, sent, sent + count - 1)))
                sent += count
            elif step == "resend" and sent:
                first = max(0, sent - back - 1)
                try:
                    answers.append((first, _send(harness, first, first + count - 1)))
                    sent = max(sent, first + count)
                except OutOfSequence:
                    assert back >= PRODUCER_BATCHES_REMEMBERED, "at least one record per batch is remembered"
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                await calm()
                if step == "crash":
                    await harness.crash()
                else:
                    harness.engine.error = DiskFull("full")
                    answers.append((sent, _send(harness, sent, sent + count - 1)))
                    await calm()
                    harness.engine.error = None
        await calm()
        assert await harness.values() == [str(number) for number in range(sent)]
        await harness.broker.close()

    asyncio.run(run())
