"""`python -m benchmarks.spark` with small sizes. These tests are here because they need the shared Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import spark_ceiling, spark_flight
from benchmarks.spark import Latency, SparkPlan, Workload, latency_figures, measured
from headrace.bench.spark import PHASES, SEVEN, VALUE, Pair, Read
from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAN = SparkPlan(rows=4_000, value_bytes=100, per_trigger=1_000, seconds=1.0)


@pytest.fixture
def stage(spark: SparkSession, tmp_path: Path) -> Iterator[Workload]:
    spark_ceiling.register(spark)
    spark_flight.register(spark)
    with FlightBroker(tmp_path / "broker") as broker, spark_flight.batch_server(tmp_path, PLAN.value_bytes) as bare_address:
        made = Workload(spark, broker.address, bare_address, tmp_path, PLAN)
        yield made
        made.close()


def test_topic_and_ceilings_hold_the_same_rows_of_the_same_columns(stage: Workload) -> None:
    for source in (stage.ours(SEVEN), stage.ceiling(SEVEN), stage.bare_flight(SEVEN)):
        options = {name: value for name, value in source.items() if name not in ("maxOffsetsPerTrigger", "perTrigger")}
        frame = stage.spark.read.load(**options)
        assert frame.count() == PLAN.rows
        assert {row.value for row in frame.select("value").distinct().collect()} == {b"x" * 100}
        assert frame.schema.names == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]


def test_a_measured_write_is_in_the_topic(stage: Workload) -> None:
    sink = stage.our_sink()
    assert stage.batch_write(sink).rate > 0
    assert stage.stream_read(stage.ceiling(VALUE), sink).rate > 0
    state = stage.client.describe([sink["topic"]])[sink["topic"]]
    assert sum(partition.end for partition in state.partitions) == 2 * PLAN.rows


def test_every_part_gives_its_figures(stage: Workload) -> None:
    figures = {figure.name: figure for figure in measured(stage, ("stream", "latency"), 1, lambda name: nullcontext())}
    assert [name for name, figure in figures.items() if figure.target is not None] == [
        "stream read, value, 1,000 rows a trigger ÷ ceiling",
        "stream read, seven columns, 1,000 rows a trigger ÷ ceiling",
        "micro-batch p50 above the constant source",
    ]
    assert all(min(figure.runs) > 0 for name, figure in figures.items() if "above" not in name)
    assert figures["micro-batch topic → noop"].notes["oldest row p50 ms"]
    assert figures["stream read, value, 1,000 rows a trigger"].notes.keys() == {f"{phase} ms" for phase in PHASES}


def test_parts_are_taken_within_a_turn() -> None:
    pair = Pair("p", ours=[Read(1.0), Read(30.0)], theirs=[Read(2.0), Read(40.0)])
    assert pair.figures()[2].runs == [0.5, 0.75]


def test_latency_above_the_ceiling_is_a_difference_of_medians() -> None:
    *_, above = latency_figures(Latency([10.0, 50.0, 20.0]), Latency([5.0]), Latency([1.0]))
    assert (above.value, above.met) == (15.0, True)
