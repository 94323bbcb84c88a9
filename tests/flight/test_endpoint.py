"""The Flight endpoint through `FlightClient`: round trips and errors."""

from __future__ import annotations

import datetime
import itertools
import pickle
import threading
import time

import pyarrow as pa
import pytest

import headrace.arrow
from headrace.broker.publishing.partitioner import partition_of
from headrace.errors import (
    InvalidRequest,
    LimitExceeded,
    OffsetOutOfRange,
    RecordTooLarge,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownStage,
    UnknownTopic,
)
from headrace.flight.client import ALL, READ_SCHEMA, FlightClient, Publication, Servers, StageSize
from headrace.flight.request import HEADERS
from headrace.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from headrace.overview import Traffic
from headrace.records import RecordBatch
from tests.flight.harness import NOW, ROOT, Harness, rows, values


def test_an_address_has_a_port_and_may_say_tls() -> None:
    assert Servers.parse("a, b:1,[::1]:2,::1").addresses == ("a:8815", "b:1", "[::1]:2", "[::1]:8815")
    assert Servers.parse("grpc+tls://a").tls
    assert not Servers.parse("grpc://a:7").tls
    for wrong in ("", ",", "a:b", "a:0", "a:70000", "http://a"):
        with pytest.raises(InvalidRequest):
            Servers.parse(wrong)


def test_servers_travel_to_another_process_and_keep_their_password_to_themselves() -> None:
    servers = Servers.parse("a", user="u", password="secret")
    assert pickle.loads(pickle.dumps(servers)) == servers
    assert "secret" not in repr(servers)
    assert len({servers, Servers.parse("a", user="u", password="secret")}) == 1


def test_topics_are_listed_and_described(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    harness.publish(topic, RecordBatch([b"x"] * 10))
    assert topic in flight_client.topics()
    state = flight_client.describe([topic])[topic]
    assert (state.name, state.retention_ms, state.cleanup) == (topic, 0, "delete")
    (partition,) = state.partitions
    assert (partition.first, partition.end) == (0, 10)
    assert partition.size_bytes > 10


def test_an_unknown_topic_is_unknown_to_every_call(flight_client: FlightClient) -> None:
    for call in (
        lambda: flight_client.describe(["nowhere"]),
        lambda: list(flight_client.read("nowhere", 0, 0, 1)),
        lambda: flight_client.append("nowhere", [values(b"x")]),
        lambda: flight_client.offset_for_time("nowhere", {0: 0}),
        lambda: flight_client.wait({"nowhere": {}}, 0),
        lambda: flight_client.commit("g", {"nowhere": {0: 0}}),
        lambda: flight_client.committed("g", "nowhere"),
        lambda: flight_client.split("nowhere", 0, 0, 1, 2),
        lambda: flight_client.schema("nowhere"),
    ):
        with pytest.raises(UnknownTopic) as caught:
            call()
        assert caught.value.topic == "nowhere"


def test_topics_are_made_once_and_ensured_as_often_as_one_likes(flight_client: FlightClient) -> None:
    flight_client.create_topic("made", 3)
    with pytest.raises(TopicExists):
        flight_client.create_topic("made")
    flight_client.ensure_topic("made")
    flight_client.ensure_topic("ensured")
    state = flight_client.describe(["made", "ensured"])
    assert [len(state[name].partitions) for name in ("made", "ensured")] == [3, 1]


def test_what_is_appended_is_read_with_all_its_columns(flight_client: FlightClient, topic: str) -> None:
    time_of = datetime.datetime(2024, 2, 29, 23, 59, 59, 123_000, datetime.UTC)
    batch = values(
        "wörd",
        None,
        b"",
        key=pa.array([b"k", None, b""], pa.binary()),
        headers=pa.array([[{"key": "ü", "value": b"\0"}], None, []], HEADERS),
        timestamp=pa.array([time_of] * 3, pa.timestamp("us", tz="Europe/Berlin")),
    )
    done = flight_client.append(topic, [batch, batch])
    assert (done.records, done.placements) == (6, [(0, 0, 6)])
    found = rows(flight_client, topic)
    assert [tuple(row) for row in found] == [ALL] * 6
    assert [row["key"] for row in found[:3]] == [b"k", None, b""]
    assert [row["value"] for row in found[:3]] == ["wörd".encode(), None, b""]
    assert [row["headers"] for row in found[:3]] == [[{"key": "ü", "value": b"\0"}], None, None]
    assert {row["timestamp"] for row in found} == {time_of}
    assert {(row["topic"], row["partition"], row["timestampType"]) for row in found} == {(topic, 0, 1)}
    assert [row["offset"] for row in found] == list(range(6))


def test_a_record_without_a_time_has_the_clock_of_the_broker(flight_client: FlightClient, topic: str) -> None:
    flight_client.append(topic, [values(b"x")])
    (row,) = rows(flight_client, topic, columns=["timestamp"])
    assert row["timestamp"] == datetime.datetime.fromtimestamp(NOW / 1000, datetime.UTC)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_unit_and_none_zone_are_taken_as_utc(flight_client: FlightClient, topic: str, unit: str) -> None:
    time_of = datetime.datetime(2024, 1, 1, 12, 0, 1)
    flight_client.append(topic, [values(b"x", timestamp=pa.array([time_of], pa.timestamp(unit)))])
    (row,) = rows(flight_client, topic, columns=["timestamp"])
    assert row["timestamp"] == time_of.replace(tzinfo=datetime.UTC)


@pytest.mark.parametrize("count", [1, 3])
def test_a_time_that_no_calendar_has_does_not_make_its_topic_unreadable(flight_client: FlightClient, topic: str, count: int) -> None:
    """Every protocol accepts the time; it is returned as the last millisecond of the year 9999."""
    times = [(1 << 63) - 1, 253_402_300_799_999, NOW][:count]
    flight_client.append(topic, [values(*[b"x"] * count, timestamp=pa.array(times, pa.timestamp("ms")))])
    last = datetime.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=datetime.UTC)
    assert [row["timestamp"] for row in rows(flight_client, topic)] == [
        last,
        last,
        datetime.datetime.fromtimestamp(NOW / 1000, datetime.UTC),
    ][:count]


def test_a_time_in_seconds_that_does_not_fit_is_rejected_and_not_turned_into_another(flight_client: FlightClient, topic: str) -> None:
    with pytest.raises(InvalidRequest, match="'timestamp' has a time beyond the range of Unix ms"):
        flight_client.append(topic, [values(b"x", timestamp=pa.array([1 << 62], pa.timestamp("s")))])
    assert rows(flight_client, topic) == []


@pytest.mark.parametrize("columns", [["value"], ["offset", "key"], ["topic"], ["partition", "timestampType"], list(reversed(ALL))])
def test_exactly_the_asked_columns_come_in_the_asked_order(flight_client: FlightClient, topic: str, columns: list[str]) -> None:
    flight_client.append(topic, [values(b"a", b"b")])
    (batch,) = flight_client.read(topic, 0, 0, 2, columns=columns)
    assert batch.schema == pa.schema([READ_SCHEMA.field(name) for name in columns])
    assert batch.num_rows == 2


def test_an_unknown_column_is_named(flight_client: FlightClient, topic: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown column 'valeu'"):
        flight_client.read(topic, 0, 0, 0, columns=["valeu"])


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (0, 1), (99, 100), (37, 61), (50, 50), (0, 0), (100, 100)])
def test_a_range_holds_its_rows_and_no_others(harness: Harness, flight_client: FlightClient, topic: str, start: int, stop: int) -> None:
    for first in range(0, 100, 10):
        harness.publish(topic, RecordBatch([b"%d" % number for number in range(first, first + 10)]))
    assert [row["value"] for row in rows(flight_client, topic, 0, start, stop)] == [b"%d" % number for number in range(start, stop)]


@pytest.mark.parametrize(("start", "stop"), [(11, 12), (0, 11), (9, 11)])
def test_a_range_outside_of_the_partition_is_rejected_with_its_bounds(
    harness: Harness, flight_client: FlightClient, topic: str, start: int, stop: int
) -> None:
    harness.publish(topic, RecordBatch([b"x"] * 10))
    with pytest.raises(OffsetOutOfRange) as caught:
        list(flight_client.read(topic, 0, start, stop))
    assert (caught.value.first, caught.value.end) == (0, 10)


def test_a_range_that_ends_before_it_starts_is_rejected(flight_client: FlightClient, topic: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot end at 3 before it starts at 5"):
        list(flight_client.read(topic, 0, 5, 3))


def test_a_partition_that_is_not_there_is_unknown(flight_client: FlightClient, topic: str) -> None:
    with pytest.raises(UnknownPartition):
        list(flight_client.read(topic, 1, 0, 0))
    with pytest.raises(UnknownPartition):
        flight_client.append(topic, [values(b"x")], partition=1)
    with pytest.raises(UnknownPartition):
        flight_client.append(topic, [values(b"x", partition=pa.array([7], pa.int32()))])


def test_an_empty_topic_has_no_batches(flight_client: FlightClient, topic: str) -> None:
    assert list(flight_client.read(topic, 0, 0, 0)) == []
    assert headrace.arrow.read(topic, servers=flight_client._servers).read_all().num_rows == 0


@pytest.mark.parametrize("rows_max", [1, 7, 1_000])
def test_no_batch_has_more_rows_than_asked_for(harness: Harness, flight_client: FlightClient, topic: str, rows_max: int) -> None:
    for _ in range(3):
        harness.publish(topic, RecordBatch([b"x"] * 100))
    sizes = [batch.num_rows for batch in flight_client.read(topic, 0, 0, 300, rows_max=rows_max)]
    assert sum(sizes) == 300
    assert max(sizes) <= rows_max


def test_many_small_batches_of_the_log_become_few_large_ones(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    for number in range(500):
        harness.publish(topic, RecordBatch([b"%d" % number], [b"k"]))
    batches = list(flight_client.read(topic, 0, 0, 500))
    assert len(batches) == 1
    assert batches[0].column("value").to_pylist() == [b"%d" % number for number in range(500)]


def test_keys_go_where_every_other_protocol_sends_them(flight_client: FlightClient, wide: str) -> None:
    keys = [b"key %d" % number for number in range(200)] + [b""]
    flight_client.append(wide, [values(*keys, key=pa.array(keys, pa.binary()))])
    for partition in range(5):
        assert [row["value"] for row in rows(flight_client, wide, partition)] == [key for key in keys if partition_of(key, 5) == partition]


def test_rows_keep_their_order_within_a_partition(flight_client: FlightClient, wide: str) -> None:
    batches = [
        values(*(b"%d" % number for number in range(first, first + 50)), key=pa.array([b"%d" % (n % 7) for n in range(50)], pa.binary()))
        for first in range(0, 500, 50)
    ]
    done = flight_client.append(wide, batches)
    assert done.records == 500
    seen = [[int(row["value"]) for row in rows(flight_client, wide, partition)] for partition in range(5)]
    assert all(found == sorted(found) for found in seen)
    assert sorted(number for found in seen for number in found) == list(range(500))
    assert sum(count for _, _, count in done.placements) == 500


def test_rows_without_keys_go_to_one_partition_and_the_next_put_to_another(flight_client: FlightClient, wide: str) -> None:
    places = {flight_client.append(wide, [values(b"a", b"b"), values(b"c")]).placements[0][0] for _ in range(5)}
    assert places == set(range(5))


def test_a_partition_column_decides_and_where_it_is_null_the_key(flight_client: FlightClient, wide: str) -> None:
    place = partition_of(b"k", 5)
    batch = values(b"a", b"b", b"c", key=pa.array([b"k"] * 3, pa.binary()), partition=pa.array([4, None, 0], pa.int64()))
    flight_client.append(wide, [batch])
    found = {row["value"]: partition for partition in range(5) for row in rows(flight_client, wide, partition)}
    assert found == {b"a": 4, b"b": place, b"c": 0}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"valu": pa.array([b"x"])}, "unknown column 'valu'"),
        ({"key": pa.array([b"x"])}, "the column 'value' is missing"),
        ({"value": pa.array([1])}, "column 'value' is int64; expected binary or string"),
        ({"value": pa.array([b"x"]), "key": pa.array([1.5])}, "column 'key' is double"),
        ({"value": pa.array([b"x"]), "partition": pa.array(["0"])}, "column 'partition' is string; expected an integer"),
        ({"value": pa.array([b"x"]), "timestamp": pa.array([1])}, "column 'timestamp' is int64; expected a timestamp"),
        ({"value": pa.array([b"x"]), "headers": pa.array([["a"]])}, "column 'headers' is list"),
        ({"value": pa.array([b"x"]), "timestamp": pa.array([None], pa.timestamp("ms"))}, "column 'timestamp' is null"),
    ],
)
def test_wrong_columns_are_rejected_by_name_and_nothing_is_written(
    flight_client: FlightClient, topic: str, columns: dict[str, pa.Array], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        flight_client.append(topic, [pa.RecordBatch.from_pydict(columns)])
    assert flight_client.describe([topic])[topic].partitions[0].end == 0


def test_the_largest_value_passes_both_ways_and_one_byte_more_does_not(flight_client: FlightClient, topic: str) -> None:
    largest = bytes(VALUE_BYTES_MAX)
    flight_client.append(topic, [values(b"before", largest, b"after")])
    assert [row["value"] for row in rows(flight_client, topic, columns=["value"])] == [b"before", largest, b"after"]
    with pytest.raises(RecordTooLarge) as caught:
        flight_client.append(topic, [values(largest + b"x")])
    assert (caught.value.size_bytes, caught.value.bytes_max) == (VALUE_BYTES_MAX + 1, VALUE_BYTES_MAX)


def test_the_largest_key_passes_and_one_byte_more_does_not(flight_client: FlightClient, topic: str) -> None:
    largest = bytes(KEY_BYTES_MAX)
    flight_client.append(topic, [values(b"x", key=pa.array([largest], pa.binary()))])
    assert rows(flight_client, topic)[0]["key"] == largest
    with pytest.raises(RecordTooLarge):
        flight_client.append(topic, [values(b"x", key=pa.array([largest + b"x"], pa.binary()))])


def test_a_put_that_fails_says_how_much_of_it_is_durable(flight_client: FlightClient, topic: str) -> None:
    good, bad = values(b"a", b"b", partition=pa.array([0, 0])), values(b"c", partition=pa.array([9]))
    with pytest.raises(UnknownPartition) as caught:
        flight_client.append(topic, [good, good, bad, good])
    assert caught.value.durable_records == 4  # type: ignore[attr-defined]  # what a put adds to whatever it raises
    assert "4 records of the put are durable" in str(caught.value)
    assert flight_client.describe([topic])[topic].partitions[0].end == 4


def test_nothing_appended_is_nothing_answered(flight_client: FlightClient, topic: str) -> None:
    assert flight_client.append(topic, []).records == 0
    assert flight_client.append(topic, [values()]).records == 0


def test_offsets_are_committed_and_found_by_time(harness: Harness, flight_client: FlightClient, wide: str) -> None:
    assert flight_client.committed("g", wide) == {}
    flight_client.commit("g", {wide: {0: 0, 3: 0}})
    assert flight_client.committed("g", wide) == {0: 0, 3: 0}
    harness.publish(wide, RecordBatch([b"a", b"b"], timestamps=[1_000, 2_000]), 2)
    assert flight_client.offset_for_time(wide, {2: 0, 3: 0}) == {2: 0, 3: None}
    assert flight_client.offset_for_time(wide, {2: 1_001}) == {2: 1}
    assert flight_client.offset_for_time(wide, {2: 2_001}) == {2: None}


def test_a_range_is_split_where_batches_begin(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    for _ in range(20):
        harness.publish(topic, RecordBatch([b"x"] * 7))
    parts = flight_client.split(topic, 0, 3, 139, 4)
    assert len(parts) == 4
    assert (parts[0][0], parts[-1][1]) == (3, 139)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(parts))
    assert all(start % 7 == 0 for start, _ in parts[1:])
    assert flight_client.split(topic, 0, 5, 5, 3) == []
    assert flight_client.split(topic, 0, 8, 9, 100) == [(8, 9)]


def test_a_range_inside_one_batch_is_split_too(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    harness.publish(topic, RecordBatch([b"x"] * 100))
    assert flight_client.split(topic, 0, 0, 100, 4) == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_a_wait_ends_when_a_record_comes(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    began = time.monotonic()
    timer = threading.Timer(0.1, lambda: harness.publish(topic, RecordBatch([b"x"])))
    timer.start()
    state = flight_client.wait({topic: {0: 0}}, 60_000)
    timer.join()
    assert state[topic].partitions[0].end == 1
    assert time.monotonic() - began < 50


def test_a_wait_ends_with_its_time_and_at_once_where_there_is_news(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    assert flight_client.wait({topic: {0: 0}}, 50)[topic].partitions[0].end == 0
    harness.publish(topic, RecordBatch([b"x"]))
    assert flight_client.wait({topic: {0: 0}}, 60_000)[topic].partitions[0].end == 1
    assert flight_client.wait({topic: {}}, 60_000)[topic].partitions[0].end == 1


def test_a_wait_ends_when_a_partition_is_added_and_fails_when_the_topic_goes(
    harness: Harness, flight_client: FlightClient, topic: str
) -> None:
    timer = threading.Timer(0.1, lambda: harness.run(harness.broker.alter_topic(ROOT, topic, partitions=2)))
    timer.start()
    assert len(flight_client.wait({topic: {0: 0}}, 30_000)[topic].partitions) == 2
    timer.join()
    timer = threading.Timer(0.1, lambda: harness.run(harness.broker.delete_topic(ROOT, topic)))
    timer.start()
    with pytest.raises(UnknownTopic):
        flight_client.wait({topic: {0: 0, 1: 0}}, 30_000)
    timer.join()


def test_staged_rows_are_seen_once_they_are_published_and_only_once(flight_client: FlightClient, topic: str, wide: str) -> None:
    size = flight_client.stage("h1", [values(b"a", b"b")], topic=topic, writer="app")
    assert size == StageSize(2, 2)
    both = values(b"c", b"d", topic=pa.array([wide, topic]))
    flight_client.stage("h2", [both], topic=None, writer="app", order=1)
    assert flight_client.stage("h3", [], topic=None, writer="app") == StageSize(0, 0)
    assert rows(flight_client, topic) == []
    assert flight_client.last_version("app") is None
    assert flight_client.publish("app", 7, ["h1", "h2", "h3"]) == Publication("app", 7, False, 4)
    assert flight_client.publish("app", 7, ["h1", "h2", "h3"]) == Publication("app", 7, True, 0)
    assert flight_client.last_version("app") == 7
    assert [row["value"] for row in rows(flight_client, topic)] == [b"a", b"b", b"d"]


def test_the_overview_has_the_traffic_of_the_endpoint(flight_client: FlightClient, topic: str) -> None:
    before = flight_client.status().traffic.get("flight", Traffic())
    flight_client.append(topic, [values(b"one", b"three")])
    flight_client.stage("counted", [values(b"xx")], topic=topic, writer="counted")
    flight_client.publish("counted", 1, ["counted"])
    rows(flight_client, topic)
    after = flight_client.status().traffic["flight"]
    assert (after.published_records - before.published_records, after.published_bytes - before.published_bytes) == (3, 10)
    assert after.delivered_records - before.delivered_records == 3
    (mine,) = [row for row in flight_client.topic_counters() if row.topic == topic]
    assert (mine.records, mine.published_records, mine.delivered_records) == (3, 3, 3)


def test_what_is_dropped_cannot_be_published(flight_client: FlightClient, topic: str) -> None:
    flight_client.stage("dropped", [values(b"a")], topic=topic, writer="dropper")
    assert flight_client.drop(["dropped", "never"]) == 1
    with pytest.raises(UnknownStage):
        flight_client.publish("dropper", 1, ["dropped"])
    assert rows(flight_client, topic) == []


def test_a_stage_without_a_topic_is_rejected(flight_client: FlightClient) -> None:
    with pytest.raises(InvalidRequest, match="no topic: set it in the request or add a column 'topic'"):
        flight_client.stage("h", [values(b"a")], topic=None, writer="app")
    with pytest.raises(InvalidRequest, match="column 'topic' is null"):
        flight_client.stage("h", [values(b"a", topic=pa.array([None], pa.string()))], topic=None, writer="app")


def test_bad_records_move_to_the_dead_letters_once(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    harness.publish(topic, RecordBatch([b"a", b"b", b"c"]))
    letters = pa.RecordBatch.from_pydict(
        {"partition": [0, 0], "offset": [0, 2], "error": ["not JSON", None], "reason": ["pipeline", "pipeline"]}
    )
    assert flight_client.dead_letters(topic, letters) == 2
    assert flight_client.dead_letters(topic, letters) == 0
    assert [row["value"] for row in rows(flight_client, f"{topic}.dlq")] == [b"a", b"c"]
    with pytest.raises(InvalidRequest, match="dead letters: expected the columns"):
        flight_client.dead_letters(topic, values(b"x"))


def test_a_closed_client_and_a_broker_that_is_not_there_are_unavailable() -> None:
    client = FlightClient(Servers.parse("127.0.0.1:1", timeout_seconds=2.0))
    with pytest.raises(Unavailable):
        client.topics()
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.topics()


def test_the_second_address_is_asked_when_the_first_does_not_answer(harness: Harness, topic: str) -> None:
    servers = Servers.parse(f"127.0.0.1:1,{harness.endpoint.address}")
    with FlightClient(servers) as client:
        assert topic in client.topics()
    with FlightClient(servers) as client:
        assert client.append(topic, [values(b"x")]).records == 1
    with FlightClient(servers) as client:
        assert len(list(client.read(topic, 0, 0, 1))) == 1


def test_arrow_reads_a_whole_topic_and_writes_tables(harness: Harness, flight_client: FlightClient, wide: str) -> None:
    servers = harness.servers
    table = pa.table({"value": [f"v{number}" for number in range(100)], "key": [f"k{number}" for number in range(100)]})
    assert headrace.arrow.write(wide, table, servers=servers).records == 100
    found = headrace.arrow.read(wide, servers=servers).read_all()
    assert found.schema == READ_SCHEMA
    assert sorted(found.column("value").to_pylist()) == sorted(text.encode() for text in table.column("value").to_pylist())
    (longest, *_) = sorted(range(5), key=lambda partition: -flight_client.describe([wide])[wide].partitions[partition].end)
    part = headrace.arrow.read(wide, servers=servers, partitions=[longest], start={longest: 1}, stop=3, columns=["offset"]).read_all()
    assert part.column("offset").to_pylist() == [1, 2]
    assert headrace.arrow.read(wide, servers=servers, start="latest").read_all().num_rows == 0
    with pytest.raises(UnknownPartition):
        headrace.arrow.read(wide, servers=servers, partitions=[5])
    with pytest.raises(InvalidRequest):
        headrace.arrow.read(wide, servers=servers, start="yesterday")


def test_too_many_headers_are_rejected(flight_client: FlightClient, topic: str) -> None:
    with pytest.raises(LimitExceeded):
        flight_client.append(topic, [values(b"x", headers=pa.array([[{"key": "a", "value": b""}] * 65], HEADERS))])
