"""Dead letters: none is lost, none is replayed twice."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import DeadLetterEntry, SettlementPolicy, TopicConfig
from headrace.errors import DiskFull, InvalidRequest, UnknownMessage, UnknownPartition
from headrace.limits import DEAD_LETTER_ERROR_BYTES_MAX, DEAD_LETTERS_REPLAYED_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=3)
    return harness


async def _entries(harness: Harness, *, replayed: bool = False) -> list[DeadLetterEntry]:
    return await harness.broker.dead_letters(ANN, "t", records_max=1_000, replayed=replayed)


async def _move(harness: Harness, *values: str, partition: int = 1) -> list[str]:
    """Publish records and move them; return the ids of their dead letters."""
    before = {entry.id for entry in await _entries(harness)}
    for value in values:
        headers = (("own", b"1"),)
        published = await harness.broker.publish(
            ANN, "t", RecordBatch([value.encode()], [b"k" + value.encode()], [headers]), partition=partition
        )
        await harness.broker.move_to_dead_letters(ANN, "t", partition, published.base_offset, error="no good")
    return [entry.id for entry in await _entries(harness) if entry.id not in before]


async def test_a_moved_record_says_where_it_was_and_why(harness: Harness) -> None:
    await harness.put("other", partition=2)
    assert await _move(harness, "a", partition=2) == ["0-0"]
    now = harness.clock.now
    assert await _entries(harness) == [
        DeadLetterEntry("0-0", now, b"ka", b"a", (("own", b"1"),), "moved", "no good", "t", 2, 1, 0, now, now),
    ]
    assert harness.broker.dead_letter_counts(ANN) == {"t": 1}


async def test_a_record_that_is_not_there_cannot_be_moved(harness: Harness) -> None:
    with pytest.raises(UnknownMessage):
        await harness.broker.move_to_dead_letters(ANN, "t", 0, 0)
    with pytest.raises(UnknownPartition):
        await harness.broker.move_to_dead_letters(ANN, "t", 3, 0)
    assert await _entries(harness) == []


async def test_used_up_attempts_are_counted_and_dated(harness: Harness) -> None:
    await harness.put("bad", partition=0)
    policy = SettlementPolicy(attempts_max=2, backoff_ms=0)
    queue = harness.broker.join(ANN, "g", "t", policy=policy, start="earliest")
    first = harness.clock.now
    queue.nack([(await queue.take(1))[0].id])
    harness.clock.tick(500)
    queue.nack([(await queue.take(1))[0].id])
    await turns()
    (entry,) = await _entries(harness)
    assert (entry.reason, entry.attempts, entry.first_failure, entry.last_failure) == ("refused", 2, first, first + 500)


async def test_a_consumer_may_reject_a_record_at_once(harness: Harness) -> None:
    await harness.put("bad", "good", partition=0)
    queue = harness.broker.join(ANN, "g", "t", policy=SettlementPolicy(), start="earliest")
    bad, good = await queue.take(2)
    assert queue.reject([bad.id, 99], "does not parse") == [True, False]
    await turns()
    assert [(entry.value, entry.reason, entry.attempts) for entry in await _entries(harness)] == [(b"bad", "does not parse", 1)]
    queue.ack([good.id])
    await queue.close()
    assert harness.broker.committed(ANN, "g", "t", 0) == 2


async def test_records_refused_before_they_were_written_are_kept_with_their_error(harness: Harness) -> None:
    await harness.broker._dead_letters.reject("t", RecordBatch([b"a", b"b"], [b"k", None]), ["first", "x" * 5_000])
    first, second = await _entries(harness)
    assert (first.value, first.key, first.reason, first.error, first.source_offset) == (b"a", b"k", "rejected", "first", None)
    assert len(second.error) == DEAD_LETTER_ERROR_BYTES_MAX
    replayed = await harness.broker.replay(ANN, "t", [second.id])
    (place,) = replayed.placements.values()
    assert (await harness.records("t", place[0]))[place[1]].value == b"b"


async def test_a_replay_brings_key_and_headers_back_to_the_partition_they_came_from(harness: Harness) -> None:
    (id,) = await _move(harness, "a", partition=2)
    appends = harness.engine.appends
    replayed = await harness.broker.replay(ANN, "t", [id])
    assert harness.engine.appends == appends + 1, "record and mark are one append"
    assert replayed.placements == {id: (2, 1)}
    original, again = await harness.records("t", 2)
    assert (again.key, again.value, again.headers) == (original.key, original.value, original.headers)
    assert await _entries(harness) == []
    (entry,) = await _entries(harness, replayed=True)
    assert entry.id == id and entry.replayed_at is not None


async def test_a_dead_letter_is_replayed_once_even_if_asked_for_at_the_same_time(harness: Harness) -> None:
    (id,) = await _move(harness, "a")
    first, second = await asyncio.gather(
        harness.broker.replay(ANN, "t", [id]), harness.broker.replay(ANN, "t", [id]), return_exceptions=True
    )
    assert not isinstance(first, BaseException) and isinstance(second, UnknownMessage)
    with pytest.raises(UnknownMessage):
        await harness.broker.replay(ANN, "t", [id])
    await harness.crash()
    with pytest.raises(UnknownMessage):
        await harness.broker.replay(ANN, "t", [id])
    assert await harness.values("t", 1) == ["a", "a"]


async def test_a_replay_that_fails_leaves_the_entry(harness: Harness) -> None:
    (id,) = await _move(harness, "a")
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await harness.broker.replay(ANN, "t", [id])
    harness.engine.error = None
    assert [entry.id for entry in await _entries(harness)] == [id]
    await harness.broker.replay(ANN, "t", [id])
    assert await harness.values("t", 1) == ["a", "a"]


async def test_of_several_all_are_replayed_or_none(harness: Harness) -> None:
    ids = await _move(harness, "a", "b", "c")
    with pytest.raises(UnknownMessage):
        await harness.broker.replay(ANN, "t", [*ids, "0-99"])
    assert await harness.values("t", 1) == ["a", "b", "c"]
    await harness.broker.replay(ANN, "t", ids)
    assert await harness.values("t", 1) == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("spelling", ["0-00", "00-0", "000-000", "0-0 ", " 0-0", "+0-0", "0-0\n", "0-\u0660", "0_0-0"])
async def test_a_dead_letter_has_one_id_and_no_other_spelling_of_it(harness: Harness, spelling: str) -> None:
    assert await _move(harness, "a") == ["0-0"]
    for ids in (["0-0", spelling], [spelling]):
        with pytest.raises(UnknownMessage):
            await harness.broker.replay(ANN, "t", ids)
    with pytest.raises(UnknownMessage):
        await harness.broker.dead_letters(ANN, "t", records_max=9, after=spelling)
    assert await harness.values("t", 1) == ["a"]


async def test_an_id_that_is_named_twice_is_replayed_once(harness: Harness) -> None:
    (id,) = await _move(harness, "a")
    replayed = await harness.broker.replay(ANN, "t", [id, id])
    assert replayed.placements == {id: (1, 1)}
    assert await harness.values("t", 1) == ["a", "a"]


@pytest.mark.parametrize("id", ["", "x", "0", "0-", "-1", "0-x", "7-0", "0-99", "0-٣", "0--1", "0-" + "9" * 50])
async def test_an_id_of_nothing_is_refused(harness: Harness, id: str) -> None:
    await _move(harness, "a")
    with pytest.raises(UnknownMessage):
        await harness.broker.replay(ANN, "t", [id])


async def test_a_replay_takes_one_to_a_thousand(harness: Harness) -> None:
    with pytest.raises(InvalidRequest):
        await harness.broker.replay(ANN, "t", [])
    with pytest.raises(InvalidRequest):
        await harness.broker.replay(ANN, "t", [f"0-{number}" for number in range(DEAD_LETTERS_REPLAYED_MAX + 1)])


async def test_marks_melt_into_the_floor(harness: Harness) -> None:
    ids = await _move(harness, *map(str, range(20)))
    for id in [*ids[10:], *ids[:9]]:
        await harness.broker.replay(ANN, "t", [id])
    assert [entry.id for entry in await _entries(harness)] == [ids[9]]
    await harness.broker.replay(ANN, "t", [ids[9]])
    assert harness.broker._dead_letters._marks.floor("t.dlq", 0) == 20
    await harness.crash()
    assert await _entries(harness) == []
    assert harness.broker.dead_letter_counts(ANN) == {"t": 0}
    rows = {record.key: record.value for record in await harness.records("__dead_letters")}
    assert [value for value in rows.values() if value is not None] == [b"20"], "one row is left"


async def test_entries_come_by_the_page(harness: Harness) -> None:
    ids = await _move(harness, *map(str, range(7)))
    seen: list[str] = []
    while page := await harness.broker.dead_letters(ANN, "t", records_max=3, after=seen[-1] if seen else ""):
        seen += [entry.id for entry in page]
    assert seen == ids
    (one,) = await harness.broker.dead_letters(ANN, "t", records_max=10, bytes_max=1)
    assert one.id == ids[0], "at least one, whatever its size"


async def test_a_purge_forgets_everything_and_the_next_dead_letter_starts_over(harness: Harness) -> None:
    assert await harness.broker.purge_dead_letters(ANN, "t") == 0
    ids = await _move(harness, "a", "b")
    await harness.broker.replay(ANN, "t", [ids[0]])
    assert await harness.broker.purge_dead_letters(ANN, "t") == 1
    assert await _entries(harness, replayed=True) == []
    (again,) = await _move(harness, "c")
    assert again == "0-0", "the topic is a new one"
    assert [entry.value for entry in await _entries(harness)] == [b"c"], "no mark of the old topic is left"


async def test_marks_of_a_topic_that_went_in_a_crash_are_not_inherited(harness: Harness) -> None:
    (id,) = await _move(harness, "a")
    await harness.broker.replay(ANN, "t", [id])
    await harness.engine.delete_topic("t.dlq")
    await harness.crash()
    await _move(harness, "b")
    assert [entry.value for entry in await _entries(harness)] == [b"b"]


async def test_a_record_published_to_the_topic_by_hand_is_a_dead_letter_too(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t.dlq")
    own = (("x-headrace-color", b"red"), ("y", b"2"))
    await harness.broker.publish(ANN, "t.dlq", RecordBatch([b"v"], [b"k"], [own]))
    (entry,) = await _entries(harness)
    assert (entry.reason, entry.source_partition, entry.headers) == ("published", None, own)
    await harness.broker.replay(ANN, "t", [entry.id])
    found = [record for partition in range(3) for record in await harness.records("t", partition)]
    assert [(record.key, record.value, record.headers) for record in found] == [(b"k", b"v", own)]


# Expiry as a policy

KEPT = TopicConfig(ttl_ms=1_000, dead_letter_expired=True)


async def _sweep(harness: Harness, ms: int) -> None:
    harness.clock.tick(ms)
    await turns()


async def test_expired_records_are_kept_among_the_dead_letters_where_the_topic_asks_for_it(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "short", config=KEPT)
    await harness.broker.publish(ANN, "short", RecordBatch([b"a", b"b"], [b"k", None], [(("own", b"1"),), ()]))
    expiry = harness.clock.now + 1_000
    await _sweep(harness, 999)
    assert await harness.broker.dead_letters(ANN, "short", records_max=9) == []
    await _sweep(harness, 1_001)
    first, second = await harness.broker.dead_letters(ANN, "short", records_max=9)
    assert (first.key, first.value, first.headers, first.reason) == (b"k", b"a", (("own", b"1"),), "expired")
    assert (first.source_offset, second.source_offset, first.first_failure) == (0, 1, expiry)


async def test_no_expired_record_is_moved_twice(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "short", config=KEPT)
    await harness.put("a", topic="short")
    await _sweep(harness, 2_000)
    for _ in range(3):
        await harness.crash()
        await harness.put("b", topic="short")
        await _sweep(harness, 2_000)
    assert await harness.values("short.dlq") == ["a", "b", "b", "b"]


async def test_a_sweep_that_fails_is_made_up_for(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "short", config=KEPT)
    await harness.put("a", topic="short")
    harness.engine.error = DiskFull("full")
    await _sweep(harness, 3_000)
    harness.engine.error = None
    await _sweep(harness, 1_000)
    await _sweep(harness, 1_000)
    assert await harness.values("short.dlq") == ["a"]


async def test_a_sweep_passes_records_that_never_expire_and_stops_at_the_living(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "mixed", config=TopicConfig(dead_letter_expired=True))
    now = harness.clock.now
    await harness.broker.publish(
        ANN, "mixed", RecordBatch([b"for ever", b"short", b"long", b"behind"], expiries=[0, now + 10, now + 9_000, now + 10])
    )
    await _sweep(harness, 2_000)
    assert await harness.values("mixed.dlq") == ["short"]
    await _sweep(harness, 10_000)
    assert await harness.values("mixed.dlq") == ["short", "long", "behind"]


async def test_a_discarded_dead_letter_is_done_and_is_not_published(harness: Harness) -> None:
    first, second, third = await _move(harness, "a", "b", "c")
    before = harness.broker.bounds(ANN, "t", 1)
    await harness.broker.discard_dead_letters(ANN, "t", [second])
    assert [entry.id for entry in await _entries(harness)] == [first, third]
    assert harness.broker.bounds(ANN, "t", 1) == before and harness.broker.dead_letter_counts(ANN) == {"t": 2}
    for id in (second, "0-99", "none"):
        with pytest.raises(UnknownMessage):
            await harness.broker.discard_dead_letters(ANN, "t", [first, id])
    with pytest.raises(UnknownMessage):
        await harness.broker.replay(ANN, "t", [second])
    with pytest.raises(InvalidRequest):
        await harness.broker.discard_dead_letters(ANN, "t", [])
    assert [entry.id for entry in await _entries(harness)] == [first, third], "all or none"


async def test_of_a_replay_and_a_discard_at_the_same_time_one_wins(harness: Harness) -> None:
    (id,) = await _move(harness, "a")
    outcomes = await asyncio.gather(
        harness.broker.replay(ANN, "t", [id]), harness.broker.discard_dead_letters(ANN, "t", [id]), return_exceptions=True
    )
    assert sum(isinstance(outcome, UnknownMessage) for outcome in outcomes) == 1
