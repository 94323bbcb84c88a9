"""A Kafka job runs after changing the format and the address."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient
from tests.spark.rows import publish
from tests.spark.serving import FlightBroker

JOB = """
from pyspark.sql import functions as F

SERVERS = "kafka-1:9092"

orders = (
    spark.readStream.format("kafka")
    .option("kafka.bootstrap.servers", SERVERS)
    .option("subscribe", TOPIC)
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 4)
    .option("failOnDataLoss", "false")
    .option("includeHeaders", "true")
    .option("kafka.max.partition.fetch.bytes", "1048576")
    .option("kafkaConsumer.pollTimeoutMs", "60000")
    .option("groupIdPrefix", "shop")
    .load()
)
parsed = (
    orders.select(F.from_json(F.col("value").cast("string"), "customer string, amount int").alias("order"), "headers")
    .select("order.*", F.size("headers").alias("headers"))
)
out = parsed.select(F.col("customer").alias("key"), F.to_json(F.struct("customer", "amount", "headers")).alias("value"))
query = (
    out.writeStream.format("kafka")
    .option("kafka.bootstrap.servers", SERVERS)
    .option("topic", TOPIC + ".big")
    .option("checkpointLocation", CHECKPOINT)
    .outputMode("append")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()

totals = (
    spark.read.format("kafka")
    .option("kafka.bootstrap.servers", SERVERS)
    .option("subscribe", TOPIC + ".big")
    .option("startingOffsets", "earliest")
    .option("endingOffsets", "latest")
    .load()
    .select(F.col("key").cast("string").alias("customer"), F.from_json(F.col("value").cast("string"), "amount int").alias("order"))
    .groupBy("customer").agg(F.sum("order.amount").alias("total"))
    .orderBy("customer")
)
"""
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def moved(job: str, address: str) -> str:
    return job.replace('.format("kafka")', '.format("headrace")').replace("kafka-1:9092", address)


def test_only_the_format_and_the_address_differ() -> None:
    before, after = JOB.splitlines(), moved(JOB, "127.0.0.1:8815").splitlines()
    changed = [line[2:].strip() for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert sorted(set(changed)) == [
        'SERVERS = "127.0.0.1:8815"',
        'out.writeStream.format("headrace")',
        'spark.read.format("headrace")',
        'spark.readStream.format("headrace")',
    ]
    assert moved(JOB, "kafka-1:9092").replace("headrace", "kafka") == JOB


def test_a_job_for_kafka_runs(
    spark: SparkSession, broker: FlightBroker, flight_client: FlightClient, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, big = fresh_topic(partitions=2), fresh_topic(".big", partitions=2)
    orders = [{"customer": customer, "amount": amount} for amount in range(10) for customer in ("ann", "bob")]
    headers = pa.array([[{"key": "h", "value": b"1"}]] * 20, HEADERS)
    publish(flight_client, topic, [json.dumps(order).encode() for order in orders], headers=headers)
    names = {"spark": spark, "TOPIC": topic, "CHECKPOINT": str(tmp_path / "checkpoint")}
    exec(compile(moved(JOB, broker.address), "job.py", "exec"), names)
    totals, query = names["totals"], names["query"]
    assert [tuple(row) for row in totals.collect()] == [("ann", 45), ("bob", 45)]  # type: ignore[attr-defined]  # a DataFrame
    assert len(query.recentProgress) == 5  # type: ignore[attr-defined]  # a StreamingQuery
    assert flight_client.committed(f"shop-{topic}", topic) == {0: 20, 1: 0}
    assert sum(held.end for held in flight_client.describe([big])[big].partitions) == 20
