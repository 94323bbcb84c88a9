"""Expired records are removed with their segments, and no other record is."""

from __future__ import annotations

import pytest

from headrace.engine.contract import Bounds
from headrace.records import RecordBatch
from tests.engine.subjects import Subject

pytestmark = pytest.mark.needs("forced_compaction")

SEGMENT = 4_096
HOUR = 3_600_000


async def _fill(subject: Subject, count: int, ttl_ms: int) -> None:
    """Batches of ten 100-byte records that expire, or (0) do not."""
    for _ in range(count // 10):
        expiries = [subject.clock.now + ttl_ms] * 10 if ttl_ms else None
        await subject.append(RecordBatch([b"x" * 100] * 10, expiries=expiries))


async def test_what_has_expired_is_dropped_and_the_rest_is_kept(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT)
    await _fill(subject, 200, HOUR)
    await _fill(subject, 200, 3 * HOUR)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(0, 400), "not yet"
    subject.clock.advance(2 * HOUR)
    await subject.engine.maintain()
    bounds = subject.engine.bounds("t", 0)
    assert 100 <= bounds.first <= 200 and bounds.end == 400
    assert [record.offset for record in await subject.records() if record.expiry > subject.clock.now] == list(range(200, 400))


async def test_when_all_has_expired_nothing_is_left_and_offsets_go_on(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT)
    await _fill(subject, 100, HOUR)
    subject.clock.advance(HOUR)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(100, 100)
    assert (await subject.put("a")).base_offset == 100
    await subject.engine.maintain()
    assert [record.offset for record in await subject.records()] == [100]


async def test_one_record_that_lives_for_ever_keeps_what_comes_behind_it(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT)
    await _fill(subject, 100, HOUR)
    await _fill(subject, 10, 0)
    await _fill(subject, 100, HOUR)
    subject.clock.advance(5 * HOUR)
    await subject.engine.maintain()
    bounds = subject.engine.bounds("t", 0)
    assert bounds.first <= 100 and bounds.end == 210
    await _fill(subject, 100, HOUR)
    subject.clock.advance(5 * HOUR)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0).first <= 100, "checked again, with the same result"


async def test_a_topic_that_keeps_its_dead_letters_leaves_an_hour_to_move_them(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT, dead_letter_expired=True)
    await _fill(subject, 100, HOUR)
    subject.clock.advance(2 * HOUR - 1)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(0, 100)
    subject.clock.advance(1)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(100, 100)


async def test_the_settings_of_expiry_survive_a_restart(subject: Subject) -> None:
    await subject.topic(ttl_ms=5, dead_letter_expired=True)
    await subject.reopen()
    config = subject.engine.topics()["t"].config
    assert (config.ttl_ms, config.dead_letter_expired) == (5, True)


async def test_expired_records_are_still_dropped_after_a_restart(subject: Subject) -> None:
    await subject.topic(segment_bytes=SEGMENT)
    await _fill(subject, 100, HOUR)
    await subject.reopen()
    await _fill(subject, 100, HOUR)
    subject.clock.advance(HOUR)
    await subject.engine.maintain()
    assert subject.engine.bounds("t", 0) == Bounds(200, 200)
    await subject.reopen()
    assert subject.engine.bounds("t", 0) == Bounds(200, 200)
