"""Streams whose records are removed before they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient
from tests.spark.rows import Collected, publish, until, values_of
from tests.spark.rows import load as load_batch
from tests.spark.serving import FlightBroker

Fresh = Callable[..., str]


def let_retention_take_all(broker: FlightBroker, flight_client: FlightClient, topic: str) -> int:
    """Wait for retention; return the first offset afterwards."""
    broker.command("topic", "alter", topic, "--retention", "1ms")
    end = flight_client.describe([topic])[topic].partitions[0].end
    until(lambda: flight_client.describe([topic])[topic].partitions[0].first == end, "retention takes the records")
    broker.command("topic", "alter", topic, "--retention", "7d")
    return end


@pytest.fixture
def half_read(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> Callable[..., Collected]:
    """Return a stream that has read 5 records of `topic`."""

    def make(**options: object) -> Collected:
        topic = fresh_topic()
        publish(flight_client, topic, range(5))
        stream = Collected(spark, broker, tmp_path, subscribe=topic, **options)
        stream.run()
        assert len(stream.values) == 5
        return stream

    return make


def test_retention_ahead_of_the_reader_fails_the_query_with_its_numbers(
    broker: FlightBroker, flight_client: FlightClient, topic: str, half_read: Callable[..., Collected]
) -> None:
    stream = half_read()
    publish(flight_client, topic, range(5, 10))
    let_retention_take_all(broker, flight_client, topic)
    publish(flight_client, topic, range(10, 12))
    with pytest.raises(
        StreamingQueryException, match=rf"topic {topic}, partition 0: offsets 5 to 9 are gone, the log begins at 10 \(retention 7d\)"
    ):
        stream.run()


def test_retention_ahead_of_the_reader_is_stepped_over_if_that_is_wanted(
    broker: FlightBroker, flight_client: FlightClient, topic: str, half_read: Callable[..., Collected]
) -> None:
    stream = half_read(failOnDataLoss=False)
    publish(flight_client, topic, range(5, 10))
    let_retention_take_all(broker, flight_client, topic)
    publish(flight_client, topic, range(10, 12))
    stream.run()
    assert stream.values == ["0", "1", "2", "3", "4", "10", "11"]


def test_retention_that_has_taken_everything_ends_in_nothing_new(
    broker: FlightBroker, flight_client: FlightClient, topic: str, half_read: Callable[..., Collected]
) -> None:
    stream = half_read(failOnDataLoss=False, maxOffsetsPerTrigger=2)
    publish(flight_client, topic, range(5, 10))
    let_retention_take_all(broker, flight_client, topic)
    stream.run()
    assert len(stream.values) == 5
    publish(flight_client, topic, range(10, 12))
    stream.run()
    assert stream.values[5:] == ["10", "11"]


def test_a_topic_that_is_deleted_under_a_query_fails_it(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, topic: str, tmp_path: Path
) -> None:
    fresh_topic()
    publish(flight_client, topic, range(5))
    stream = Collected(spark, broker, tmp_path, subscribe=topic)
    query = stream.start(available_now=False)
    until(lambda: len(stream.values) == 5, "the records are read")
    broker.command("topic", "delete", topic, "--yes")
    with pytest.raises(StreamingQueryException, match=f"topic {topic} has been deleted while the query was reading it"):
        query.awaitTermination(300)


def test_a_topic_that_is_deleted_between_two_executions_is_reported_by_load(
    broker: FlightBroker, topic: str, half_read: Callable[..., Collected]
) -> None:
    stream = half_read()
    broker.command("topic", "delete", topic, "--yes")
    with pytest.raises(AnalysisException, match=f"there is no topic {topic}"):
        stream.run()


def test_a_topic_that_was_recreated_fails_the_query_or_is_read_from_the_front(
    broker: FlightBroker, flight_client: FlightClient, topic: str, half_read: Callable[..., Collected], spark: SparkSession, tmp_path: Path
) -> None:
    stream = half_read()
    broker.command("topic", "delete", topic, "--yes")
    flight_client.create_topic(topic)
    publish(flight_client, topic, [b"new"])
    with pytest.raises(
        StreamingQueryException, match="has read up to offset 5, but the log ends at 1: the topic was deleted and recreated"
    ):
        stream.run()
    tolerant = Collected(spark, broker, tmp_path, subscribe=topic, failOnDataLoss=False)
    tolerant.run()
    assert tolerant.values == ["new"]


def test_a_deleted_topic_is_left_behind_if_that_is_wanted(
    broker: FlightBroker, flight_client: FlightClient, topic: str, half_read: Callable[..., Collected]
) -> None:
    stream = half_read(failOnDataLoss=False)
    broker.command("topic", "delete", topic, "--yes")
    stream.run()
    assert len(stream.values) == 5


def test_a_batch_reads_what_is_left(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, topic: str
) -> None:
    fresh_topic()
    publish(flight_client, topic, range(5))
    let_retention_take_all(broker, flight_client, topic)
    publish(flight_client, topic, range(5, 7))
    assert values_of(load_batch(spark, broker, subscribe=topic)) == ["5", "6"]
