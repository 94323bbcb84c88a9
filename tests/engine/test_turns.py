"""The embedded engine cuts reads from memory into slices, so that a task that reads on and on does not hold up the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.records import RecordBatch
from tests.engine.subjects import SUBJECTS, Clock, Subject

VALUES = [bytes(1000)] * 100


async def _turns(subject: Subject, reads: int, records: int) -> int:
    """Return how many turns of the loop other tasks got while one task read."""

    async def read() -> None:
        for turn in range(reads):
            await subject.engine.read("t", 0, turn % 900, bytes_max=1 << 20, records_max=records)

    reading, turns = asyncio.ensure_future(read()), 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_a_task_that_reads_megabytes_lets_others_run_and_small_reads_are_not_held_up(tmp_path: Path) -> None:
    clock = Clock()
    subject = Subject(SUBJECTS["embedded"](tmp_path, clock), clock)
    await subject.engine.open()
    try:
        await subject.topic()
        for _ in range(10):
            await subject.append(RecordBatch(VALUES))
        assert await _turns(subject, 100, 100) >= 8, "100 reads of 100 KB"
        assert await _turns(subject, 100, 1) < 5, "100 reads of 1 KB"
    finally:
        await subject.engine.close()


async def test_a_read_of_a_few_records_is_answered_in_a_turn_in_which_others_read_a_lot(tmp_path: Path) -> None:
    clock = Clock()
    subject = Subject(SUBJECTS["embedded"](tmp_path, clock), clock)
    await subject.engine.open()
    try:
        await subject.topic()
        for _ in range(6):  # a megabyte or more may leave the tail past the page cache, and is not in memory then
            await subject.append(RecordBatch(VALUES))

        def is_answered(records: int) -> bool:
            return subject.engine.read_now("t", 0, 0, bytes_max=1 << 19, records_max=records) is not None

        while is_answered(1_000):
            pass
        assert is_answered(10) and not is_answered(1_000), "the reserve is for small reads"
        reads = 0
        while is_answered(10):
            reads += 1
        assert reads < 200, "and has an end"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert is_answered(1_000)
    finally:
        await subject.engine.close()
