"""A restart keeps everything."""

from __future__ import annotations

import asyncio

from headrace.engine.contract import Bounds, Cleanup, Topic, TopicConfig, Write
from headrace.records import RecordBatch
from tests.engine.subjects import Subject

RICH = RecordBatch(
    values=[b"one", None, b""],
    keys=[b"k", None, b""],
    headers=[(("a", b"1"), ("a", b"2")), (), ()],
    timestamps=[3, 1, 2],
    expiries=[0, 9, 0],
)


async def test_records_come_back_as_they_were(subject: Subject) -> None:
    await subject.topic(partitions=2)
    await subject.append(RICH)
    await subject.put("a", "b", partition=1)
    before = await subject.records(), await subject.records(partition=1)
    await subject.reopen()
    assert (await subject.records(), await subject.records(partition=1)) == before
    assert subject.engine.bounds("t", 1) == Bounds(0, 2)


async def test_topics_come_back_as_they_were(subject: Subject) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT, retention_bytes=7)
    await subject.engine.create_topic("t", 2, config)
    await subject.engine.create_topic("__i", 1, TopicConfig(), internal=True)
    await subject.engine.alter_topic("t", partitions=3)
    await subject.topic("gone")
    await subject.engine.delete_topic("gone")
    await subject.reopen()
    assert dict(subject.engine.topics()) == {"t": Topic("t", 3, config), "__i": Topic("__i", 1, TopicConfig(), internal=True)}


async def test_offsets_go_on_and_times_are_still_found(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a", "b")
    later = subject.clock.now + 10
    subject.clock.advance(10)
    await subject.put("c")
    await subject.reopen()
    assert (await subject.put("d")).base_offset == 3
    assert await subject.engine.offset_for_time("t", 0, later) == 2
    assert await subject.values() == [b"a", b"b", b"c", b"d"]


async def test_what_was_staged_is_written_before_the_engine_closes(subject: Subject) -> None:
    await subject.topic()
    staged = [subject.engine.append([Write("t", 0, RecordBatch([b"%d" % number]))]) for number in range(20)]
    await subject.reopen()
    await asyncio.gather(*staged)
    assert await subject.values() == [b"%d" % number for number in range(20)]


async def test_closing_twice_is_closing_once(subject: Subject) -> None:
    await subject.topic()
    await subject.put("a")
    await subject.engine.close()
    await subject.reopen()
    assert await subject.values() == [b"a"]


async def test_a_compressed_topic_reads_like_any_other(subject: Subject) -> None:
    await subject.topic("t", compress=True)
    await subject.append(RecordBatch([b"again and again " * 100] * 50, [b"key"] * 50))
    await subject.reopen()
    assert await subject.values() == [b"again and again " * 100] * 50
