"""Planned ranges, reports of data loss, and split of ranges into tasks."""

from __future__ import annotations

import logging
import pickle
from itertools import pairwise
from typing import cast

import pytest

from headrace.flight.client import FlightClient, PartitionState, TopicState
from headrace.spark.offsets import Offsets
from headrace.spark.ranges import TASK_BYTES_TARGET, DataLost, Losses, Range, loss_message, present, split
from tests.spark.fakes import FakeClient, state


def planned(start: Offsets, stop: Offsets, *states: TopicState, fatal: bool = True) -> list[tuple[int, int, int]]:
    found = present(start, stop, {one.name: one for one in states}, Losses(fatal=fatal))
    return [(one.partition, one.start, one.stop) for one in found]


def test_what_lies_between_start_and_stop_is_read_and_nothing_empty() -> None:
    assert planned({("t", 0): 2, ("t", 1): 5}, {("t", 0): 9, ("t", 1): 5}, state("t", 10, 5)) == [(0, 2, 9)]


def test_a_partition_that_appeared_is_read_from_its_first_record() -> None:
    assert planned({("t", 0): 2}, {("t", 0): 2, ("t", 1): 4}, state("t", 2, 4)) == [(1, 0, 4)]


def test_retention_ahead_of_the_reader_is_named_with_its_numbers() -> None:
    with pytest.raises(
        DataLost, match=r"topic t, partition 0: offsets 2 to 6 are gone, the log begins at 7 \(retention 7d\)\. .*failOnDataLoss=false"
    ):
        planned({("t", 0): 2}, {("t", 0): 9}, state("t", (7, 9)))


@pytest.mark.parametrize(
    "retention_ms, words", [(90_000, "90s"), (3_600_000, "1h"), (1_500, "1500ms"), (-1, "cleanup delete, no retention time")]
)
def test_retention_is_shown_in_the_largest_unit(retention_ms: int, words: str) -> None:
    with pytest.raises(DataLost, match=words):
        planned({("t", 0): 0}, {("t", 0): 9}, state("t", (7, 9), retention_ms=retention_ms))


def test_without_failing_the_rest_is_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        assert planned({("t", 0): 2}, {("t", 0): 9}, state("t", (7, 9)), fatal=False) == [(0, 7, 9)]
    assert "offsets 2 to 6 are gone" in caplog.text


def test_everything_may_be_gone() -> None:
    assert planned({("t", 0): 2}, {("t", 0): 5}, state("t", (7, 9)), fatal=False) == []
    with pytest.raises(DataLost, match="offsets 2 to 4 are gone"):
        planned({("t", 0): 2}, {("t", 0): 5}, state("t", (7, 9)))


def test_a_deleted_topic_is_named_with_what_was_not_read() -> None:
    with pytest.raises(DataLost, match="topic t, partition 0: cannot read offsets 2 to 8, the topic has been deleted"):
        planned({("t", 0): 2}, {("t", 0): 9})
    assert planned({("t", 0): 2}, {("t", 0): 9}, fatal=False) == []


def test_a_topic_that_the_batch_does_without_is_reported_if_it_is_gone() -> None:
    with pytest.raises(DataLost, match="topic t has been deleted while the query was reading it"):
        planned({("t", 0): 2}, {})
    assert planned({("t", 0): 2}, {}, state("t", 5)) == [], "no longer subscribed to, but there"


def test_a_topic_that_was_recreated_is_read_from_the_front() -> None:
    with pytest.raises(DataLost, match="has read up to offset 50, but the log ends at 3: the topic was deleted and recreated"):
        planned({("t", 0): 50}, {("t", 0): 3}, state("t", 3))
    assert planned({("t", 0): 50}, {("t", 0): 3}, state("t", 3), fatal=False) == [(0, 0, 3)]
    assert planned({("t", 0): 50}, {("t", 0): 60}, state("t", 3), fatal=False) == [(0, 0, 3)]


def test_a_log_that_ends_before_the_plan_is_read_to_its_end() -> None:
    with pytest.raises(DataLost, match="up to offset 60, but the log ends at 55"):
        planned({("t", 0): 50}, {("t", 0): 60}, state("t", 55))
    assert planned({("t", 0): 50}, {("t", 0): 60}, state("t", 55), fatal=False) == [(0, 50, 55)]


def test_a_task_has_the_same_words_for_what_is_gone() -> None:
    assert loss_message(Range("t", 0, 2, 9), 4, 7, state("t", (7, 9))) == (
        "topic t, partition 0: offsets 4 to 6 are gone, the log begins at 7 (retention 7d)"
    )
    assert loss_message(Range("t", 0, 2, 9), 4, 5, None) == "topic t, partition 0: offset 4 is gone, the log begins at 5"


def tasks(*ranges: Range, tasks_min: int | None = None, task_records_max: int | None = None, sizes: TopicState | None = None) -> list[int]:
    states = {"t": sizes or state("t", 1000, 1000)}
    pieces = split(ranges, states, cast(FlightClient, FakeClient()), tasks_min=tasks_min, task_records_max=task_records_max)
    for one in ranges:
        mine = [piece for piece in pieces if piece.partition == one.partition]
        assert [mine[0].start, mine[-1].stop] == [one.start, one.stop]
        assert all(before.stop == after.start for before, after in pairwise(mine)), "in order, nothing left out"
    return [len(piece) for piece in pieces]


def test_a_partition_is_a_task() -> None:
    assert tasks(Range("t", 0, 0, 10), Range("t", 1, 0, 30)) == [10, 30]


def test_a_wish_for_more_tasks_is_met_in_proportion() -> None:
    assert tasks(Range("t", 0, 0, 10), Range("t", 1, 0, 30), tasks_min=8) == [5, 5, 5, 5, 5, 5, 5, 5]
    assert tasks(Range("t", 0, 0, 10), Range("t", 1, 0, 30), tasks_min=2) == [10, 30]


def test_no_task_has_more_records_than_allowed() -> None:
    assert tasks(Range("t", 0, 0, 10), Range("t", 1, 0, 31), task_records_max=10) == [10, 7, 8, 8, 8]


def test_a_large_range_is_several_tasks_by_default() -> None:
    large = TopicState("t", (PartitionState(0, 100, 4 * TASK_BYTES_TARGET),), 0, "delete")
    assert tasks(Range("t", 0, 0, 100), sizes=large) == [25, 25, 25, 25]
    assert tasks(Range("t", 0, 50, 60), sizes=large) == [10]


def test_a_range_is_small_when_pickled() -> None:
    one = Range("t", 0, 2, 9)
    assert pickle.loads(pickle.dumps(one)) == one and len(one) == 7
