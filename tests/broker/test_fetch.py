from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.broker import BrokerSettings, Fetched
from headrace.engine.contract import Batch, Bounds, Cleanup, TopicConfig
from headrace.errors import InvalidRequest, OffsetOutOfRange, Unavailable, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


def _values(fetched: Fetched) -> list[str]:
    return [(value or b"").decode() for batch in fetched.batches for value in batch.values()]


def _waiting(harness: Harness, offset: int, *, wait_ms: int = 1_000, bytes_min: int = 1, bytes_max: int = 1_000) -> asyncio.Task[Fetched]:
    return asyncio.ensure_future(harness.broker.fetch(ANN, "t", 0, offset, bytes_max=bytes_max, wait_ms=wait_ms, bytes_min=bytes_min))


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t")
    return harness


async def test_a_fetch_gives_records_and_bounds(harness: Harness) -> None:
    await harness.put("a", "b", "c")
    fetched = await harness.broker.fetch(ANN, "t", 0, 1, bytes_max=1_000)
    assert _values(fetched) == ["b", "c"]
    assert (fetched.bounds, fetched.next_offset) == (Bounds(0, 3), 3)


async def test_bytes_and_records_bound_a_fetch(harness: Harness) -> None:
    await harness.put(*("x" * 100 for _ in range(10)))
    assert len(_values(await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=350))) == 3
    assert len(_values(await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=350, records_max=2))) == 2
    assert len(_values(await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1))) == 1
    with pytest.raises(InvalidRequest):
        await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=0)
    with pytest.raises(InvalidRequest):
        await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1, records_max=0)


async def test_outside_the_bounds_a_fetch_is_refused(harness: Harness) -> None:
    await harness.put("a")
    for offset in (-1, 2):
        with pytest.raises(OffsetOutOfRange):
            await harness.broker.fetch(ANN, "t", 0, offset, bytes_max=10, wait_ms=100)
    assert harness.clock.running == 1, "the only timer is that of idle producers"


async def test_at_the_end_a_fetch_is_empty_at_once_unless_it_may_wait(harness: Harness) -> None:
    await harness.put("a")
    fetched = await harness.broker.fetch(ANN, "t", 0, 1, bytes_max=10)
    assert (fetched.batches, fetched.next_offset) == ([], 1)


async def test_a_waiting_fetch_is_answered_by_the_next_record(harness: Harness) -> None:
    fetching = _waiting(harness, 0)
    await turns()
    assert not fetching.done()
    await harness.put("a")
    assert _values(await fetching) == ["a"]


async def test_a_waiting_fetch_is_empty_when_its_time_is_over(harness: Harness) -> None:
    fetching = _waiting(harness, 0, wait_ms=1_000)
    await turns()
    harness.clock.tick(999)
    await turns()
    assert not fetching.done()
    harness.clock.tick(1)
    assert _values(await fetching) == []


async def test_a_fetch_waits_until_there_is_enough(harness: Harness) -> None:
    fetching = _waiting(harness, 0, bytes_min=5)
    await harness.put("ab")
    await harness.put("cd")
    await turns()
    assert not fetching.done()
    await harness.put("e")
    assert _values(await fetching) == ["ab", "cd", "e"]


async def test_what_is_not_enough_is_given_when_the_time_is_over(harness: Harness) -> None:
    fetching = _waiting(harness, 0, bytes_min=5)
    await harness.put("ab")
    await turns()
    harness.clock.tick(1_000)
    assert _values(await fetching) == ["ab"]


async def test_more_than_bytes_max_is_never_waited_for(harness: Harness) -> None:
    await harness.put("abc")
    assert _values(await _waiting(harness, 0, bytes_min=1_000_000, bytes_max=3)) == ["abc"]


async def test_a_read_that_ends_early_is_never_waited_for(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine returns a bounded number of batches: there is more, though not in this reply."""
    await harness.put("a")
    await harness.put("b")
    read = harness.engine.read

    async def one_batch(*place: Any, **bounds: Any) -> list[Batch]:
        return (await read(*place, **bounds))[:1]

    monkeypatch.setattr(harness.engine, "read", one_batch)
    fetched = await _waiting(harness, 0, bytes_min=100)
    assert (_values(fetched), fetched.next_offset) == (["a"], 1)


async def test_a_record_that_comes_while_the_fetch_looks_is_not_missed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read returns empty after the end has moved: the fetch must look again."""
    read = harness.engine.read

    async def slow_read(*args: object, **kwargs: object) -> object:
        found = await read(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came
        if harness.engine.bounds("t", 0).end == 0:
            await harness.put("a")
        return found

    monkeypatch.setattr(harness.engine, "read", slow_read)
    assert _values(await _waiting(harness, 0)) == ["a"]


async def test_nothing_is_left_behind_by_a_fetch_that_waited_or_was_cancelled(harness: Harness) -> None:
    timers = harness.clock.running
    cancelled, answered = _waiting(harness, 0), _waiting(harness, 0)
    await turns()
    cancelled.cancel()
    await harness.put("a")
    await answered
    await turns()
    assert harness.clock.running == timers
    assert harness.engine._partitions["t"][0].watchers == {}


async def test_deleting_the_topic_wakes_the_waiting(harness: Harness) -> None:
    fetching = _waiting(harness, 0)
    await turns()
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    with pytest.raises(UnknownTopic):
        await fetching


async def test_expired_records_are_left_out(harness: Harness) -> None:
    now = harness.clock.now
    record_batch = RecordBatch([b"a", b"b", b"c", b"d", b"e"], expiries=[now + 10, 0, now + 20, now + 10, now + 11])
    await harness.broker.publish(ANN, "t", record_batch)
    assert _values(await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=100)) == ["a", "b", "c", "d", "e"]
    harness.clock.tick(10)
    fetched = await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=100)
    assert _values(fetched) == ["b", "c", "e"]
    assert [offset for batch in fetched.batches for offset in batch.offsets()] == [1, 2, 4]
    assert fetched.next_offset == 5


async def test_a_stretch_of_expired_records_is_passed_over_however_long(harness: Harness) -> None:
    for _ in range(20):
        await harness.broker.publish(ANN, "t", RecordBatch([b"x" * 100] * 10, expiries=[harness.clock.now + 1] * 10))
    await harness.put("alive")
    harness.clock.tick(1)
    fetched = await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=150)
    assert _values(fetched) == ["alive"]


async def test_expired_records_are_skipped_by_batches_and_other_tasks_run_meanwhile(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        await harness.broker.publish(ANN, "t", RecordBatch([b"x" * 100] * 1_000, expiries=[harness.clock.now + 1] * 1_000))
    await harness.put("alive", "too")
    harness.clock.tick(1)
    reads, read = 0, harness.engine.read

    async def counted(*arguments: Any, **limits: Any) -> list[Batch]:
        nonlocal reads
        reads += 1
        return await read(*arguments, **limits)

    monkeypatch.setattr(harness.engine, "read", counted)
    fetching = asyncio.ensure_future(harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1_000, records_max=1))
    waited = 0
    while not fetching.done():
        await asyncio.sleep(0)
        waited += 1
    fetched = await fetching
    assert (_values(fetched), fetched.next_offset) == (["alive"], 20_001)
    assert 10 < reads < 100, "2 MB of values in slices of 64 KiB"
    assert waited > 10, "no slice holds up the loop for long"


async def test_where_all_is_expired_a_fetch_returns_the_next_offset_and_may_wait(harness: Harness) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"] * 10, expiries=[harness.clock.now + 1] * 10))
    harness.clock.tick(1)
    fetched = await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=100)
    assert (fetched.batches, fetched.next_offset) == ([], 10)
    fetching = _waiting(harness, 0)
    await turns()
    assert not fetching.done()
    await harness.put("alive")
    assert _values(await fetching) == ["alive"]


async def test_where_compaction_left_nothing_a_fetch_ends_and_returns_the_next_offset(harness: Harness) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT, tombstone_retention_ms=1)
    await harness.broker.create_topic(ANN, "c", config=config)
    await harness.broker.publish(ANN, "c", RecordBatch([b"1", None], [b"k", b"k"]))
    harness.clock.tick(10)
    await harness.broker.maintain()
    fetched = await harness.broker.fetch(ANN, "c", 0, 0, bytes_max=100)
    assert (fetched.batches, fetched.next_offset) == ([], 2)


async def test_only_so_many_may_wait() -> None:
    harness = Harness(BrokerSettings(waiting_fetches_max=2))
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    waiting = [_waiting(harness, 0) for _ in range(2)]
    await turns()
    with pytest.raises(Unavailable):
        await harness.broker.fetch(ANN, "t", 0, 0, bytes_max=1, wait_ms=1)
    await harness.put("a")
    await asyncio.gather(*waiting)
    await harness.broker.close()


async def test_a_time_is_turned_into_an_offset(harness: Harness) -> None:
    await harness.put("a", "b")
    harness.clock.tick(5)
    await harness.put("c")
    assert await harness.broker.offset_for_time(ANN, "t", 0, harness.clock.now) == 2
    assert await harness.broker.offset_for_time(ANN, "t", 0, harness.clock.now + 1) == 3


async def test_a_read_from_memory_leaves_out_what_a_fetch_has_to_decide(harness: Harness) -> None:
    await harness.put("a", "b")
    batches = harness.broker.read_now(ANN, "t", 0, 1, bytes_max=1_000)
    assert batches is not None and [value for batch in batches for value in batch.values()] == [b"b"]
    await harness.broker.publish(ANN, "t", RecordBatch([b"c"], expiries=[harness.clock.now + 10]))
    assert harness.broker.read_now(ANN, "t", 0, 2, bytes_max=1_000) is None, "a record may have expired"
    assert harness.broker.read_now(ANN, "t", 0, 3, bytes_max=1_000) is None, "the end"
    assert harness.broker.read_now(ANN, "t", 1, 0, bytes_max=1_000) is None, "no such partition"
    assert harness.broker.read_now(ANN, "__groups", 0, 0, bytes_max=1_000) is None, "an internal topic"


async def test_a_read_from_memory_follows_changes_of_the_topic(harness: Harness) -> None:
    await harness.put("a")
    assert harness.broker.read_now(ANN, "t", 0, 0, bytes_max=1_000) is not None
    await harness.broker.alter_topic(ANN, "t", partitions=2)
    await harness.broker.publish(ANN, "t", RecordBatch([b"b"]), partition=1)
    assert harness.broker.read_now(ANN, "t", 1, 0, bytes_max=1_000) is not None
    await harness.broker.delete_topic(ANN, "t")
    assert harness.broker.read_now(ANN, "t", 0, 0, bytes_max=1_000) is None
