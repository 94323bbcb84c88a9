from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import Published
from headrace.broker.publishing.partitioner import partition_of
from headrace.engine.contract import Ack, Appended, Write
from headrace.errors import DiskFull, InvalidRequest, RecordTooLarge
from headrace.limits import VALUE_BYTES_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness


async def test_a_publish_is_answered_with_its_place(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.put("a", partition=1)
    published = await harness.broker.publish(ANN, "t", RecordBatch([b"b", b"c"]), partition=1)
    assert published == Published(partition=1, base_offset=1, count=2, timestamp=harness.clock.now, placements=None)
    assert [published.placement(index) for index in range(2)] == [(1, 1), (1, 2)]


async def test_call_order_is_log_order(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    futures = [harness.broker.publish(ANN, "t", RecordBatch([b"%d" % number])) for number in range(30)]
    assert [published.base_offset for published in await asyncio.gather(*futures)] == list(range(30))
    assert await harness.values() == [str(number) for number in range(30)]


async def test_keyless_batches_rotate_and_stay_whole(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=3)
    places = [(await harness.broker.publish(ANN, "t", RecordBatch([b"x", b"y"]))).partition for _ in range(6)]
    assert sorted(places[:3]) == sorted(places[3:]) == [0, 1, 2]
    assert [len(await harness.values("t", partition)) for partition in range(3)] == [4, 4, 4]


async def test_keyed_records_go_where_their_key_sends_them(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=4)
    keys: list[bytes | None] = [b"k%d" % (number % 7) for number in range(40)]
    published = await harness.broker.publish(ANN, "t", RecordBatch([b"%d" % number for number in range(40)], keys))
    assert published.count == 40
    assert (published.partition, published.base_offset) == published.placement(0)
    logs = [await harness.records("t", partition) for partition in range(4)]
    for index, key in enumerate(keys):
        partition, offset = published.placement(index)
        assert key is not None
        assert partition == partition_of(key, 4)
        assert logs[partition][offset].value == b"%d" % index
    assert sum(map(len, logs)) == 40


async def test_a_keyed_batch_for_one_partition_is_contiguous(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=4)
    published = await harness.broker.publish(ANN, "t", RecordBatch([b"a", b"b"], [b"k", b"k"]))
    assert published.placements is None
    assert published.partition == partition_of(b"k", 4)


async def test_an_explicit_partition_beats_the_key(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=4)
    elsewhere = (partition_of(b"k", 4) + 1) % 4
    assert (await harness.broker.publish(ANN, "t", RecordBatch([b"a"], [b"k"]), partition=elsewhere)).partition == elsewhere


async def test_a_spread_batch_is_one_append(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t", partitions=8)
    before = harness.engine.appends
    await harness.broker.publish(ANN, "t", RecordBatch([b"v"] * 50, [b"%d" % number for number in range(50)]))
    assert harness.engine.appends == before + 1


@settings(max_examples=50)
@given(st.lists(st.none() | st.binary(max_size=3), min_size=1, max_size=40), st.integers(1, 6))
def test_every_record_of_a_spread_batch_is_where_the_answer_says(keys: list[bytes | None], partitions: int) -> None:
    async def run() -> None:
        harness = Harness()
        await harness.broker.open()
        await harness.broker.create_topic(ANN, "t", partitions=partitions)
        await harness.put("before", partition=partitions - 1)
        published = await harness.broker.publish(ANN, "t", RecordBatch([b"%d" % index for index in range(len(keys))], keys))
        logs = [await harness.records("t", partition) for partition in range(partitions)]
        for index, key in enumerate(keys):
            partition, offset = published.placement(index)
            assert (logs[partition][offset].key, logs[partition][offset].value) == (key, b"%d" % index)
        assert sum(map(len, logs)) == len(keys) + 1
        await harness.broker.close()

    asyncio.run(run())


async def test_what_cannot_be_published_is_refused_at_once(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    with pytest.raises(InvalidRequest):
        harness.broker.publish(ANN, "t", RecordBatch([]))
    with pytest.raises(RecordTooLarge):
        harness.broker.publish(ANN, "t", RecordBatch([bytes(VALUE_BYTES_MAX + 1)]))
    await harness.put("a")
    assert await harness.values() == ["a"]


async def test_a_full_disk_fails_the_future_and_the_next_try_may_succeed(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await harness.broker.publish(ANN, "t", RecordBatch([b"a"]))
    harness.engine.error = None
    await harness.put("b")
    assert await harness.values() == ["b"]


async def test_the_ack_asked_for_reaches_the_engine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.broker.create_topic(ANN, "t")
    acks: list[Ack | None] = []
    append = harness.engine.append

    def noted(writes: Sequence[Write], *, ack: Ack | None = None) -> asyncio.Future[list[Appended]]:
        acks.append(ack)
        return append(writes, ack=ack)

    monkeypatch.setattr(harness.engine, "append", noted)
    await harness.broker.publish(ANN, "t", RecordBatch([b"a"]))
    await harness.broker.publish(ANN, "t", RecordBatch([b"a"]), ack=Ack.NONE)
    assert acks == [None, Ack.NONE]


async def test_a_caller_that_gives_up_takes_nothing_back(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    harness.broker.publish(ANN, "t", RecordBatch([b"a"])).cancel()
    await harness.put("b")
    assert await harness.values() == ["a", "b"]
