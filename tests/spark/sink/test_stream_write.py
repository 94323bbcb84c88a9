"""`df.writeStream.format("headrace")` and foreachBatch with a real Spark and a real broker: each batch once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from headrace.flight.client import FlightClient
from tests.spark.serving import FlightBroker
from tests.spark.sink.conftest import Write
from tests.spark.sink.reading import rows, values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SECONDS_MAX = 300


class Copying:
    """A query from files of numbers to a topic. Each file is a batch, and tests may roll back the checkpoint directory."""

    def __init__(self, spark: SparkSession, broker: FlightBroker, directory: Path) -> None:
        self._spark, self._address = spark, broker.address
        self._input, self.checkpoint = directory / "input", directory / "checkpoint"
        self._input.mkdir()
        self._count = 0

    def feed(self, *texts: str) -> None:
        self._count += 1
        path = self._input / f"{self._count:05}.txt"
        path.write_text("\n".join(texts))
        os.utime(path, (self._count, self._count))  # files are read in the order of their times

    def lines(self) -> DataFrame:
        return self._spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(self._input))

    def run(self, frame: DataFrame | None = None, *, mode: str = "append", **options: str) -> None:
        """Read all available files, batch by batch."""
        writer = (self.lines() if frame is None else frame).writeStream.format("headrace").outputMode(mode)
        options = {"kafka.bootstrap.servers": self._address, "checkpointLocation": str(self.checkpoint), **options}
        query = writer.options(**options).trigger(availableNow=True).start()
        assert query.awaitTermination(SECONDS_MAX), "the query takes too long"

    def run_each(self, write: Callable[[DataFrame, int], None], frame: DataFrame | None = None, *, mode: str = "append") -> None:
        writer = (self.lines() if frame is None else frame).writeStream.outputMode(mode)
        query = writer.foreachBatch(write).option("checkpointLocation", str(self.checkpoint))
        assert query.trigger(availableNow=True).start().awaitTermination(SECONDS_MAX), "the query takes too long"

    def forget(self, batch: int) -> None:
        """Remove Spark's commit of a batch, as if the driver had died after the publication."""
        for name in (str(batch), f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)


@pytest.fixture
def copying(spark: SparkSession, broker: FlightBroker, tmp_path: Path) -> Copying:
    return Copying(spark, broker, tmp_path)


def query_id(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "metadata").read_text())["id"])


def test_each_batch_is_one_version_of_the_query(copying: Copying, flight_client: FlightClient, topic: str) -> None:
    copying.feed("a", "b")
    copying.feed("c")
    copying.run(topic=topic)
    assert values(flight_client, topic) == ["a", "b", "c"]
    assert flight_client.last_version(f"spark/{query_id(copying.checkpoint)}") == 1


def test_a_query_that_restarts_resumes(copying: Copying, flight_client: FlightClient, topic: str) -> None:
    for text in ("a", "b", "c"):
        copying.feed(text)
        copying.run(topic=topic)
    assert values(flight_client, topic) == ["a", "b", "c"]


def test_a_batch_that_spark_runs_again_is_skipped(copying: Copying, flight_client: FlightClient, topic: str) -> None:
    copying.feed("a")
    copying.feed("b")
    copying.run(topic=topic)
    copying.forget(1)
    copying.feed("c")
    copying.run(topic=topic)
    assert values(flight_client, topic) == ["a", "b", "c"]


def test_a_checkpoint_that_is_restored_from_long_ago_writes_nothing_twice(
    copying: Copying, flight_client: FlightClient, topic: str
) -> None:
    copying.feed("a")
    copying.run(topic=topic)
    shutil.copytree(copying.checkpoint, old := copying.checkpoint.with_name("old"))
    for text in ("b", "c"):
        copying.feed(text)
        copying.run(topic=topic)
    shutil.rmtree(copying.checkpoint)
    old.rename(copying.checkpoint)
    copying.feed("d")
    copying.run(topic=topic)
    assert values(flight_client, topic) == ["a", "b", "c", "d"]


def test_a_new_checkpoint_is_a_new_query(copying: Copying, flight_client: FlightClient, topic: str) -> None:
    copying.feed("a")
    copying.run(topic=topic)
    shutil.rmtree(copying.checkpoint)
    copying.run(topic=topic)
    assert values(flight_client, topic) == ["a", "a"]


def test_a_stream_with_a_name_of_its_own_is_known_by_it(copying: Copying, flight_client: FlightClient, topic: str) -> None:
    copying.feed("a")
    copying.run(topic=topic, txnAppId="mine")
    assert flight_client.last_version(f"mine/{topic}") == 0
    assert flight_client.last_version(f"spark/{query_id(copying.checkpoint)}") is None


def test_a_stream_writes_to_the_topics_and_partitions_of_its_columns(copying: Copying, flight_client: FlightClient, topic: str) -> None:
    flight_client.create_topic(f"{topic}-a", 2)
    copying.feed("a0", "a1", "b0", "a1")
    columns = copying.lines().selectExpr(
        "value", f"concat('{topic}-', substr(value, 1, 1)) AS topic", "cast(substr(value, 2, 1) AS int) AS partition", "1 AS other"
    )
    copying.run(columns)
    assert rows(flight_client, f"{topic}-a", "value", "partition") == [[b"a0", 0], [b"a1", 1], [b"a1", 1]]
    assert values(flight_client, f"{topic}-b") == ["b0"]


def totals(lines: DataFrame) -> DataFrame:
    return lines.groupBy("value").count().selectExpr("value AS key", "cast(count AS string) AS value")


def test_output_mode_complete_is_rejected(copying: Copying, topic: str) -> None:
    copying.feed("a")
    with pytest.raises(PySparkException, match="output mode 'complete'"):
        copying.run(totals(copying.lines()), mode="complete", topic=topic)


def test_totals_that_change_are_written_by_foreach_batch_in_update_mode(
    copying: Copying, flight_client: FlightClient, write: Write, topic: str
) -> None:
    copying.feed("a", "a", "b")
    copying.feed("a")
    for _ in range(2):
        copying.run_each(lambda frame, batch: write(frame, topic=topic), totals(copying.lines()), mode="update")
        copying.forget(1)
    assert sorted(rows(flight_client, topic, "key", "value")) == [[b"a", b"2"], [b"a", b"3"], [b"b", b"1"]]


def test_a_failing_task_fails_the_query_leaves_nothing_and_the_next_run_writes_the_batch(
    copying: Copying, spark: SparkSession, flight_client: FlightClient, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, switch = fresh_topic(), tmp_path / "broken"
    switch.touch()

    def break_down(batches: Any) -> Any:
        yield from batches
        if switch.exists():
            raise ZeroDivisionError("task of stone")

    copying.feed("a", "b")
    with pytest.raises(PySparkException, match="task of stone"):
        copying.run(copying.lines().mapInArrow(break_down, "value string"), topic=topic)
    assert values(flight_client, topic) == []
    switch.unlink()
    copying.run(copying.lines().mapInArrow(break_down, "value string"), topic=topic)
    assert values(flight_client, topic) == ["a", "b"]


def test_a_query_that_is_stopped_in_the_middle_of_a_batch_leaves_nothing_of_it(
    copying: Copying,
    spark: SparkSession,
    broker: FlightBroker,
    flight_client: FlightClient,
    fresh_topic: Callable[..., str],
    tmp_path: Path,
) -> None:
    topic, started, hold = fresh_topic(), tmp_path / "started", tmp_path / "hold"
    hold.touch()

    def dawdle(batches: Any) -> Any:
        for batch in batches:
            yield batch
            started.touch()
            deadline = time.monotonic() + SECONDS_MAX
            while hold.exists() and time.monotonic() < deadline:
                time.sleep(0.02)

    copying.feed("a", "b")
    slow = copying.lines().mapInArrow(dawdle, "value string").writeStream.format("headrace").option("topic", topic)
    query = slow.option("kafka.bootstrap.servers", broker.address).option("checkpointLocation", str(copying.checkpoint)).start()
    until = time.monotonic() + SECONDS_MAX
    while not started.exists():
        assert time.monotonic() < until, "the task does not start"
        time.sleep(0.02)
    query.stop()
    hold.unlink()
    assert values(flight_client, topic) == []
    copying.run(topic=topic)
    assert values(flight_client, topic) == ["a", "b"]


def test_foreach_batch_writes_each_topic_once_without_a_word_about_it(
    copying: Copying, flight_client: FlightClient, write: Write, topic: str
) -> None:
    died: list[int] = []

    def fan_out(frame: DataFrame, batch: int) -> None:
        write(frame, topic=f"{topic}-a")
        if batch == 1 and not died:
            died.append(batch)
            raise ZeroDivisionError("between two writes")
        write(frame.selectExpr("upper(value) AS value"), topic=f"{topic}-b")

    copying.feed("x")
    copying.feed("y")
    with pytest.raises(PySparkException, match="between two writes"):
        copying.run_each(fan_out)
    copying.run_each(fan_out)
    copying.forget(1)
    copying.run_each(fan_out)
    assert values(flight_client, f"{topic}-a") == ["x", "y"]
    assert values(flight_client, f"{topic}-b") == ["X", "Y"]


def test_two_writes_of_one_foreach_batch_to_one_topic_need_names_of_their_own(
    copying: Copying, flight_client: FlightClient, write: Write, topic: str
) -> None:
    def twice(frame: DataFrame, batch: int) -> None:
        write(frame, topic=topic)
        write(frame.selectExpr("upper(value) AS value"), topic=topic)

    def named(frame: DataFrame, batch: int) -> None:
        write(frame, topic=topic)
        write(frame.selectExpr("upper(value) AS value"), topic=topic, txnAppId=f"{topic}-upper")

    copying.feed("x")
    with pytest.raises(PySparkException, match="for the second time in one call of foreachBatch"):
        copying.run_each(twice)
    assert values(flight_client, topic) == ["x"]
    copying.run_each(named)
    copying.feed("y")
    copying.run_each(named)
    copying.forget(1)
    copying.run_each(named)
    assert values(flight_client, topic) == ["x", "X", "y", "Y"]
