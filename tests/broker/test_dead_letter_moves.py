"""Moves of many records to the dead letters: repeated moves store each record once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.dead_letters import moves as dead_letter_moves
from headrace.errors import DiskFull, InvalidRequest, UnknownPartition, UnknownTopic
from headrace.limits import DEAD_LETTERS_MOVED_MAX
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    for partition in (0, 1):
        await harness.put(*(f"{partition}{index}" for index in range(10)), partition=partition)
    return harness


async def _move(harness: Harness, *places: tuple[int, int], reason: str = "pipeline") -> int:
    entries = [(partition, offset, f"bad {partition}-{offset}") for partition, offset in places]
    return await harness.broker.move_many_to_dead_letters(ANN, "t", entries, reason=reason)


async def _origins(harness: Harness) -> list[tuple[str, int | None, int | None]]:
    entries = await harness.broker.dead_letters(ANN, "t", records_max=10_000, replayed=True)
    return [(entry.reason, entry.source_partition, entry.source_offset) for entry in entries]


async def test_many_records_of_several_partitions_are_one_append(harness: Harness) -> None:
    await _move(harness, (0, 9))  # the topic exists
    appends = harness.engine.appends
    assert await _move(harness, (1, 3), (0, 7), (1, 4)) == 3
    assert harness.engine.appends == appends + 1
    entries = await harness.broker.dead_letters(ANN, "t", records_max=10)
    assert [(entry.value, entry.error, entry.reason, entry.attempts) for entry in entries[1:]] == [
        (b"07", "bad 0-7", "pipeline", 0),
        (b"13", "bad 1-3", "pipeline", 0),
        (b"14", "bad 1-4", "pipeline", 0),
    ]


async def test_what_is_there_for_the_same_reason_is_left_alone(harness: Harness) -> None:
    assert await _move(harness, (0, 1), (0, 2), (0, 2)) == 2
    assert await _move(harness, (0, 2), (0, 3)) == 1
    assert await _move(harness, (0, 1), reason="unreadable") == 1
    assert await _origins(harness) == [("pipeline", 0, 1), ("pipeline", 0, 2), ("pipeline", 0, 3), ("unreadable", 0, 1)]


async def test_a_restarted_broker_knows_what_it_has_moved(harness: Harness) -> None:
    await _move(harness, (0, 1), (1, 1))
    await harness.crash()
    assert await _move(harness, (0, 1), (1, 1), (1, 2)) == 1
    assert len(await _origins(harness)) == 3


async def test_a_replayed_dead_letter_is_not_moved_again(harness: Harness) -> None:
    await _move(harness, (0, 1))
    await harness.broker.replay(ANN, "t", ["0-0"])
    assert await _move(harness, (0, 1)) == 0
    assert await _move(harness, (0, 10)) == 1, "the replayed record is another one, and may be bad again"


async def test_purged_dead_letters_may_come_again(harness: Harness) -> None:
    await _move(harness, (0, 1))
    await harness.broker.purge_dead_letters(ANN, "t")
    assert await _move(harness, (0, 1)) == 1


async def test_a_topic_made_again_has_other_records_at_the_same_offsets(harness: Harness) -> None:
    await _move(harness, (0, 1))
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    await harness.put("new", "newer")
    assert await _move(harness, (0, 1)) == 1
    entries = await harness.broker.dead_letters(ANN, "t", records_max=10)
    assert [entry.value for entry in entries] == [b"01", b"newer"]


async def test_a_tombstone_and_an_empty_value_are_two_things(harness: Harness) -> None:
    await harness.broker.publish(ANN, "t", RecordBatch([None, b""], [b"k", b"k"]), partition=0)
    assert await _move(harness, (0, 10), (0, 11)) == 2
    entries = await harness.broker.dead_letters(ANN, "t", records_max=10)
    assert [entry.value for entry in entries] == [None, b""]


async def test_what_is_not_in_the_log_is_left_out(harness: Harness) -> None:
    assert await _move(harness, (0, 10), (0, 99), (1, 5)) == 1
    assert await _move(harness) == 0
    assert await _origins(harness) == [("pipeline", 1, 5)]


async def test_calls_at_the_same_time_add_each_record_once(harness: Harness) -> None:
    moved = await asyncio.gather(*(_move(harness, (0, index), (0, index + 1)) for index in range(5)))
    assert sum(moved) == 6
    assert sorted(await _origins(harness)) == [("pipeline", 0, index) for index in range(6)]


async def test_a_caller_that_went_away_leaves_no_gap_for_a_second_copy(harness: Harness) -> None:
    await _move(harness, (0, 9))
    harness.engine.hold()
    first = asyncio.create_task(_move(harness, (0, 1)))
    await turns()
    first.cancel()
    second = asyncio.create_task(_move(harness, (0, 1)))
    await turns()
    harness.engine.let_go()
    assert await second == 0
    assert await _origins(harness) == [("pipeline", 0, 9), ("pipeline", 0, 1)]


async def test_a_full_disk_is_reported_and_the_move_can_be_repeated(harness: Harness) -> None:
    await _move(harness, (0, 9))
    harness.engine.error, harness.engine.topic = DiskFull("full"), "t.dlq"
    with pytest.raises(DiskFull):
        await _move(harness, (0, 1))
    harness.engine.error = None
    assert await _move(harness, (0, 1)) == 1


async def test_more_than_fits_in_memory_goes_in_several_appends(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_moves, "_APPEND_BYTES", 6)
    await _move(harness, (0, 9))
    appends = harness.engine.appends
    assert await _move(harness, *((1, index) for index in range(10))) == 10
    assert harness.engine.appends == appends + 4
    assert await _move(harness, *((1, index) for index in range(10))) == 0


async def test_what_is_remembered_is_bounded_and_read_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_moves, "DEAD_LETTERS_REMEMBERED_MAX", 3)
    await harness.broker.create_topic(ANN, "u")
    await harness.put("a", "b", topic="u")
    for moved in (3, 0):
        assert await _move(harness, (0, 1), (0, 2), (0, 3)) == moved
    await harness.broker.move_many_to_dead_letters(ANN, "u", [(0, 0, "")])
    assert list(harness.broker._moves._known) == ["t.dlq", "u.dlq"]
    await harness.broker.move_many_to_dead_letters(ANN, "u", [(0, 1, "")])
    assert list(harness.broker._moves._known) == ["u.dlq"]
    assert await _move(harness, (0, 1), (0, 2), (0, 3), (0, 4)) == 1


async def test_requests_that_cannot_be_meant(harness: Harness) -> None:
    with pytest.raises(UnknownTopic):
        await harness.broker.move_many_to_dead_letters(ANN, "none", [])
    with pytest.raises(UnknownPartition):
        await _move(harness, (0, 1), (2, 0))
    with pytest.raises(InvalidRequest, match="reason"):
        await _move(harness, (0, 1), reason="")
    assert await _origins(harness) == []


async def test_the_limit_of_one_move_is_met_and_not_passed(harness: Harness) -> None:
    assert await _move(harness, *((0, index) for index in range(DEAD_LETTERS_MOVED_MAX))) == 10
    with pytest.raises(InvalidRequest, match=str(DEAD_LETTERS_MOVED_MAX)):
        await _move(harness, *((0, index) for index in range(DEAD_LETTERS_MOVED_MAX + 1)))


@settings(max_examples=30)
@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=8),
            st.sampled_from(["crash", "full"]),
        ),
        max_size=8,
    )
)
async def test_whatever_is_asked_for_lies_there_once(steps: list[list[tuple[int, int]] | str]) -> None:
    harness = Harness()
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t", partitions=2)
    for partition in (0, 1):
        await harness.put(*map(str, range(10)), partition=partition)
    wanted: set[tuple[int, int]] = set()
    for step in steps:
        if step == "crash":
            await harness.crash()
        elif step == "full":
            harness.engine.error, harness.engine.topic = (None, None) if harness.engine.error else (DiskFull("full"), "t.dlq")
        elif isinstance(step, list):
            try:
                assert await _move(harness, *step) == len(set(step) - wanted)
            except DiskFull:
                continue
            wanted |= set(step)
    harness.engine.error = None
    assert sorted(await _origins(harness)) == [("pipeline", *place) for place in sorted(wanted)]
    await harness.broker.close()


async def test_others_are_served_while_many_dead_letters_are_read(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads from the page cache do not wait: a long dead-letter topic must not block the loop."""
    monkeypatch.setattr(dead_letter_moves, "_READ_BYTES", 1)
    places = [(partition, offset) for partition in (0, 1) for offset in range(10)]
    for place in places:
        await _move(harness, place)  # one batch each
    harness.broker._moves.topic_gone("t.dlq")
    seen = 0

    async def watch() -> None:
        nonlocal seen
        while True:
            seen += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    assert await _move(harness, *places) == 0
    watching.cancel()
    assert seen >= 2 * len(places)
