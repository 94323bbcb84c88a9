"""The driver side of a stream, without Spark."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from typing import cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows

from headrace.errors import ConfigError, NotAuthorized, Unavailable
from headrace.flight.client import FlightClient
from headrace.spark import progress as progress_module
from headrace.spark.progress import Progress
from headrace.spark.ranges import DataLost, Range
from headrace.spark.stream_reader import PATTERN_SECONDS, WAIT_MS, StreamReader
from tests.spark.fakes import FakeClient, range_reader, state, use

ALL = ReadAllAvailable()


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient({"t": state("t", 10, 20)})
    use(made, monkeypatch)
    return made


def stream(clock: Clock | None = None, /, **options: str) -> StreamReader:
    asked = options if {"assign", "subscribePattern"} & options.keys() else {"subscribe": "t", **options}
    return StreamReader(range_reader(True, **{"startingOffsets": "earliest", **asked}), clock=clock or Clock())


def at(*ends: int) -> dict[str, dict[str, int]]:
    return {"t": {str(index): end for index, end in enumerate(ends)}}


def test_the_initial_offset_stays_what_it_was(client: FakeClient) -> None:
    reader = stream(startingOffsets="latest")
    assert reader.initialOffset() == at(10, 20)
    client.put(state("t", 15, 25))
    assert reader.initialOffset() == at(10, 20)


@pytest.mark.parametrize("options", [{}, {"subscribePattern": "t.*"}])
def test_the_checkpoint_of_another_source_is_rejected(client: FakeClient, options: dict[str, str]) -> None:
    client.put(state("other", 5))
    reader, other = stream(**options), {"other": {"0": 3}}
    with pytest.raises(ConfigError, match="the checkpoint belongs to another source: it holds offsets of other, but the query reads t"):
        reader.latestOffset(other, ALL)
    with pytest.raises(ConfigError, match="the checkpoint belongs to another source"):
        reader.partitions(other, {"other": {"0": 5}})
    assert reader.latestOffset({**other, **at(10, 20)}, ALL) == at(10, 20)


def test_a_pattern_without_a_topic_does_not_ask_for_one_all_the_time(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), 0
    topics = FakeClient.topics

    def counted(self: FakeClient) -> list[str]:
        nonlocal asked
        asked += 1
        return topics(self)

    monkeypatch.setattr(FakeClient, "topics", counted)
    reader = stream(clock, subscribePattern="none.*")
    assert [reader.latestOffset({}, ALL) for _ in range(3)] == [{}, {}, {}]
    assert asked == 1
    client.put(state("none.yet", 4))
    clock.seconds += PATTERN_SECONDS
    assert reader.latestOffset({}, ALL) == {"none.yet": {"0": 4}}


def test_a_stream_may_start_at_a_time_or_at_offsets(client: FakeClient) -> None:
    client.times = {("t", 0): [100 * index for index in range(10)], ("t", 1): [100 * index for index in range(20)]}
    assert stream(startingTimestamp="350").initialOffset() == at(4, 4)
    assert stream(startingOffsetsByTimestamp='{"t":{"0":0,"1":1000}}').initialOffset() == at(0, 10)
    assert stream(startingTimestamp="1500", startingOffsetsByTimestampStrategy="latest").initialOffset() == at(10, 15)
    assert stream(startingOffsets='{"t":{"0":-1,"1":7}}').initialOffset() == at(10, 7)
    with pytest.raises(
        DataLost, match="option startingOffsets: offset 11 of topic t, partition 0 is out of range, the log holds offsets 0 to 9"
    ):
        stream(startingOffsets='{"t":{"0":11,"1":7}}').initialOffset()
    assert stream(startingOffsets='{"t":{"0":11,"1":7}}', failOnDataLoss="false").initialOffset() == at(10, 7)


def test_everything_there_is_without_a_limit(client: FakeClient) -> None:
    reader = stream()
    assert reader.getDefaultReadLimit() == ALL
    assert reader.latestOffset(reader.initialOffset(), ALL) == at(10, 20)
    assert reader.reportLatestOffset() == at(10, 20)
    assert reader.latestOffset(at(10, 20), ALL) == at(10, 20)


def test_the_same_offsets_are_the_same_text_whatever_spark_hands_in(client: FakeClient) -> None:
    client.put(state("t", *range(12)))
    disordered = {"t": {str(index): index for index in reversed(range(12))}}
    assert json.dumps(stream().latestOffset(disordered, ALL)) == json.dumps(at(*range(12)))


def test_a_limit_is_divided_and_ends_exactly(client: FakeClient) -> None:
    reader = stream(maxOffsetsPerTrigger="12")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(12)
    first = reader.latestOffset(reader.initialOffset(), limit)
    assert first == at(4, 8)
    second = reader.latestOffset(first, limit)
    assert second == at(8, 16)
    assert reader.latestOffset(second, limit) == at(10, 20)


def test_a_trigger_that_wants_everything_gets_it_whatever_the_limit(client: FakeClient) -> None:
    reader = stream(maxOffsetsPerTrigger="12", minOffsetsPerTrigger="12")
    assert reader.latestOffset(reader.initialOffset(), ALL) == at(10, 20)


def test_a_limit_of_bytes_goes_by_the_average_record(client: FakeClient) -> None:
    reader = stream(maxBytesPerTrigger="1500")
    assert reader.getDefaultReadLimit() == ReadMaxBytes(1500)
    assert reader.latestOffset(reader.initialOffset(), ReadMaxBytes(1500)) == at(5, 10)
    both = stream(maxBytesPerTrigger="1500", maxOffsetsPerTrigger="3")
    assert both.latestOffset(both.initialOffset(), both.getDefaultReadLimit()) == at(1, 2)


def test_a_batch_is_held_back_until_enough_is_there_or_the_delay_is_over(client: FakeClient) -> None:
    clock = Clock()
    reader = stream(clock, minOffsetsPerTrigger="10", maxTriggerDelay="60s")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    assert reader.latestOffset(reader.initialOffset(), limit) == at(10, 20)
    client.put(state("t", 12, 22))
    assert reader.latestOffset(at(10, 20), limit) == at(10, 20)
    client.put(state("t", 15, 25))
    assert reader.latestOffset(at(10, 20), limit) == at(15, 25), "enough"
    client.put(state("t", 16, 25))
    clock.seconds += 59.9
    assert reader.latestOffset(at(15, 25), limit) == at(15, 25)
    clock.seconds += 0.1
    assert reader.latestOffset(at(15, 25), limit) == at(16, 25), "waited long enough"


def test_available_now_waits_for_nothing_and_stops_where_it_found_the_end(client: FakeClient) -> None:
    reader = stream(minOffsetsPerTrigger="1000", maxOffsetsPerTrigger="1000")
    reader.prepareForTriggerAvailableNow()
    client.put(state("t", 50, 60, 70))
    assert reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit()) == at(10, 20)
    assert reader.latestOffset(at(10, 20), reader.getDefaultReadLimit()) == at(10, 20)
    assert client.waits == []


def test_the_broker_waits_only_when_there_is_nothing_to_do(client: FakeClient) -> None:
    reader = stream()
    reader.latestOffset(reader.initialOffset(), ALL)
    reader.latestOffset(at(10, 20), ALL)
    reader.latestOffset(at(10, 20), ALL)
    assert client.waits == [0, WAIT_MS, WAIT_MS]
    client.put(state("t", 11, 20))
    assert reader.latestOffset(at(10, 20), ALL) == at(11, 20)


def test_a_new_partition_is_read_from_its_first_record_and_an_empty_one_makes_no_batch(client: FakeClient) -> None:
    reader = stream()
    reader.initialOffset()
    client.put(state("t", 10, 20, 0))
    assert reader.latestOffset(at(10, 20), ALL) == at(10, 20)
    client.put(state("t", 10, 20, 3))
    assert reader.latestOffset(at(10, 20), ALL) == at(10, 20, 3)
    assert reader.partitions(at(10, 20), at(10, 20, 3)) == [Range("t", 2, 0, 3)]


def test_a_pattern_finds_new_topics_after_a_second(client: FakeClient) -> None:
    clock = Clock()
    reader = stream(clock, subscribePattern="t.*")
    assert reader.latestOffset(reader.initialOffset(), ALL) == at(10, 20)
    client.put(state("t2", 5))
    assert reader.latestOffset(at(10, 20), ALL) == at(10, 20)
    clock.seconds += 1.0
    assert reader.latestOffset(at(10, 20), ALL) == {**at(10, 20), "t2": {"0": 5}}


def test_assigned_partitions_alone_are_watched(client: FakeClient) -> None:
    reader = stream(assign='{"t":[1]}')
    assert reader.latestOffset(reader.initialOffset(), ALL) == {"t": {"1": 20}}
    client.put(state("t", 99, 20))
    assert reader.latestOffset({"t": {"1": 20}}, ALL) == {"t": {"1": 20}}


def test_a_deleted_topic_ends_the_query_when_its_batch_is_planned(client: FakeClient) -> None:
    reader = stream()
    reader.latestOffset(reader.initialOffset(), ALL)
    client.states.clear()
    end = reader.latestOffset(at(10, 20), ALL)
    assert end == {}
    with pytest.raises(DataLost, match="topic t has been deleted while the query was reading it"):
        reader.partitions(at(10, 20), end)


def test_without_failing_a_deleted_topic_is_left_behind_and_taken_up_again_when_it_is_recreated(client: FakeClient) -> None:
    reader = stream(failOnDataLoss="false")
    reader.latestOffset(reader.initialOffset(), ALL)
    client.states.clear()
    assert reader.partitions(at(10, 20), reader.latestOffset(at(10, 20), ALL)) == []
    client.put(state("t", 2))
    end = reader.latestOffset({}, ALL)
    assert end == at(2) and reader.partitions({}, end) == [Range("t", 0, 0, 2)]


def test_a_topic_that_was_recreated_is_noticed(client: FakeClient) -> None:
    client.put(state("t", 4, 20))
    end = stream().latestOffset(at(10, 20), ALL)
    assert end == at(4, 20)
    with pytest.raises(DataLost, match="deleted and recreated"):
        stream().partitions(at(10, 20), end)
    assert stream(failOnDataLoss="false").partitions(at(10, 20), end) == [Range("t", 0, 0, 4)]


def test_retention_ahead_of_the_reader_is_noticed_when_the_batch_is_planned(client: FakeClient) -> None:
    client.put(state("t", (30, 40), 20))
    end = stream().latestOffset(at(10, 20), ALL)
    assert end == at(40, 20)
    with pytest.raises(DataLost, match="partition 0: offsets 10 to 29 are gone, the log begins at 30"):
        stream().partitions(at(10, 20), end)
    assert stream(failOnDataLoss="false").partitions(at(10, 20), end) == [Range("t", 0, 30, 40)]


def test_retention_that_took_everything_still_moves_the_query_on(client: FakeClient) -> None:
    client.put(state("t", (40, 40), 20))
    reader = stream(failOnDataLoss="false", maxOffsetsPerTrigger="5")
    end = reader.latestOffset(at(10, 20), reader.getDefaultReadLimit())
    assert end == at(40, 20) and reader.partitions(at(10, 20), end) == []
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end


def test_a_limit_counts_what_is_still_there(client: FakeClient) -> None:
    client.put(state("t", (30, 40), 20))
    reader = stream(failOnDataLoss="false", maxOffsetsPerTrigger="4")
    assert reader.latestOffset(at(10, 20), reader.getDefaultReadLimit()) == at(34, 20)


def test_a_broker_that_is_away_for_a_moment_is_waited_for(client: FakeClient) -> None:
    reader = stream()
    reader.initialOffset()
    client.failures = [Unavailable("away")] * 5
    assert reader.latestOffset(at(0, 0), ALL) == at(10, 20)
    client.failures = [Unavailable("away")] * 5
    assert reader.partitions(at(0, 0), at(10, 0)) == [Range("t", 0, 0, 10)]


def test_ranges_are_cut_as_the_options_say(client: FakeClient) -> None:
    assert len(stream(minPartitions="6").partitions(at(0, 0), at(10, 20))) == 6
    assert all(len(one) <= 3 for one in stream(maxRecordsPerPartition="3").partitions(at(0, 0), at(10, 20)) if isinstance(one, Range))


def test_progress_goes_to_the_group_including_the_last_batch(client: FakeClient) -> None:
    reader = stream()
    reader.prepareForTriggerAvailableNow()
    reader.latestOffset(reader.initialOffset(), ALL)
    reader.latestOffset(at(10, 20), ALL)
    reader.latestOffset(at(10, 20), ALL)
    assert client.commits == [("spark-headrace-t", {"t": {0: 0, 1: 0}}), ("spark-headrace-t", {"t": {0: 10, 1: 20}})]


@pytest.mark.parametrize("options, group", [({"kafka.group.id": "mine"}, "mine"), ({"groupIdPrefix": "us"}, "us-t")])
def test_the_group_may_be_named(client: FakeClient, options: dict[str, str], group: str) -> None:
    reader = stream(**options)
    reader.prepareForTriggerAvailableNow()
    reader.latestOffset(at(1, 2), ALL)
    assert client.commits == [(group, {"t": {0: 1, 1: 2}})]


def test_a_running_query_does_not_wait_for_its_progress_to_be_written() -> None:
    held, client = threading.Event(), FakeClient()

    def commit(group: str, offsets: object) -> None:
        held.wait(60)
        client.commits.append((group, cast("dict[str, dict[int, int]]", offsets)))

    client.commit = commit  # type: ignore[method-assign]  # a broker that takes its time
    progress = Progress(cast(FlightClient, client), "g")
    for offset in range(100):
        progress.report({("t", 0): offset}, wait=False)
    held.set()
    deadline = time.monotonic() + 300
    while not client.commits or client.commits[-1] != ("g", {"t": {0: 99}}):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(client.commits) <= 3, "what came in between is passed over"


def test_progress_without_permission_does_not_stop_a_query(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(failures=[Unavailable("away"), NotAuthorized(principal="ann", action="commit", resource="group:g")])
    progress = Progress(cast(FlightClient, client), "g")
    with caplog.at_level(logging.WARNING, "headrace.spark"):
        for offset in range(4):
            progress.report({("t", 0): offset}, wait=True)
    assert client.commits == [] and "ann may not commit group:g" in caplog.text


def test_progress_that_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_BACKOFF", lambda failures: 0.001)
    for wait in (True, False):
        client = FakeClient(failures=[Unavailable("away")])
        progress = Progress(cast(FlightClient, client), "g")
        deadline = time.monotonic() + 300
        while not client.commits:
            progress.report({("t", 0): 7}, wait=wait)
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert client.commits == [("g", {"t": {0: 7}})]


def test_only_the_reader_of_ranges_travels_to_tasks(client: FakeClient) -> None:
    reader = stream()
    reader.latestOffset(reader.initialOffset(), ALL)
    copy = pickle.loads(pickle.dumps(reader))
    assert isinstance(copy, StreamReader) and copy.__dict__["_states"] == {}


def test_an_end_is_rejected_for_a_stream() -> None:
    with pytest.raises(ConfigError, match="option endingOffsets is for batch queries only: a stream has no end"):
        stream(endingOffsets="latest")


def test_a_minimum_above_the_maximum_is_rejected() -> None:
    with pytest.raises(ConfigError, match="minOffsetsPerTrigger is 5, more than maxOffsetsPerTrigger, which is 4"):
        stream(minOffsetsPerTrigger="5", maxOffsetsPerTrigger="4")
