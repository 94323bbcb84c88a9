"""Retention and compaction. Segments are small here, because some engines drop only whole segments."""

from __future__ import annotations

import pytest

from headrace.engine.contract import Bounds, Cleanup, TopicConfig
from headrace.errors import OffsetOutOfRange
from headrace.records import Record, RecordBatch
from tests.engine.subjects import Subject

pytestmark = pytest.mark.needs("forced_compaction")

SEGMENT = 4_096
HOUR = 3_600_000


async def _fill(subject: Subject, count: int, *, letter: bytes = b"x") -> None:
    """Append batches of ten 100-byte records, so that every engine has boundaries to cut at."""
    for _ in range(count // 10):
        await subject.append(RecordBatch([letter * 100] * 10))


async def test_without_limits_nothing_is_ever_dropped(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT)
    await _fill(subject, 200)
    subject.clock.advance(1_000 * HOUR)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(0, 200)


async def test_retention_by_age_drops_the_old_and_keeps_the_young(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT, retention_ms=HOUR)
    await _fill(subject, 200, letter=b"o")
    subject.clock.advance(2 * HOUR)
    await _fill(subject, 200, letter=b"y")
    await subject.engine.maintain()
    bounds = subject.engine.bounds("t", 0)
    assert 100 <= bounds.first <= 200, "old records fill several segments; at most one of them also holds young ones"
    assert bounds.end == 400
    assert [record.offset for record in await subject.records() if record.value == b"y" * 100] == list(range(200, 400))


async def test_retention_by_age_never_drops_early(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT, retention_ms=HOUR)
    await _fill(subject, 200)
    subject.clock.advance(HOUR - 1)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(0, 200)


async def test_retention_by_bytes_keeps_the_newest_that_fit(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT, retention_bytes=5 * SEGMENT)
    await _fill(subject, 1_000)
    await subject.engine.maintain()
    bounds = subject.engine.bounds("t", 0)
    assert bounds.end == 1_000
    kept = (bounds.end - bounds.first) * 100
    assert 3 * SEGMENT <= kept <= 7 * SEGMENT
    assert await subject.offsets() == list(range(bounds.first, 1_000))


async def test_what_was_dropped_is_out_of_range_and_offsets_go_on(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT, retention_bytes=SEGMENT)
    await _fill(subject, 300)
    await subject.engine.maintain()
    bounds = subject.engine.bounds("t", 0)
    assert bounds.first > 0
    with pytest.raises(OffsetOutOfRange) as caught:
        await subject.engine.read("t", 0, bounds.first - 1, bytes_max=100)
    assert (caught.value.first, caught.value.end) == (bounds.first, 300)
    assert (await subject.put("next")).base_offset == 300
    await subject.reopen()
    assert subject.engine.bounds("t", 0) == Bounds(bounds.first, 301)


async def test_offset_for_time_before_what_was_dropped_is_the_first_there_is(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT, retention_bytes=SEGMENT)
    await _fill(subject, 300)
    await subject.engine.maintain()
    assert await subject.engine.offset_for_time("t", 0, 0) == subject.engine.bounds("t", 0).first


async def test_a_new_retention_limit_counts_for_old_records_too(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT)
    await _fill(subject, 300)
    await subject.engine.alter_topic("t", config=TopicConfig(segment_bytes=SEGMENT, retention_bytes=SEGMENT))
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0).first > 0


async def _compacted(subject: Subject, *, tombstone_retention_ms: int = 24 * HOUR) -> None:
    await subject.topic(cleanup=Cleanup.COMPACT, segment_bytes=SEGMENT, tombstone_retention_ms=tombstone_retention_ms)


async def _roll(subject: Subject) -> None:
    """Move earlier records into their own segments, because an engine may keep the newest segment."""
    for number in range(100):
        await subject.put_keyed((f"filler {number}", "f" * 100))


async def _state(subject: Subject) -> dict[bytes | None, bytes | None]:
    """Return the table that the log represents."""
    return {record.key: record.value for record in await subject.records() if not (record.key or b"").startswith(b"filler")}


async def test_compaction_keeps_the_newest_record_of_each_key_at_its_offset(subject: Subject) -> None:
    await _compacted(subject)
    await subject.put_keyed(("a", "1"), ("b", "1"), ("a", "2"))
    await subject.put_keyed(("b", "2"), ("c", "1"))
    await _roll(subject)
    await subject.engine.maintain()
    kept = [(record.offset, record.key, record.value) for record in await subject.records() if record.offset < 5]
    assert kept == [(2, b"a", b"2"), (3, b"b", b"2"), (4, b"c", b"1")]


async def test_compaction_moves_neither_bound(subject: Subject) -> None:
    await _compacted(subject)
    await subject.put_keyed(("a", "1"), ("a", "2"), ("a", "3"))
    await _roll(subject)
    before = subject.engine.bounds("t", 0)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == before


async def test_a_read_inside_a_gap_starts_at_the_next_offset_there_is(subject: Subject) -> None:
    await _compacted(subject)
    await subject.put_keyed(("a", "1"), ("b", "1"), ("a", "2"), ("a", "3"), ("c", "1"), ("a", "4"))
    await _roll(subject)
    await subject.engine.maintain()
    for wanted, found in ((0, 1), (1, 1), (2, 4), (3, 4), (4, 4), (5, 5)):
        batches = await subject.engine.read("t", 0, wanted, bytes_max=1, records_max=1)
        assert [record.offset for record in batches[0].records()] == [found]
        assert batches[0].next_offset > wanted


async def test_whole_batches_that_compaction_emptied_are_passed_over(subject: Subject) -> None:
    await _compacted(subject)
    for number in range(20):
        await subject.put_keyed(*((f"k{index}", f"{number}") for index in range(5)))
    await _roll(subject)
    await subject.engine.maintain()
    batches = await subject.engine.read("t", 0, 0, bytes_max=1 << 20)
    assert batches[0].first_offset == 95
    assert await _state(subject) == {f"k{index}".encode(): b"19" for index in range(5)}


async def test_compaction_keeps_the_whole_content_of_what_it_keeps(subject: Subject) -> None:
    await _compacted(subject)
    now = subject.clock.now
    headers = (("h", b"1"), ("h", b"2"))
    await subject.append(
        RecordBatch([b"old", b"v", b"w"], [b"a", b"b", b"a"], [(), headers, ()], [now - 3, now - 2, now - 1], [0, now + 5, 0])
    )
    await _roll(subject)
    await subject.engine.maintain()
    assert (await subject.records())[:2] == [
        Record(1, now - 2, b"b", b"v", headers, now + 5),
        Record(2, now - 1, b"a", b"w", (), 0),
    ]


async def test_records_without_a_key_outlive_compaction(subject: Subject) -> None:
    await _compacted(subject)
    await subject.append(RecordBatch([b"x", b"1", b"y", b"2"], [None, b"k", None, b"k"]))
    await subject.put("z")
    await _roll(subject)
    await subject.engine.maintain()
    assert [(record.offset, record.value) for record in await subject.records() if record.offset < 5] == [
        (0, b"x"),
        (2, b"y"),
        (3, b"2"),
        (4, b"z"),
    ]


async def test_a_tombstone_deletes_its_key_and_goes_itself_when_its_time_is_over(subject: Subject) -> None:
    await _compacted(subject, tombstone_retention_ms=HOUR)
    await subject.put_keyed(("a", "1"), ("b", "1"), ("a", None))
    await _roll(subject)
    await subject.engine.maintain()
    assert await _state(subject) == {b"a": None, b"b": b"1"}
    subject.clock.advance(HOUR + 1)
    await _roll(subject)
    await subject.engine.maintain()
    assert await _state(subject) == {b"b": b"1"}


async def test_a_key_written_again_after_its_tombstone_is_kept(subject: Subject) -> None:
    await _compacted(subject, tombstone_retention_ms=HOUR)
    await subject.put_keyed(("a", "1"), ("a", None), ("a", "2"))
    subject.clock.advance(2 * HOUR)
    await _roll(subject)
    await subject.engine.maintain()
    assert await _state(subject) == {b"a": b"2"}


async def test_a_second_compaction_changes_nothing(subject: Subject) -> None:
    await _compacted(subject)
    for number in range(30):
        await subject.put_keyed((f"k{number % 7}", f"{number}"), (f"k{number % 3}", f"{number}"))
    await _roll(subject)
    await subject.engine.maintain()
    once = await subject.records()
    await subject.engine.maintain()
    assert await subject.records() == once


async def test_appends_after_compaction_go_on_where_the_log_ended(subject: Subject) -> None:
    await _compacted(subject)
    await subject.put_keyed(("a", "1"), ("a", "2"))
    await _roll(subject)
    await subject.engine.maintain()
    assert (await subject.put_keyed(("a", "3"))).base_offset == 102
    await subject.reopen()
    assert (await subject.put_keyed(("a", "4"))).base_offset == 103
    assert await _state(subject) == {b"a": b"4"}
