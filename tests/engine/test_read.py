"""Reading: from an offset, from a time, at the tail."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import OffsetOutOfRange, UnknownPartition, UnknownTopic
from headrace.limits import READ_BATCHES_MAX
from headrace.records import RecordBatch
from tests.engine.subjects import Subject, within

LOTS = 1 << 30


async def test_a_read_starts_at_its_offset_even_inside_a_batch(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a", "b", "c", "d")
    for offset in range(4):
        batches = await subject.engine.read("t", 0, offset, bytes_max=LOTS)
        assert batches[0].first_offset == offset
        assert [value for batch in batches for value in batch.values()] == [b"a", b"b", b"c", b"d"][offset:]


async def test_a_read_at_the_end_is_empty(subject: Subject) -> None:
    await subject.topic()
    assert await subject.engine.read("t", 0, 0, bytes_max=LOTS) == []
    await subject.put("a")
    assert await subject.engine.read("t", 0, 1, bytes_max=LOTS) == []


async def test_a_read_above_the_end_is_out_of_range(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a")
    with pytest.raises(OffsetOutOfRange) as caught:
        await subject.engine.read("t", 0, 2, bytes_max=LOTS)
    assert (caught.value.wanted, caught.value.first, caught.value.end) == (2, 0, 1)


async def test_a_read_below_the_first_offset_is_out_of_range(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a")
    with pytest.raises(OffsetOutOfRange):
        await subject.engine.read("t", 0, -1, bytes_max=LOTS)


async def test_records_max_is_kept_across_batches(subject: Subject) -> None:
    await subject.topic()
    for number in range(4):
        await subject.put(*(f"{number}{letter}" for letter in "abc"))
    for records_max in range(1, 13):
        batches = await subject.engine.read("t", 0, 0, bytes_max=LOTS, records_max=records_max)
        assert sum(map(len, batches)) == records_max
        assert batches[-1].next_offset == records_max


async def test_small_reads_end_to_end_give_everything_once(subject: Subject) -> None:
    await subject.topic()
    for number in range(10):
        await subject.put(*(f"value {number}.{index}" for index in range(7)))
    position, values = 0, list[bytes | None]()
    while batches := await subject.engine.read("t", 0, position, bytes_max=50):
        for batch in batches:
            assert batch.first_offset == position
            values += batch.values()
            position = batch.next_offset
    assert values == [f"value {number}.{index}".encode() for number in range(10) for index in range(7)]


async def test_bytes_max_bounds_a_read(subject: Subject) -> None:
    await subject.topic()
    for _ in range(20):
        await subject.append(RecordBatch([bytes(1_000)] * 5))
    batches = await subject.engine.read("t", 0, 0, bytes_max=10_000)
    assert 1_000 <= sum(sum(batch.value_sizes()) for batch in batches) <= 10_000


async def test_a_read_of_tiny_batches_ends_early_and_goes_on_without_a_gap(subject: Subject) -> None:
    await subject.topic()
    count = 2 * READ_BATCHES_MAX + 10
    for number in range(count):
        await subject.put(str(number))
    offset, values = 0, []
    while offset < count:
        batches = await subject.engine.read("t", 0, offset, bytes_max=LOTS)
        if isinstance(subject.engine, EmbeddedEngine):
            assert len(batches) <= 2 * READ_BATCHES_MAX
        offset = batches[-1].next_offset
        values += [value for batch in batches for value in batch.values()]
    assert values == [b"%d" % number for number in range(count)]


async def test_one_record_comes_however_large(subject: Subject) -> None:
    await subject.topic()
    await subject.append(RecordBatch([b"x" * 3_000_000, b"y"]))
    batches = await subject.engine.read("t", 0, 0, bytes_max=1)
    assert batches[0].values()[0] == b"x" * 3_000_000
    assert sum(map(len, batches)) == 1


async def test_unknown_places_cannot_be_read(subject: Subject) -> None:
    await subject.topic()
    with pytest.raises(UnknownTopic):
        await subject.engine.read("nowhere", 0, 0, bytes_max=LOTS)
    with pytest.raises(UnknownPartition):
        await subject.engine.read("t", 1, 0, bytes_max=LOTS)
    with pytest.raises(UnknownTopic):
        subject.engine.bounds("nowhere", 0)
    with pytest.raises(UnknownPartition):
        subject.engine.bounds("t", 1)
    with pytest.raises(UnknownPartition):
        subject.engine.watch("t", 1, lambda: None)


async def test_offset_for_time_is_the_first_record_at_or_after_it(subject: Subject) -> None:
    await subject.topic()
    start = subject.clock.now
    for _ in range(5):
        await subject.put("a", "b")
        subject.clock.advance(10)
    find = subject.engine.offset_for_time
    assert await find("t", 0, 0) == 0
    assert await find("t", 0, start) == 0
    assert await find("t", 0, start + 1) == 2
    assert await find("t", 0, start + 10) == 2
    assert await find("t", 0, start + 40) == 8
    assert await find("t", 0, start + 41) == 10


async def test_offset_for_time_looks_inside_batches_and_past_clocks_that_went_back(subject: Subject) -> None:
    await subject.topic()
    await subject.append(RecordBatch([b"a", b"b", b"c"], timestamps=[100, 300, 200]))
    await subject.append(RecordBatch([b"d", b"e"], timestamps=[150, 400]))
    find = subject.engine.offset_for_time
    assert [await find("t", 0, time) for time in (100, 101, 201, 301, 400, 401)] == [0, 1, 1, 4, 4, 5]


async def test_offset_for_time_of_an_empty_partition_is_its_end(subject: Subject) -> None:
    await subject.topic()
    assert await subject.engine.offset_for_time("t", 0, 5) == 0


async def test_a_watcher_is_woken_when_the_end_has_moved(subject: Subject) -> None:
    await subject.topic(partitions=2)
    woken = asyncio.Event()
    ends: list[int] = []

    def wake() -> None:
        ends.append(subject.engine.bounds("t", 0).end)
        woken.set()

    subject.engine.watch("t", 0, wake)
    await subject.put("elsewhere", partition=1)
    assert ends == []
    await subject.put("a")
    await within(60, woken.wait())
    assert ends == [1]


async def test_a_stopped_watcher_is_not_woken_and_others_are(subject: Subject) -> None:
    await subject.topic()
    first, second = list[int](), asyncio.Event()
    stop = subject.engine.watch("t", 0, lambda: first.append(1))
    subject.engine.watch("t", 0, second.set)
    stop()
    stop()
    await subject.put("a")
    await within(60, second.wait())
    assert first == []


async def test_a_watcher_may_stop_itself_while_it_is_woken(subject: Subject) -> None:
    await subject.topic()
    woken: list[int] = []

    def wake() -> None:
        woken.append(1)
        stop()

    stop = subject.engine.watch("t", 0, wake)
    other = asyncio.Event()
    subject.engine.watch("t", 0, other.set)
    await subject.put("a")
    await within(60, other.wait())
    await subject.put("b")
    assert woken == [1]


async def test_a_reader_that_follows_the_tail_sees_every_record_once(subject: Subject) -> None:
    await subject.topic()
    moved = asyncio.Event()
    subject.engine.watch("t", 0, moved.set)

    async def follow() -> list[bytes | None]:
        position, values = 0, list[bytes | None]()
        while position < 60:
            await moved.wait()
            moved.clear()
            for batch in await subject.engine.read("t", 0, position, bytes_max=LOTS):
                values += batch.values()
                position = batch.next_offset
        return values

    following = asyncio.create_task(follow())
    for number in range(30):
        await subject.put(f"{number}a", f"{number}b")
    await within(60, following)
    assert following.result() == [f"{number}{letter}".encode() for number in range(30) for letter in "ab"]


async def test_a_partition_says_what_it_takes(subject: Subject) -> None:
    await subject.topic()
    assert subject.engine.size_bytes("t", 0) < 1_000
    await subject.put("x" * 100_000)
    assert 100_000 <= subject.engine.size_bytes("t", 0) < 110_000
    with pytest.raises(UnknownPartition):
        subject.engine.size_bytes("t", 9)
    with pytest.raises(UnknownTopic):
        subject.engine.size_bytes("nowhere", 0)


@pytest.mark.needs("reads_in_memory")
async def test_a_read_from_memory_gives_what_a_read_gives(subject: Subject) -> None:
    await subject.topic()
    for number in range(5):
        await subject.append(RecordBatch([b"%d" % number * 700] * (3 * number + 1), [b"k"] * (3 * number + 1) if number == 2 else None))
    end = subject.engine.bounds("t", 0).end
    for offset in range(end):
        for bytes_max, records_max in ((1, 1), (1, 9), (700, 2), (2_800, 3), (2_801, 50), (LOTS, 1), (LOTS, 7), (LOTS, 50)):
            for _ in range(2):  # the second read finds the batch opened
                batches = await subject.engine.read("t", 0, offset, bytes_max=bytes_max, records_max=records_max)
                now = subject.engine.read_now("t", 0, offset, bytes_max=bytes_max, records_max=records_max)
                assert now is not None and [batch.first_offset for batch in now] == [batch.first_offset for batch in batches]
                assert [list(batch.records()) for batch in now] == [list(batch.records()) for batch in batches]
                await asyncio.sleep(0)


async def test_a_read_from_memory_leaves_the_end_and_errors_to_read(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a")
    for topic, partition, offset in (("t", 0, 1), ("t", 0, 2), ("t", 0, -1), ("t", 1, 0), ("t", -1, 0), ("none", 0, 0)):
        assert subject.engine.read_now(topic, partition, offset, bytes_max=LOTS) is None


async def test_a_read_from_memory_of_a_recreated_topic_finds_nothing_of_the_old_one(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a", "b")
    await subject.engine.read("t", 0, 0, bytes_max=LOTS)
    subject.engine.read_now("t", 0, 1, bytes_max=1, records_max=1)
    await subject.engine.delete_topic("t")
    assert subject.engine.read_now("t", 0, 0, bytes_max=LOTS) is None
    await subject.topic()
    assert subject.engine.read_now("t", 0, 0, bytes_max=1, records_max=1) is None
    await subject.put("c")
    (batch,) = await subject.engine.read("t", 0, 0, bytes_max=LOTS)
    assert batch.values() == [b"c"]
    found = subject.engine.read_now("t", 0, 0, bytes_max=1, records_max=1)
    assert found is None or found[0].values() == [b"c"]
