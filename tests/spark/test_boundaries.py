"""Starting and ending offsets in all forms, and their precedence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.errors import ConfigError
from headrace.spark.boundaries import Boundary
from headrace.spark.offsets import Offsets, TopicPartition
from headrace.spark.options import Options

FIRSTS: Offsets = {("t", 0): 5, ("t", 1): 0}
ENDS: Offsets = {("t", 0): 10, ("t", 1): 20}
STAMPS = {("t", 0): 7, ("t", 1): None}


def at(times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
    return {place: STAMPS[place] for place in times}


def start(streaming: bool = True, /, **options: str) -> Offsets:
    return Boundary.start(Options(options), streaming=streaming).resolve(FIRSTS, ENDS, at)


def end(**options: str) -> Offsets:
    return Boundary.end(Options(options)).resolve(FIRSTS, ENDS, at)


def test_a_stream_starts_at_the_latest_and_a_batch_at_the_earliest() -> None:
    assert start(True) == ENDS
    assert start(False) == FIRSTS
    assert end() == ENDS


@pytest.mark.parametrize("text, offsets", [("earliest", FIRSTS), ("latest", ENDS), ("EARLIEST", FIRSTS)])
def test_words_mean_every_partition(text: str, offsets: Offsets) -> None:
    assert start(startingOffsets=text) == offsets


def test_offsets_by_partition_may_say_earliest_and_latest() -> None:
    assert start(startingOffsets='{"t":{"0":-2,"1":-1}}') == {("t", 0): 5, ("t", 1): 20}
    assert start(startingOffsets='{"t":{"0":8,"1":9}}') == {("t", 0): 8, ("t", 1): 9}
    assert end(endingOffsets='{"t":{"0":8,"1":-1}}') == {("t", 0): 8, ("t", 1): 20}


def test_a_time_for_all_wins_over_times_by_partition_and_those_over_offsets() -> None:
    by_partition = '{"t":{"0":1000,"1":1000}}'
    options = {"startingOffsetsByTimestampStrategy": "latest", "startingOffsets": "earliest"}
    assert start(**options, startingOffsetsByTimestamp=by_partition) == {("t", 0): 7, ("t", 1): 20}
    boundary = Boundary.start(Options({**options, "startingOffsetsByTimestamp": by_partition, "startingTimestamp": "2000"}), streaming=True)
    assert (boundary.option, boundary.time_ms, boundary.times) == ("startingTimestamp", 2000, None)
    ending = Boundary.end(Options({"endingTimestamp": "3", "endingOffsetsByTimestamp": by_partition, "endingOffsets": "latest"}))
    assert (ending.option, ending.time_ms) == ("endingTimestamp", 3)


def test_a_start_at_a_time_that_no_record_has_reached_is_an_error_unless_the_strategy_says_latest() -> None:
    with pytest.raises(ConfigError, match="option startingTimestamp: topic t, partition 1 has no record at 99 or later; .*Strategy=latest"):
        start(startingTimestamp="99")
    assert start(startingTimestamp="99", startingOffsetsByTimestampStrategy="latest") == {("t", 0): 7, ("t", 1): 20}


def test_an_end_at_a_time_that_no_record_has_reached_is_the_latest() -> None:
    assert end(endingTimestamp="99") == {("t", 0): 7, ("t", 1): 20}
    assert end(endingOffsetsByTimestamp='{"t":{"0":1,"1":1}}') == {("t", 0): 7, ("t", 1): 20}


@pytest.mark.parametrize("text", ["latest", '{"t":{"0":-1,"1":3}}'])
def test_a_batch_cannot_start_at_the_latest(text: str) -> None:
    with pytest.raises(ConfigError, match="startingOffsets: a batch query cannot start at latest"):
        start(False, startingOffsets=text)


@pytest.mark.parametrize("text", ["earliest", '{"t":{"0":-2,"1":3}}'])
def test_a_batch_cannot_end_at_the_earliest(text: str) -> None:
    with pytest.raises(ConfigError, match="endingOffsets: a batch query cannot end at earliest"):
        end(endingOffsets=text)


def test_a_partition_that_was_forgotten_is_named() -> None:
    with pytest.raises(ConfigError, match="startingOffsets does not name partition 1 of t; -2 means earliest and -1 latest"):
        start(startingOffsets='{"t":{"0":1}}')
    with pytest.raises(ConfigError, match="startingOffsetsByTimestamp does not name partition 0 of t"):
        start(startingOffsetsByTimestamp='{"t":{"1":1}}')


def test_a_partition_that_is_not_read_is_named() -> None:
    with pytest.raises(ConfigError, match="endingOffsets names partition 0 of u, partition 2 of u, which the query does not read"):
        end(endingOffsets='{"t":{"0":1,"1":2},"u":{"0":1,"2":1}}')


def test_many_forgotten_partitions_are_counted() -> None:
    boundary = Boundary.start(Options({"startingOffsets": '{"t":{"0":1}}'}), streaming=True)
    with pytest.raises(ConfigError, match="does not name partition 1 of t, partition 2 of t, partition 3 of t and 6 more"):
        boundary.resolve({}, {("t", index): 1 for index in range(10)}, at)


@pytest.mark.parametrize("text", ["first", "23", "[1]"])
def test_any_other_word_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="option startingOffsets: expected earliest, latest or offsets such as"):
        start(startingOffsets=text)


def test_a_time_is_a_number_of_milliseconds() -> None:
    with pytest.raises(ConfigError, match='startingTimestamp: expected a number of at least 0, got "yesterday"'):
        start(startingTimestamp="yesterday")
