"""Errors on the driver before any task starts; none contains a secret."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient
from tests.spark.rows import load, publish
from tests.spark.serving import FlightBroker

Fresh = Callable[..., str]


def test_a_missing_address_is_reported_by_load(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="ConfigError: option kafka.bootstrap.servers is missing"):
        spark.read.format("headrace").option("subscribe", "orders").load()


def test_a_table_of_a_topic_is_an_error_that_names_the_temporary_view(spark: SparkSession, broker: FlightBroker, topic: str) -> None:
    options, name = f"OPTIONS (servers '{broker.address}', subscribe '{topic}')", topic.replace("-", "_")
    with pytest.raises(PySparkException, match="CREATE TABLE … USING headrace is not supported: .*Use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE {name} USING headrace {options}")
    # Spark does not ask the source about a table with columns. It drops the options, so the first use of the table fails.
    spark.sql(f"CREATE TABLE {name} (value BINARY) USING headrace {options}")
    for statement in (f"SELECT * FROM {name}", f"INSERT INTO {name} VALUES (X'00')"):
        with pytest.raises(PySparkException, match="If this is a table: .*Use CREATE TEMPORARY VIEW"):
            spark.sql(statement).collect()
    spark.sql(f"DROP TABLE {name}")


def test_a_misspelt_option_is_reported_by_load(spark: SparkSession, broker: FlightBroker) -> None:
    with pytest.raises(PySparkException, match="there is no option subscibe; did you mean subscribe"):
        load(spark, broker, subscibe="orders")


def test_an_unknown_topic_is_reported_by_load_with_names_like_it(spark: SparkSession, broker: FlightBroker, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    with pytest.raises(PySparkException, match=f"there is no topic {topic}x; did you mean {topic}"):
        load(spark, broker, subscribe=topic + "x")
    with pytest.raises(PySparkException, match=f"there is no topic {topic}x; did you mean {topic}"):
        spark.readStream.format("headrace").option("servers", broker.address).option("subscribe", topic + "x").load()


def test_a_broker_that_does_not_answer_is_reported_by_load(spark: SparkSession) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PySparkException, match=f"no broker answers at {address}: is its Flight endpoint open there"):
            spark.read.format("headrace").options(**{"servers": address, "subscribe": "t", "fetchOffset.numRetries": "0"}).load()


@pytest.mark.parametrize(
    "schema, message",
    [
        ("ofset bigint", "the schema has an unknown column ofset; a topic has key, value"),
        ("value string", "the schema has value as string, expected binary; cast it after load"),
        ("value binary not null", "the schema has value as not null"),
    ],
)
def test_a_schema_that_does_not_fit_is_reported_before_any_task(
    spark: SparkSession, broker: FlightBroker, fresh_topic: Fresh, schema: str, message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        load(spark, broker, schema, subscribe=fresh_topic()).collect()


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"startingOffsets": {"0": 99}},
            "option startingOffsets: offset 99 of topic TOPIC, partition 0 is out of range, the log holds offsets 0 to 2",
        ),
        (
            {"endingOffsets": {"0": 4}},
            "option endingOffsets: offset 4 of topic TOPIC, partition 0 is out of range, the log holds offsets 0 to 2",
        ),
        ({"startingOffsets": {"1": 0}}, "option startingOffsets does not name partition 0 of TOPIC"),
        ({"startingOffsets": "latest"}, "a batch query cannot start at latest"),
        ({"startingTimestamp": 99_999_999_999_999}, "has no record at 99999999999999 or later"),
        ({"kafka.auto.offset.reset": "earliest"}, "kafka.auto.offset.reset is not supported: use startingOffsets"),
    ],
)
def test_offsets_that_are_not_there_are_reported_before_any_task(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, options: dict[str, object], message: str
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(3))
    given = {name: json.dumps({topic: value}) if isinstance(value, dict) else value for name, value in options.items()}
    with pytest.raises(PySparkException, match=message.replace("TOPIC", topic)):
        load(spark, broker, subscribe=topic, **given).collect()
