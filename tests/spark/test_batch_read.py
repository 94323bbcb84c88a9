"""Batch reads through Spark: columns, boundaries, tasks, views."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient
from tests.kafka_fixtures import kafka_arguments
from tests.spark.rows import HEADERS, load, publish, values_of
from tests.spark.serving import FlightBroker

Fresh = Callable[..., str]
VALUE_BYTES = 32 << 20
UTC = datetime.UTC


def stamps(*millis: int) -> pa.Array:
    return pa.array([milli * 1000 for milli in millis], pa.timestamp("us", "UTC"))


def test_all_columns_of_kafkas_source_arrive(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic(partitions=2)
    publish(flight_client, topic, [b"one", None], partition=1, key=pa.array([b"k", None], pa.binary()))
    frame = load(spark, broker, subscribe=topic)
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    first, second = sorted(frame.collect(), key=lambda row: row.offset)
    assert (first.key, first.value, first.topic, first.partition, first.offset) == (b"k", b"one", topic, 1, 0)
    assert (second.key, second.value, second.offset, second.timestampType) == (None, None, 1, 1)
    age = datetime.datetime.now(UTC) - first.timestamp.astimezone(UTC)
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)


def test_headers_arrive_when_requested(spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    headers = pa.array([[{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}], None], HEADERS)
    publish(flight_client, topic, [b"with", b"without"], headers=headers)
    frame = load(spark, broker, subscribe=topic, includeHeaders=True)
    with_, without = sorted(frame.collect(), key=lambda row: row.offset)
    assert [(pair.key, pair.value) for pair in with_.headers] == [("a", b"1"), ("a", b"2")]
    assert without.headers is None


def test_a_schema_picks_columns_in_any_order(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, [b"a", b"b"])
    for schema, rows in {
        "value binary": [(b"a",), (b"b",)],
        "offset bigint, value binary": [(0, b"a"), (1, b"b")],
        "partition int, topic string": [(0, topic)] * 2,
        "headers array<struct<key:string,value:binary>>, offset bigint not null": [(None, 0), (None, 1)],
    }.items():
        assert sorted(map(tuple, load(spark, broker, schema, subscribe=topic).collect())) == rows


def test_unicode_and_bytes_that_are_no_text_come_through(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, topic: str
) -> None:
    name = topic if kafka_arguments(broker.data) else f"заказы-注文-{topic}"  # Kafka allows ASCII names only
    flight_client.create_topic(name)
    publish(flight_client, name, ["Ünïcode 🌊".encode(), b"\xff\x00\xfe", b""])
    rows = sorted(load(spark, broker, subscribe=name).collect(), key=lambda row: row.offset)
    assert [row.value for row in rows] == ["Ünïcode 🌊".encode(), b"\xff\x00\xfe", b""]
    assert {row.topic for row in rows} == {name}


def test_a_value_of_32_mib_comes_through(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, [b"small", b"x" * VALUE_BYTES, b"small"])
    frame = load(spark, broker, "value binary, offset bigint", subscribe=topic)
    sizes = frame.selectExpr("offset", "length(value) AS size", "hex(substr(value, -1)) AS last").orderBy("offset").collect()
    assert [(row["size"], row["last"]) for row in sizes] == [(5, "6C"), (VALUE_BYTES, "78"), (5, "6C")]


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, broker: FlightBroker, fresh_topic: Fresh) -> None:
    assert load(spark, broker, subscribe=fresh_topic(partitions=3)).count() == 0


def test_several_topics_a_pattern_and_single_partitions(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    one, two = fresh_topic(".a", partitions=2), fresh_topic(".b", partitions=2)
    for topic in (one, two):
        for partition in (0, 1):
            publish(flight_client, topic, [f"{topic[-1]}{partition}".encode()], partition=partition)
    assert values_of(load(spark, broker, subscribe=f"{one},{two}")) == ["a0", "a1", "b0", "b1"]
    assert values_of(load(spark, broker, subscribePattern=one[:-1] + "[b-z]")) == ["b0", "b1"]
    assert values_of(load(spark, broker, subscribePattern="nothing-at-all")) == []
    assert values_of(load(spark, broker, assign=json.dumps({one: [1], two: [0]}))) == ["a1", "b0"]


def test_every_form_of_start_and_end(spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh) -> None:
    topic = fresh_topic(partitions=2)
    publish(flight_client, topic, range(10), timestamp=stamps(*range(1000, 11_000, 1000)))
    publish(flight_client, topic, range(10, 20), partition=1, timestamp=stamps(*range(1000, 11_000, 1000)))

    def read(**options: object) -> list[int]:
        return [int(value) for value in values_of(load(spark, broker, subscribe=topic, **options))]

    assert read(startingOffsets="earliest", endingOffsets="latest") == [*range(20)]
    assert read(startingOffsets=json.dumps({topic: {"0": 7, "1": -2}}), endingOffsets=json.dumps({topic: {"0": -1, "1": 2}})) == [
        7,
        8,
        9,
        10,
        11,
    ]
    assert read(startingTimestamp=9500) == [9, 19]
    assert read(startingTimestamp=9000, endingTimestamp=10_000) == [8, 18]
    assert read(startingOffsetsByTimestamp=json.dumps({topic: {"0": 10_000, "1": 9000}})) == [9, 18, 19]
    assert read(endingOffsetsByTimestamp=json.dumps({topic: {"0": 2000, "1": 99_000}})) == [0, *range(10, 20)]
    assert read(startingTimestamp=10_000, startingOffsets="earliest", startingOffsetsByTimestamp=json.dumps({topic: {"0": 0, "1": 0}})) == [
        9,
        19,
    ]
    assert read(startingTimestamp=99_000, startingOffsetsByTimestampStrategy="latest") == []
    assert read(startingOffsets=json.dumps({topic: {"0": 5, "1": 5}}), endingOffsets=json.dumps({topic: {"0": 3, "1": 6}})) == [15]


def test_offsets_out_of_range_may_be_moved(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(3))
    outside = {"startingOffsets": json.dumps({topic: {"0": 1}}), "endingOffsets": json.dumps({topic: {"0": 99}})}
    assert values_of(load(spark, broker, subscribe=topic, failOnDataLoss=False, **outside)) == ["1", "2"]


def test_more_tasks_read_the_same_rows(spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    for start in range(0, 100, 10):
        publish(flight_client, topic, range(start, start + 10))
    whole, parts = load(spark, broker, subscribe=topic), load(spark, broker, subscribe=topic, minPartitions=5)
    assert whole.rdd.getNumPartitions() == 1
    assert parts.rdd.getNumPartitions() == 5
    limited = load(spark, broker, subscribe=topic, maxRecordsPerPartition=30)
    assert limited.rdd.getNumPartitions() == 4
    assert values_of(parts) == values_of(limited) == values_of(whole) == [str(number) for number in range(100)]


def test_a_frame_is_a_snapshot_and_load_sees_what_is_new(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(3))
    frame = load(spark, broker, subscribe=topic)
    assert frame.count() == 3
    publish(flight_client, topic, range(4))
    assert frame.count() == 3
    assert load(spark, broker, subscribe=topic).count() == 7


def test_a_filter_on_one_frame_does_not_change_another_query_of_it(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(10))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(spark, broker, subscribe=topic)
        assert frame.filter("offset > 6 AND partition = 0").count() == 3
        assert frame.count() == 10
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_temporary_view_carries_the_options(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(5))
    spark.sql(f"""CREATE OR REPLACE TEMPORARY VIEW numbers USING headrace OPTIONS (servers "{broker.address}", subscribe "{topic}")""")
    assert spark.sql("SELECT sum(CAST(CAST(value AS STRING) AS INT)) FROM numbers").first()[0] == 10  # type: ignore[index]  # one row


@pytest.mark.parametrize("zone, shown", [("UTC", "2024-01-01 00:00:00.123"), ("Asia/Kolkata", "2024-01-01 05:30:00.123")])
def test_a_time_is_the_same_moment_in_every_zone(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, zone: str, shown: str
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, [b"x"], timestamp=stamps(1704067200123))
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        row = load(spark, broker, subscribe=topic).selectExpr("CAST(timestamp AS STRING) AS shown", "unix_millis(timestamp) AS ms").first()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert row is not None and (row.shown, row.ms) == (shown, 1704067200123)
