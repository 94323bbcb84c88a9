from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings, Fetched
from headrace.engine.contract import Bounds, Cleanup, TopicConfig
from headrace.errors import InvalidRequest, OffsetOutOfRange, Unavailable, UnknownTopic
from headrace.records import RecordBatch
from tests.broker.stand import ANN, Stand, turns


def _values(fetched: Fetched) -> list[str]:
    return [(value or b"").decode() for batch in fetched.batches for value in batch.values()]


def _waiting(stand: Stand, offset: int, *, wait_ms: int = 1_000, bytes_min: int = 1, bytes_max: int = 1_000) -> asyncio.Task[Fetched]:
    return asyncio.ensure_future(stand.broker.fetch(ANN, "t", 0, offset, bytes_max=bytes_max, wait_ms=wait_ms, bytes_min=bytes_min))


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t")
    return stand


async def test_a_fetch_gives_records_and_bounds(stand: Stand) -> None:
    await stand.put("a", "b", "c")
    fetched = await stand.broker.fetch(ANN, "t", 0, 1, bytes_max=1_000)
    assert _values(fetched) == ["b", "c"]
    assert (fetched.bounds, fetched.next_offset) == (Bounds(0, 3), 3)


async def test_bytes_and_records_bound_a_fetch(stand: Stand) -> None:
    await stand.put(*("x" * 100 for _ in range(10)))
    assert len(_values(await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=350))) == 3
    assert len(_values(await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=350, records_max=2))) == 2
    assert len(_values(await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=1))) == 1
    with pytest.raises(InvalidRequest):
        await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=0)
    with pytest.raises(InvalidRequest):
        await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=1, records_max=0)


async def test_outside_the_bounds_a_fetch_is_refused(stand: Stand) -> None:
    await stand.put("a")
    for offset in (-1, 2):
        with pytest.raises(OffsetOutOfRange):
            await stand.broker.fetch(ANN, "t", 0, offset, bytes_max=10, wait_ms=100)
    assert stand.clock.running == 1, "the only timer is that of idle producers"


async def test_at_the_end_a_fetch_is_empty_at_once_unless_it_may_wait(stand: Stand) -> None:
    await stand.put("a")
    fetched = await stand.broker.fetch(ANN, "t", 0, 1, bytes_max=10)
    assert (fetched.batches, fetched.next_offset) == ([], 1)


async def test_a_waiting_fetch_is_answered_by_the_next_record(stand: Stand) -> None:
    fetching = _waiting(stand, 0)
    await turns()
    assert not fetching.done()
    await stand.put("a")
    assert _values(await fetching) == ["a"]


async def test_a_waiting_fetch_is_empty_when_its_time_is_over(stand: Stand) -> None:
    fetching = _waiting(stand, 0, wait_ms=1_000)
    await turns()
    stand.clock.tick(999)
    await turns()
    assert not fetching.done()
    stand.clock.tick(1)
    assert _values(await fetching) == []


async def test_a_fetch_waits_until_there_is_enough(stand: Stand) -> None:
    fetching = _waiting(stand, 0, bytes_min=5)
    await stand.put("ab")
    await stand.put("cd")
    await turns()
    assert not fetching.done()
    await stand.put("e")
    assert _values(await fetching) == ["ab", "cd", "e"]


async def test_what_is_not_enough_is_given_when_the_time_is_over(stand: Stand) -> None:
    fetching = _waiting(stand, 0, bytes_min=5)
    await stand.put("ab")
    await turns()
    stand.clock.tick(1_000)
    assert _values(await fetching) == ["ab"]


async def test_more_than_bytes_max_is_never_waited_for(stand: Stand) -> None:
    await stand.put("abc")
    assert _values(await _waiting(stand, 0, bytes_min=1_000_000, bytes_max=3)) == ["abc"]


async def test_a_record_that_comes_while_the_fetch_looks_is_not_missed(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read looks, then the end moves, then the read returns empty: the fetch must look again."""
    read = stand.engine.read

    async def slow_read(*args: object, **kwargs: object) -> object:
        found = await read(*args, **kwargs)  # type: ignore[arg-type]  # passed through as they came
        if stand.engine.bounds("t", 0).end == 0:
            await stand.put("a")
        return found

    monkeypatch.setattr(stand.engine, "read", slow_read)
    assert _values(await _waiting(stand, 0)) == ["a"]


async def test_nothing_is_left_behind_by_a_fetch_that_waited_or_was_cancelled(stand: Stand) -> None:
    timers = stand.clock.running
    cancelled, answered = _waiting(stand, 0), _waiting(stand, 0)
    await turns()
    cancelled.cancel()
    await stand.put("a")
    await answered
    await turns()
    assert stand.clock.running == timers
    assert stand.engine._partitions["t"][0].watchers == {}


async def test_deleting_the_topic_wakes_the_waiting(stand: Stand) -> None:
    fetching = _waiting(stand, 0)
    await turns()
    await stand.broker.delete_topic(ANN, "t")
    await stand.broker.create_topic(ANN, "t")
    with pytest.raises(UnknownTopic):
        await fetching


async def test_expired_records_are_left_out(stand: Stand) -> None:
    now = stand.clock.now
    record_batch = RecordBatch([b"a", b"b", b"c", b"d", b"e"], expiries=[now + 10, 0, now + 20, now + 10, now + 11])
    await stand.broker.publish(ANN, "t", record_batch)
    assert _values(await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=100)) == ["a", "b", "c", "d", "e"]
    stand.clock.tick(10)
    fetched = await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=100)
    assert _values(fetched) == ["b", "c", "e"]
    assert [offset for batch in fetched.batches for offset in batch.offsets()] == [1, 2, 4]
    assert fetched.next_offset == 5


async def test_a_stretch_of_expired_records_is_passed_over_however_long(stand: Stand) -> None:
    for _ in range(20):
        await stand.broker.publish(ANN, "t", RecordBatch([b"x" * 100] * 10, expiries=[stand.clock.now + 1] * 10))
    await stand.put("alive")
    stand.clock.tick(1)
    fetched = await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=150)
    assert _values(fetched) == ["alive"]


async def test_where_all_is_expired_a_fetch_tells_where_to_go_on_and_may_wait(stand: Stand) -> None:
    await stand.broker.publish(ANN, "t", RecordBatch([b"x"] * 10, expiries=[stand.clock.now + 1] * 10))
    stand.clock.tick(1)
    fetched = await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=100)
    assert (fetched.batches, fetched.next_offset) == ([], 10)
    fetching = _waiting(stand, 0)
    await turns()
    assert not fetching.done()
    await stand.put("alive")
    assert _values(await fetching) == ["alive"]


async def test_where_compaction_left_nothing_a_fetch_ends_and_tells_where_to_go_on(stand: Stand) -> None:
    config = TopicConfig(cleanup=Cleanup.COMPACT, tombstone_retention_ms=1)
    await stand.broker.create_topic(ANN, "c", config=config)
    await stand.broker.publish(ANN, "c", RecordBatch([b"1", None], [b"k", b"k"]))
    stand.clock.tick(10)
    await stand.broker.maintain()
    fetched = await stand.broker.fetch(ANN, "c", 0, 0, bytes_max=100)
    assert (fetched.batches, fetched.next_offset) == ([], 2)


async def test_only_so_many_may_wait() -> None:
    stand = Stand(BrokerSettings(waiting_fetches_max=2))
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    waiting = [_waiting(stand, 0) for _ in range(2)]
    await turns()
    with pytest.raises(Unavailable):
        await stand.broker.fetch(ANN, "t", 0, 0, bytes_max=1, wait_ms=1)
    await stand.put("a")
    await asyncio.gather(*waiting)
    await stand.broker.close()


async def test_a_time_is_turned_into_an_offset(stand: Stand) -> None:
    await stand.put("a", "b")
    stand.clock.tick(5)
    await stand.put("c")
    assert await stand.broker.offset_for_time(ANN, "t", 0, stand.clock.now) == 2
    assert await stand.broker.offset_for_time(ANN, "t", 0, stand.clock.now + 1) == 3
