"""Streams through Spark: triggers, limits, new partitions, restarts, progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient, Servers
from tests.spark.rows import Collected, publish, until
from tests.spark.serving import FlightBroker

Fresh = Callable[..., str]


def texts(numbers: range) -> list[str]:
    return [str(number) for number in numbers]


def test_what_is_there_is_read_once_and_the_next_run_reads_what_is_new(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(10))
    stream = Collected(spark, broker, tmp_path, subscribe=topic)
    stream.run()
    assert stream.values == texts(range(10)) and len(stream.batches) == 1
    stream.run()
    assert len(stream.batches) == 1, "nothing new, no batch"
    publish(flight_client, topic, range(10, 15))
    stream.run()
    assert stream.values == texts(range(15)) and len(stream.batches) == 2


def test_a_limit_makes_exactly_as_many_batches_as_it_must(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic(partitions=2)
    publish(flight_client, topic, range(10))
    publish(flight_client, topic, range(10, 13), partition=1)
    stream = Collected(spark, broker, tmp_path, subscribe=topic, maxOffsetsPerTrigger=5)
    query = stream.run()
    assert [len(batch) for batch in stream.batches] == [5, 5, 3]
    assert stream.values == texts(range(13))
    ends = [json.loads(progress.json)["sources"][0]["endOffset"] for progress in query.recentProgress]
    assert ends == [{topic: {"0": 4, "1": 1}}, {topic: {"0": 8, "1": 2}}, {topic: {"0": 10, "1": 3}}]
    latest = json.loads(query.recentProgress[0].json)["sources"][0]["latestOffset"]
    assert latest == {topic: {"0": 10, "1": 3}}


def test_a_limit_of_bytes_makes_several_batches(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, [b"%04d" % number * 2500 for number in range(10)])
    stream = Collected(spark, broker, tmp_path, subscribe=topic, maxBytesPerTrigger="50000")
    stream.run()
    assert 2 <= len(stream.batches) <= 4 and len(stream.values) == 10


def test_the_offsets_in_a_checkpoint_are_kafkas(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic(partitions=11)
    publish(flight_client, topic, range(3), partition=10)
    stream = Collected(spark, broker, tmp_path, subscribe=topic)
    stream.run()
    offsets = (stream.checkpoint / "offsets" / "0").read_text().splitlines()[-1]
    expected = {topic: {str(partition): 3 if partition == 10 else 0 for partition in range(11)}}
    assert json.loads(offsets) == expected and list(json.loads(offsets)[topic]) == list(expected[topic])


def test_an_empty_topic_makes_the_one_batch_by_which_spark_keeps_the_start(
    spark: SparkSession, broker: FlightBroker, fresh_topic: Fresh, tmp_path: Path
) -> None:
    stream = Collected(spark, broker, tmp_path, subscribe=fresh_topic())
    stream.run()
    stream.run()
    assert stream.batches == [[]]


def test_a_stream_starts_at_the_latest_by_default_and_sees_what_comes(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(5))
    stream = Collected(spark, broker, tmp_path, subscribe=topic, startingOffsets="latest")
    query = stream.start(available_now=False)
    try:
        until(lambda: flight_client.committed(f"spark-headrace-{topic}", topic) == {0: 5}, "the query has its start")
        publish(flight_client, topic, range(5, 8))
        until(lambda: len(stream.values) >= 3, "the new records are read")
        assert stream.values == texts(range(5, 8))
    finally:
        query.stop()


def test_a_batch_is_held_back_until_there_are_enough_records(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(3))
    stream = Collected(spark, broker, tmp_path, subscribe=topic, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    query = stream.start(available_now=False)
    try:
        until(lambda: len(stream.values) == 3, "the first batch is not held back")
        for number in range(3, 13):
            publish(flight_client, topic, range(number, number + 1))
        until(lambda: len(stream.values) == 13, "ten more are enough")
    finally:
        query.stop()
    assert [len(batch) for batch in stream.batches] == [3, 10]


def test_a_delay_that_is_over_ends_the_wait(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(3))
    stream = Collected(spark, broker, tmp_path, subscribe=topic, minOffsetsPerTrigger=1000, maxTriggerDelay="200ms")
    query = stream.start(available_now=False)
    try:
        until(lambda: len(stream.values) == 3, "the first batch")
        publish(flight_client, topic, range(3, 5))
        until(lambda: len(stream.values) == 5, "after the delay, few are enough")
    finally:
        query.stop()


def test_partitions_and_topics_that_appear_are_read_from_their_first_record(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic()
    publish(flight_client, topic, range(3))
    stream = Collected(spark, broker, tmp_path, subscribePattern=f"{topic}.*")
    query = stream.start(available_now=False)
    try:
        until(lambda: len(stream.values) == 3, "what is there")
        broker.command("topic", "alter", topic, "--partitions", "3")
        publish(flight_client, topic, range(3, 5), partition=2)
        until(lambda: len(stream.values) == 5, "the new partition is read")
        other = fresh_topic("-more")
        publish(flight_client, other, range(5, 7))
        until(lambda: len(stream.values) == 7, "the new topic is read")
        assert stream.values == texts(range(7))
    finally:
        query.stop()


def test_the_lag_of_a_query_can_be_seen(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic(partitions=2)
    publish(flight_client, topic, range(10))
    Collected(spark, broker, tmp_path, subscribe=topic, maxOffsetsPerTrigger=4, **{"kafka.group.id": f"g-{topic}"}).run()
    publish(flight_client, topic, range(7), partition=1)
    rows = json.loads(broker.command("group", "lag", f"g-{topic}", "--output", "json"))
    assert [(row["topic"], row["lag"]) for row in rows] == [(topic, 7)]


@pytest.mark.parametrize("signal", ["stop", "kill"])
def test_a_restart_of_the_broker_is_only_a_pause(spark: SparkSession, tmp_path: Path, signal: str) -> None:
    with FlightBroker(tmp_path / "first") as broker:
        address = broker.address
        with FlightClient(Servers.parse(address)) as flight_client:
            flight_client.create_topic("t", 2)
            publish(flight_client, "t", range(1000))
            stream = Collected(spark, broker, tmp_path, subscribe="t", maxOffsetsPerTrigger=100)
            query = stream.start(available_now=False)
            try:
                until(lambda: len(stream.batches) >= 2, "the query is under way")
                broker.process.kill() if signal == "kill" else broker.process.terminate()
                broker.process.wait(30)
                with FlightBroker(tmp_path / "second", data=broker.data, listen_flight=address) as again:
                    publish(flight_client, "t", range(1000, 1100), partition=1)
                    until(lambda: len(stream.values) >= 1100, f"the query goes on: {query.exception()}")
                    assert query.isActive and again.address == address
                    query.stop()
            finally:
                query.stop()
    assert stream.values == texts(range(1100)), "every record once"
