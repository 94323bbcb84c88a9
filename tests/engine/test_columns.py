"""Column batches work wherever record batches do, with the same result."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.engine.contract import Appended, Cleanup, Write
from headrace.errors import UnknownTopic
from headrace.records import ColumnBatch, Record, RecordBatch
from tests.engine.subjects import Subject

FULL = RecordBatch(
    [b"a", None, b"", b"long" * 100],
    [b"k", None, b"", b"q"],
    [(), (("a", b"1"), ("a", b"2")), (("ü", b""),), ()],
    [5, 3, 9, 4],
    [0, 0, 99, 0],
)


async def test_columns_are_read_as_the_records_they_are(subject: Subject) -> None:
    await subject.topic()
    assert await subject.append(ColumnBatch.of(FULL)) == Appended(0, 4, 5)
    assert FULL.keys and FULL.headers and FULL.timestamps and FULL.expiries
    assert await subject.records() == list(map(Record, range(4), FULL.timestamps, FULL.keys, FULL.values, FULL.headers, FULL.expiries))


async def test_columns_without_times_are_stamped_by_the_clock(subject: Subject) -> None:
    await subject.topic()
    assert await subject.append(ColumnBatch.of(RecordBatch([b"a", b"b"]))) == Appended(0, 2, subject.clock.now)
    assert [record.timestamp for record in await subject.records()] == [subject.clock.now] * 2


async def test_order_holds_across_both_kinds_of_batch(subject: Subject) -> None:
    await subject.topic()
    record_batches = [RecordBatch([b"%d" % number, b"%d!" % number]) for number in range(20)]
    futures = [
        subject.engine.append([Write("t", 0, record_batch if number % 3 else ColumnBatch.of(record_batch))])
        for number, record_batch in enumerate(record_batches)
    ]
    assert [(await future)[0].base_offset for future in futures] == list(range(0, 40, 2))
    assert await subject.values() == [value for record_batch in record_batches for value in record_batch.values]


@pytest.mark.needs("keeps_batches")
async def test_columns_are_a_batch_of_their_own(subject: Subject) -> None:
    await subject.topic()
    columns = ColumnBatch.of(RecordBatch([b"b", b"c"]))
    await subject.engine.append(
        [Write("t", 0, RecordBatch([b"a"])), Write("t", 0, columns), Write("t", 0, columns), Write("t", 0, RecordBatch([b"d"]))]
    )
    batches = await subject.engine.read("t", 0, 0, bytes_max=1 << 20)
    assert [batch.values() for batch in batches] == [[b"a"], [b"b", b"c"], [b"b", b"c"], [b"d"]]
    assert [batch.first_offset for batch in batches] == [0, 1, 3, 5]


async def test_a_late_run_may_be_one_of_columns_and_sees_where_columns_landed(subject: Subject) -> None:
    await subject.topic(partitions=2)

    def late(placed: Sequence[Appended]) -> ColumnBatch:
        return ColumnBatch.of(RecordBatch([b"%d+%d" % (one.base_offset, one.count) for one in placed]))

    await subject.put("x", partition=1)
    await subject.engine.append([Write("t", 1, ColumnBatch.of(RecordBatch([b"a", b"b"]))), Write("t", 0, late)])
    assert await subject.values() == [b"1+2"]


async def test_an_append_with_columns_is_all_or_nothing(subject: Subject) -> None:
    await subject.topic()
    columns = ColumnBatch.of(RecordBatch([b"a"]))
    with pytest.raises(UnknownTopic):
        subject.engine.append([Write("t", 0, columns), Write("nowhere", 0, columns)])
    assert await subject.values() == []


async def test_columns_are_there_after_a_restart(subject: Subject) -> None:
    await subject.topic(compress=True)
    await subject.append(ColumnBatch.of(FULL))
    before = await subject.records()
    await subject.reopen()
    assert await subject.records() == before


async def test_a_small_read_takes_a_part_of_the_columns(subject: Subject) -> None:
    await subject.topic()
    await subject.append(ColumnBatch.of(RecordBatch([b"%03d" % number for number in range(100)])))
    (batch,) = await subject.engine.read("t", 0, 40, bytes_max=30)
    assert (batch.start, batch.stop, len(batch.value_buffers()[0]) // 4 - 1) == (40, 50, 100)
    assert batch.values() == [b"%03d" % number for number in range(40, 50)]


@pytest.mark.needs("forced_compaction")
async def test_columns_are_compacted_like_any_records(subject: Subject) -> None:
    await subject.topic(cleanup=Cleanup.COMPACT, segment_bytes=200, tombstone_retention_ms=0)
    for number in range(30):
        await subject.append(ColumnBatch.of(RecordBatch([b"%d" % number, None], [b"kept", b"deleted"])))
    await subject.engine.maintain()
    await subject.reopen()
    found = {record.key: record.value for record in await subject.records()}
    assert found[b"kept"] == b"29"
    assert found.get(b"deleted") is None
