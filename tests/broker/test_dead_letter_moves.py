"""Moving many records to the dead letters: however often it is asked for, each of them lies there once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.dead_letters import moves as dead_letter_moves
from headrace.errors import DiskFull, InvalidRequest, UnknownPartition, UnknownTopic
from headrace.limits import DEAD_LETTERS_MOVED_MAX
from headrace.records import RecordBatch
from tests.broker.stand import ANN, Stand, turns


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t", partitions=2)
    for partition in (0, 1):
        await stand.put(*(f"{partition}{index}" for index in range(10)), partition=partition)
    return stand


async def _move(stand: Stand, *places: tuple[int, int], reason: str = "pipeline") -> int:
    entries = [(partition, offset, f"bad {partition}-{offset}") for partition, offset in places]
    return await stand.broker.move_many_to_dead_letters(ANN, "t", entries, reason=reason)


async def _origins(stand: Stand) -> list[tuple[str, int | None, int | None]]:
    entries = await stand.broker.dead_letters(ANN, "t", records_max=10_000, replayed=True)
    return [(entry.reason, entry.source_partition, entry.source_offset) for entry in entries]


async def test_many_records_of_several_partitions_are_one_append(stand: Stand) -> None:
    await _move(stand, (0, 9))  # the topic is there
    appends = stand.engine.appends
    assert await _move(stand, (1, 3), (0, 7), (1, 4)) == 3
    assert stand.engine.appends == appends + 1
    entries = await stand.broker.dead_letters(ANN, "t", records_max=10)
    assert [(entry.value, entry.error, entry.reason, entry.attempts) for entry in entries[1:]] == [
        (b"07", "bad 0-7", "pipeline", 0),
        (b"13", "bad 1-3", "pipeline", 0),
        (b"14", "bad 1-4", "pipeline", 0),
    ]


async def test_what_is_there_for_the_same_reason_is_left_alone(stand: Stand) -> None:
    assert await _move(stand, (0, 1), (0, 2), (0, 2)) == 2
    assert await _move(stand, (0, 2), (0, 3)) == 1
    assert await _move(stand, (0, 1), reason="unreadable") == 1
    assert await _origins(stand) == [("pipeline", 0, 1), ("pipeline", 0, 2), ("pipeline", 0, 3), ("unreadable", 0, 1)]


async def test_a_restarted_broker_knows_what_it_has_moved(stand: Stand) -> None:
    await _move(stand, (0, 1), (1, 1))
    await stand.crash()
    assert await _move(stand, (0, 1), (1, 1), (1, 2)) == 1
    assert len(await _origins(stand)) == 3


async def test_a_replayed_dead_letter_is_not_moved_again(stand: Stand) -> None:
    await _move(stand, (0, 1))
    await stand.broker.replay(ANN, "t", ["0-0"])
    assert await _move(stand, (0, 1)) == 0
    assert await _move(stand, (0, 10)) == 1, "the replayed record is another one, and may be bad again"


async def test_purged_dead_letters_may_come_again(stand: Stand) -> None:
    await _move(stand, (0, 1))
    await stand.broker.purge_dead_letters(ANN, "t")
    assert await _move(stand, (0, 1)) == 1


async def test_a_topic_made_again_has_other_records_at_the_same_offsets(stand: Stand) -> None:
    await _move(stand, (0, 1))
    await stand.broker.delete_topic(ANN, "t")
    await stand.broker.create_topic(ANN, "t")
    await stand.put("new", "newer")
    assert await _move(stand, (0, 1)) == 1
    entries = await stand.broker.dead_letters(ANN, "t", records_max=10)
    assert [entry.value for entry in entries] == [b"01", b"newer"]


async def test_a_tombstone_and_an_empty_value_are_two_things(stand: Stand) -> None:
    await stand.broker.publish(ANN, "t", RecordBatch([None, b""], [b"k", b"k"]), partition=0)
    assert await _move(stand, (0, 10), (0, 11)) == 2
    entries = await stand.broker.dead_letters(ANN, "t", records_max=10)
    assert [entry.value for entry in entries] == [None, b""]


async def test_what_is_not_in_the_log_is_left_out(stand: Stand) -> None:
    assert await _move(stand, (0, 10), (0, 99), (1, 5)) == 1
    assert await _move(stand) == 0
    assert await _origins(stand) == [("pipeline", 1, 5)]


async def test_calls_at_the_same_time_add_each_record_once(stand: Stand) -> None:
    moved = await asyncio.gather(*(_move(stand, (0, index), (0, index + 1)) for index in range(5)))
    assert sum(moved) == 6
    assert sorted(await _origins(stand)) == [("pipeline", 0, index) for index in range(6)]


async def test_a_caller_that_went_away_leaves_no_gap_for_a_second_copy(stand: Stand) -> None:
    await _move(stand, (0, 9))
    stand.engine.hold()
    first = asyncio.create_task(_move(stand, (0, 1)))
    await turns()
    first.cancel()
    second = asyncio.create_task(_move(stand, (0, 1)))
    await turns()
    stand.engine.let_go()
    assert await second == 0
    assert await _origins(stand) == [("pipeline", 0, 9), ("pipeline", 0, 1)]


async def test_a_full_disk_is_told_and_the_move_can_be_asked_for_again(stand: Stand) -> None:
    await _move(stand, (0, 9))
    stand.engine.error, stand.engine.topic = DiskFull("full"), "t.dlq"
    with pytest.raises(DiskFull):
        await _move(stand, (0, 1))
    stand.engine.error = None
    assert await _move(stand, (0, 1)) == 1


async def test_more_than_fits_in_memory_goes_in_several_appends(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_moves, "_APPEND_BYTES", 6)
    await _move(stand, (0, 9))
    appends = stand.engine.appends
    assert await _move(stand, *((1, index) for index in range(10))) == 10
    assert stand.engine.appends == appends + 4
    assert await _move(stand, *((1, index) for index in range(10))) == 0


async def test_what_is_remembered_is_bounded_and_read_again(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_moves, "DEAD_LETTERS_REMEMBERED_MAX", 3)
    await stand.broker.create_topic(ANN, "u")
    await stand.put("a", "b", topic="u")
    for moved in (3, 0):
        assert await _move(stand, (0, 1), (0, 2), (0, 3)) == moved
    await stand.broker.move_many_to_dead_letters(ANN, "u", [(0, 0, "")])
    assert list(stand.broker._moves._known) == ["t.dlq", "u.dlq"]
    await stand.broker.move_many_to_dead_letters(ANN, "u", [(0, 1, "")])
    assert list(stand.broker._moves._known) == ["u.dlq"]
    assert await _move(stand, (0, 1), (0, 2), (0, 3), (0, 4)) == 1


async def test_requests_that_cannot_be_meant(stand: Stand) -> None:
    with pytest.raises(UnknownTopic):
        await stand.broker.move_many_to_dead_letters(ANN, "none", [])
    with pytest.raises(UnknownPartition):
        await _move(stand, (0, 1), (2, 0))
    with pytest.raises(InvalidRequest, match="reason"):
        await _move(stand, (0, 1), reason="")
    assert await _origins(stand) == []


async def test_the_limit_of_one_move_is_met_and_not_passed(stand: Stand) -> None:
    assert await _move(stand, *((0, index) for index in range(DEAD_LETTERS_MOVED_MAX))) == 10
    with pytest.raises(InvalidRequest, match=str(DEAD_LETTERS_MOVED_MAX)):
        await _move(stand, *((0, index) for index in range(DEAD_LETTERS_MOVED_MAX + 1)))


@settings(max_examples=30, deadline=None)
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
    stand = Stand()
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t", partitions=2)
    for partition in (0, 1):
        await stand.put(*map(str, range(10)), partition=partition)
    wanted: set[tuple[int, int]] = set()
    for step in steps:
        if step == "crash":
            await stand.crash()
        elif step == "full":
            stand.engine.error, stand.engine.topic = (None, None) if stand.engine.error else (DiskFull("full"), "t.dlq")
        elif isinstance(step, list):
            try:
                assert await _move(stand, *step) == len(set(step) - wanted)
            except DiskFull:
                continue
            wanted |= set(step)
    stand.engine.error = None
    assert sorted(await _origins(stand)) == [("pipeline", *place) for place in sorted(wanted)]
    await stand.broker.close()


async def test_others_are_served_while_many_dead_letters_are_read(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the page cache is read without waiting: a long dead-letter topic must not be one long turn of the loop."""
    monkeypatch.setattr(dead_letter_moves, "_READ_BYTES", 1)
    places = [(partition, offset) for partition in (0, 1) for offset in range(10)]
    for place in places:
        await _move(stand, place)  # a batch each
    stand.broker._moves.topic_gone("t.dlq")
    seen = 0

    async def watch() -> None:
        nonlocal seen
        while True:
            seen += 1
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    assert await _move(stand, *places) == 0
    watching.cancel()
    assert seen >= 2 * len(places)
