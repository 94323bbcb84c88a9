"""The Spark sink with the log in Kafka: each batch once, also if the driver dies after a publication and the broker is killed."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition

from headrace.flight.client import FlightClient, Servers
from headrace.kafka_server import Cluster
from tests.spark.serving import FlightBroker
from tests.spark.sink.test_stream_write import Copying

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS = 300.0


def values(kafka: Cluster, topic: str) -> Counter[bytes]:
    """Return what a Kafka client that reads committed records finds in the topic."""
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": "unused", "isolation.level": "read_committed", "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True})
    found: Counter[bytes] = Counter()
    for partition in range(2):
        consumer.assign([TopicPartition(topic, partition, 0)])
        while (message := consumer.poll(WAIT_SECONDS)) is not None and message.error() is None:
            found[message.value() or b""] += 1
    consumer.close()
    return found


def test_a_batch_that_is_written_again_after_both_were_lost_is_in_kafka_once(spark: SparkSession, kafka: Cluster, tmp_path: Path) -> None:
    engine = ["--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", "kafka.prefix=spark."]
    with FlightBroker(tmp_path / "first", *engine) as first:
        address = first.address
        with FlightClient(Servers.parse(address)) as client:
            client.create_topic("out", 2)
        copying = Copying(spark, first, tmp_path)
        copying.feed("one", "two")
        copying.feed("three")
        copying.run(topic="out")
    # The block has killed the broker. The next one on the same address takes over its tables.
    copying.forget(1)
    copying.feed("four")
    with FlightBroker(tmp_path / "second", *engine, listen_flight=address):
        copying.run(topic="out")
    assert values(kafka, "spark.out") == Counter([b"one", b"two", b"three", b"four"])


def test_a_query_that_writes_through_another_broker_goes_on_when_the_coordinator_is_killed_in_a_batch(
    spark: SparkSession, kafka: Cluster, tmp_path: Path
) -> None:
    """The query knows one address, which is not that of the coordinator: its calls are passed on."""
    from pyspark.sql.functions import udf

    engine = ["--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", "kafka.prefix=pair."]
    with FlightBroker(tmp_path / "first", *engine) as first, FlightBroker(tmp_path / "second", *engine) as second:
        coordinator = first.process.pid

        def fatal(value: str) -> str:
            """Kill the coordinator while a task sends its rows there."""
            import os

            if value == "three":
                os.kill(coordinator, 9)
            return value

        with FlightClient(Servers.parse(second.address)) as client:
            client.create_topic("out", 2)
        copying = Copying(spark, second, tmp_path)
        copying.feed("one", "two")
        copying.feed("two and a half", "three", "three and a half")
        copying.run(copying.lines().select(udf(lambda value: fatal(value))("value").alias("value")), topic="out")
        assert first.process.wait(WAIT_SECONDS) == -signal.SIGKILL
        copying.forget(1)
        copying.feed("four")
        copying.run(topic="out")
    assert values(kafka, "pair.out") == Counter([b"one", b"two", b"two and a half", b"three", b"three and a half", b"four"])
