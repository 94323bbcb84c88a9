"""`df.write.format("headrace")` with a real Spark and a real broker: all rows or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from headrace.flight.client import FlightClient
from headrace.limits import VALUE_BYTES_MAX
from tests.spark.serving import FlightBroker
from tests.spark.sink.conftest import Write
from tests.spark.sink.reading import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def text_of(failure: pytest.ExceptionInfo[BaseException]) -> str:
    return str(failure.value)


def test_rows_arrive_whole_with_keys_headers_and_nulls(spark: SparkSession, flight_client: FlightClient, write: Write, topic: str) -> None:
    frame = spark.createDataFrame(
        [
            ("k", "ü", [("h", b"1"), ("h", b"2")], 1),
            (None, None, None, 2),
            ("", "", [], 3),
        ],
        "key string, value string, headers array<struct<key:string,value:binary>>, ignored int",
    ).coalesce(1)
    write(frame, topic=topic)
    assert rows(flight_client, topic, "key", "value", "headers") == [
        [b"k", "ü".encode(), [{"key": "h", "value": b"1"}, {"key": "h", "value": b"2"}]],
        [None, None, None],
        [b"", b"", None],
    ]


def test_headers_are_left_out_by_option(spark: SparkSession, flight_client: FlightClient, write: Write, topic: str) -> None:
    frame = spark.sql("SELECT 'x' AS value, array(struct('h' AS key, cast('1' AS binary) AS value)) AS headers")
    write(frame, topic=topic, includeHeaders="false")
    assert rows(flight_client, topic, "value", "headers") == [[b"x", None]]


def test_the_order_of_the_dataframe_is_the_order_of_the_log(
    spark: SparkSession, flight_client: FlightClient, write: Write, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic()
    write(spark.range(0, 20_000, 1, 4).selectExpr("cast(id AS string) AS value"), topic=topic)
    assert rows(flight_client, topic, "value") == [[str(number).encode()] for number in range(20_000)]


def test_the_partition_column_places_rows_and_null_leaves_it_to_the_key(
    spark: SparkSession, flight_client: FlightClient, write: Write, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(partitions=3)
    frame = spark.range(90).selectExpr("cast(id AS string) AS value", "'k' AS key", "if(id < 60, cast(id % 2 AS int), NULL) AS partition")
    write(frame.coalesce(1), topic=topic)
    found = {}
    for value, partition in rows(flight_client, topic, "value", "partition"):
        found[int(value)] = partition
    assert {number: place for number, place in found.items() if number < 60} == {number: number % 2 for number in range(60)}
    assert len({place for number, place in found.items() if number >= 60}) == 1 and len(found) == 90


def test_rows_with_one_key_stay_together_and_in_order(
    spark: SparkSession, flight_client: FlightClient, write: Write, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic(partitions=4)
    write(spark.range(1000).coalesce(1).selectExpr("cast(id % 10 AS string) AS key", "cast(id AS string) AS value"), topic=topic)
    places: dict[bytes, set[int]] = {}
    order: dict[bytes, list[int]] = {}
    for key, value, partition in rows(flight_client, topic, "key", "value", "partition"):
        places.setdefault(key, set()).add(partition)
        order.setdefault(key, []).append(int(value))
    assert all(len(found) == 1 for found in places.values()) and len(places) == 10
    assert len(set.union(*places.values())) > 1
    assert all(numbers == sorted(numbers) and len(numbers) == 100 for numbers in order.values())


def test_a_topic_column_spreads_rows_over_topics_in_one_transaction(
    spark: SparkSession, flight_client: FlightClient, write: Write, topic: str
) -> None:
    frame = spark.range(100).select(
        f.concat(f.lit(f"{topic}-"), (f.col("id") % 3).cast("string")).alias("topic"), f.col("id").cast("string").alias("value")
    )
    write(frame)
    for remainder in range(3):
        found = sorted(int(value) for (value,) in rows(flight_client, f"{topic}-{remainder}", "value"))
        assert found == list(range(remainder, 100, 3))


def test_the_option_wins_over_the_topic_column(spark: SparkSession, flight_client: FlightClient, write: Write, topic: str) -> None:
    write(spark.sql("SELECT 'elsewhere' AS topic, 'x' AS value"), topic=topic)
    assert rows(flight_client, topic, "value") == [[b"x"]]
    assert "elsewhere" not in flight_client.topics()


def test_a_value_of_the_largest_size_arrives_and_one_byte_more_does_not(
    spark: SparkSession, flight_client: FlightClient, write: Write, topic: str
) -> None:
    write(spark.sql(f"SELECT repeat('x', {VALUE_BYTES_MAX}) AS value"), topic=topic)
    ((value,),) = rows(flight_client, topic, "value")
    assert value == b"x" * VALUE_BYTES_MAX
    with pytest.raises(PySparkException) as failure:
        write(spark.sql(f"SELECT repeat('x', {VALUE_BYTES_MAX + 1}) AS value UNION ALL SELECT 'small'"), topic=topic)
    assert "exceeds the limit" in text_of(failure)
    assert len(rows(flight_client, topic, "partition")) == 1


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("SELECT 1 AS value", "column 'value' has type int, expected string or binary"),
        ("SELECT 'x' AS value, 1L AS partition", "column 'partition' has type bigint, expected int"),
        ("SELECT 1 AS id", "no column 'value' of type string or binary among the columns ('id')"),
    ],
)
def test_a_wrong_schema_fails_on_the_driver_before_any_task(
    spark: SparkSession, write: Write, fresh_topic: Callable[..., str], query: str, text: str
) -> None:
    topic = fresh_topic()
    write(spark.sql("SELECT 'right' AS value"), topic=topic)
    jobs = job_count(spark)
    assert jobs > 0
    with pytest.raises(PySparkException) as failure:
        write(spark.sql(query), topic=topic)
    assert text in text_of(failure)
    assert job_count(spark) == jobs


def job_count(spark: SparkSession) -> int:
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


def test_overwriting_is_rejected(spark: SparkSession, broker: FlightBroker, topic: str) -> None:
    frame = spark.sql("SELECT 'x' AS value").write.format("headrace").option("topic", topic)
    with pytest.raises(PySparkException) as failure:
        frame.option("kafka.bootstrap.servers", broker.address).mode("overwrite").save()
    assert "a topic cannot be overwritten" in text_of(failure)


def test_a_null_topic_fails_the_write_and_nothing_of_it_is_seen(
    spark: SparkSession, flight_client: FlightClient, write: Write, topic: str
) -> None:
    flight_client.create_topic(topic)
    frame = spark.range(0, 100, 1, 2).select(f.when(f.col("id") < 99, topic).alias("topic"), f.col("id").cast("string").alias("value"))
    with pytest.raises(PySparkException) as failure:
        write(frame)
    assert "column 'topic' is null in 1 of" in text_of(failure)
    assert rows(flight_client, topic, "value") == []


def test_a_failing_task_leaves_nothing_visible(
    spark: SparkSession, flight_client: FlightClient, write: Write, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic()
    frame = spark.range(0, 1000, 1, 2).selectExpr("cast(if(id = 999, raise_error('task of stone'), id) AS string) AS value")
    with pytest.raises(PySparkException) as failure:
        write(frame, topic=topic)
    assert "task of stone" in text_of(failure)
    assert rows(flight_client, topic, "value") == []


def test_an_empty_dataframe_writes_nothing_and_is_no_error(
    spark: SparkSession, flight_client: FlightClient, write: Write, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic()
    write(spark.createDataFrame([], "value string"), topic=topic)
    assert rows(flight_client, topic, "value") == []


def test_a_job_that_is_run_again_under_the_same_version_writes_once(
    spark: SparkSession, flight_client: FlightClient, write: Write, topic: str
) -> None:
    for version in ("1", "1", "2", "1"):
        write(spark.sql(f"SELECT '{version}' AS value"), topic=topic, txnAppId=topic, txnVersion=version)
    assert rows(flight_client, topic, "value") == [[b"1"], [b"2"]]


def test_without_a_version_each_write_counts(spark: SparkSession, flight_client: FlightClient, write: Write, topic: str) -> None:
    for _ in range(2):
        write(spark.sql("SELECT 'x' AS value"), topic=topic)
    assert rows(flight_client, topic, "value") == [[b"x"], [b"x"]]


def test_an_address_without_a_listener_is_an_error_on_the_driver(spark: SparkSession, write: Write, topic: str) -> None:
    with pytest.raises(PySparkException) as failure:
        write(
            spark.sql("SELECT 'x' AS value"), topic=topic, **{"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.delivery.timeout.ms": "1s"}
        )
    assert "127.0.0.1:1" in text_of(failure)
