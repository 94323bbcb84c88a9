"""Benchmark of Spark over topics, beside the ceiling of any Python source and sink: `python -m benchmarks.spark`.

Every figure alternates with its ceiling in the same session, and each ratio is taken within a turn, so a slow machine slows both. The
first turn of each kind is not counted: it starts the Python workers and compiles code.
"""

from __future__ import annotations

import datetime
import json
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks import main, spark_ceiling, spark_flight
from benchmarks.flight import flight_broker
from benchmarks.spark_ceiling import NAME as CEILING
from benchmarks.spark_flight import NAME as BARE_FLIGHT
from headrace.bench import options
from headrace.bench.children import BenchFailed
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.bench.spark import PARTITIONS, SEVEN, VALUE, Pair, Read, batch_read, fill, in_turns, steady_read, stream, stream_read
from headrace.flight.client import FlightClient, Servers
from headrace.spark import session

PARTS = ["batch", "stream", "sink", "latency"]
READ_TARGET, STREAM_TARGET, SINK_TARGET = Target(at_least=0.8), Target(at_least=0.8), Target(at_least=0.7)
LATENCY_TARGET: Final = Target(at_most=30.0)
ARRIVALS_PER_SECOND: Final = 100
_ARRIVAL_SECONDS: Final = 0.02
_WARM_BATCHES: Final = 5
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class SparkPlan:
    rows: int
    value_bytes: int
    per_trigger: int
    seconds: float
    """Duration of the measurement of small micro-batches."""


class Workload:
    """A Spark session, a filled topic, a server of prebuilt batches, and a directory for checkpoints."""

    def __init__(self, spark: SparkSession, address: str, bare_address: str, directory: Path, plan: SparkPlan) -> None:
        self.spark, self.address, self.bare_address, self.directory, self.plan = spark, address, bare_address, directory, plan
        self.client = FlightClient(Servers.parse(address))
        self.topic, self.rows = "bench", plan.rows // PARTITIONS * PARTITIONS
        fill(self.client, self.topic, plan.rows, plan.value_bytes)

    def close(self) -> None:
        self.client.close()

    def ours(self, schema: str) -> dict[str, Any]:
        options = {"servers": self.address, "subscribe": self.topic, "startingOffsets": "earliest"}
        return {"format": "headrace", "schema": schema, **options, "maxOffsetsPerTrigger": self.plan.per_trigger}

    def ceiling(self, schema: str) -> dict[str, Any]:
        rows = {"rows": self.rows, "size": self.plan.value_bytes, "perTrigger": self.plan.per_trigger}
        return {"format": CEILING, "schema": schema, **rows}

    def bare_flight(self, schema: str) -> dict[str, Any]:
        return {**self.ceiling(schema), "format": BARE_FLIGHT, "address": self.bare_address}

    def batch_read(self, source: dict[str, Any]) -> Read:
        return batch_read(self.spark, source, self.rows)

    def stream_read(self, source: dict[str, Any], sink: dict[str, Any] | None = None) -> Read:
        return stream_read(self.spark, source, self.rows, self.directory, sink)

    def batch_write(self, sink: dict[str, Any]) -> Read:
        value = F.lit("x" * self.plan.value_bytes).cast("binary").alias("value")
        frame: DataFrame = self.spark.range(self.plan.rows).select(value)
        began = time.perf_counter()
        frame.write.mode("append").save(**sink)
        return Read(self.plan.rows / (time.perf_counter() - began))

    def our_sink(self) -> dict[str, Any]:
        topic = f"sink-{secrets.token_hex(4)}"
        self.client.create_topic(topic, PARTITIONS)
        return {"format": "headrace", "servers": self.address, "topic": topic}

    def rate_micro_batch(self) -> float:
        """Return rows per second of Spark's own source, without Python, from the second micro-batch on."""
        source = {"format": "rate-micro-batch", "rowsPerBatch": self.plan.per_trigger, "numPartitions": PARTITIONS}
        return steady_read(self._batches(source, None, _WARM_BATCHES, 0.0)).rate

    def latency(self, is_ours: bool, sink: dict[str, Any] | None = None) -> Latency:
        """Measure small micro-batches: the duration of each, and the age of its first row when it ends."""
        if is_ours:
            topic = f"arrivals-{secrets.token_hex(4)}"
            self.client.create_topic(topic)
            source: dict[str, Any] = {"format": "headrace", "servers": self.address, "subscribe": topic, "startingOffsets": "earliest"}
            with arrivals(self.client, topic, self.plan.value_bytes) as arrived:

                def arrived_at(offset: int) -> float:
                    return arrived[bisect_right(arrived, offset, key=lambda row: row[0]) - 1][1]

                return self._small_batches({**source, "schema": VALUE}, sink, topic, arrived_at)
        rate = {"size": self.plan.value_bytes, "perSecond": ARRIVALS_PER_SECOND}
        return self._small_batches({"format": CEILING, "schema": VALUE, **rate}, sink, "constant", None)

    def _small_batches(
        self, source: dict[str, Any], sink: dict[str, Any] | None, topic: str, arrived_at: Callable[[int], float] | None
    ) -> Latency:
        latency = Latency()
        for progress in self._batches(source, sink, _WARM_BATCHES, self.plan.seconds):
            duration = progress["durationMs"]
            latency.work_ms.append(float(duration["triggerExecution"] - duration.get("latestOffset", 0)))
            if arrived_at is not None:
                first = int((_json(progress["sources"][0]["startOffset"]) or {}).get(topic, {}).get("0", 0))
                ended = datetime.datetime.fromisoformat(progress["timestamp"]).timestamp() * 1000 + duration["triggerExecution"]
                latency.age_ms.append(ended - arrived_at(first))
        return latency

    def _batches(self, source: dict[str, Any], sink: dict[str, Any] | None, skipped: int, seconds: float) -> list[Any]:
        """Return the progress of micro-batches with rows within `seconds`, without the first `skipped` ones; at least one."""
        query = stream(self.spark, source, self.directory, sink).start()
        found: dict[int, Any] = {}
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            if query.exception() is not None:
                raise BenchFailed(f"the stream ended: {query.exception()}")
            for progress in query.recentProgress:
                if progress["numInputRows"]:
                    found[progress["batchId"]] = progress
            if len(found) > skipped and deadline is None:
                deadline = time.monotonic() + seconds
        query.stop()
        return [found[number] for number in sorted(found)[skipped:]]


@dataclass(slots=True)
class Latency:
    work_ms: list[float] = field(default_factory=list)
    """Duration of each micro-batch, without the wait for rows."""
    age_ms: list[float] = field(default_factory=list)
    """Age of the first row of each micro-batch when it ended."""

    def figure(self, name: str) -> Figure:
        ordered = sorted(self.work_ms)
        notes: dict[str, NoteValue] = {"p99 ms": percentile(ordered, 99), "batches": len(ordered)}
        if self.age_ms:
            ages = sorted(self.age_ms)
            notes |= {"oldest row p50 ms": percentile(ages, 50), "p99": percentile(ages, 99)}
        return Figure(name, "ms", ordered, None, notes)


@contextmanager
def arrivals(flight_client: FlightClient, topic: str, value_bytes: int) -> Iterator[list[tuple[int, float]]]:
    """Append about a hundred rows per second. Yields a growing list of (first offset, Unix ms of the acknowledgement)."""
    arrived: list[tuple[int, float]] = []
    stopped = threading.Event()
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x" * value_bytes] * int(ARRIVALS_PER_SECOND * _ARRIVAL_SECONDS), pa.binary())})

    def append() -> None:
        while not stopped.wait(_ARRIVAL_SECONDS):
            placed = flight_client.append(topic, [batch], partition=0).placements[0]
            arrived.append((placed[1], time.time() * 1000))

    thread = threading.Thread(target=append, name="arrivals", daemon=True)
    thread.start()
    try:
        yield arrived
    finally:
        stopped.set()
        thread.join()


def latency_figures(ours: Latency, ceiling: Latency, to_topic: Latency) -> list[Figure]:
    pairs = (("micro-batch topic → noop", ours), ("micro-batch constant → noop", ceiling), ("micro-batch topic → topic", to_topic))
    shown = [latency.figure(name) for name, latency in pairs]
    return [*shown, Figure("micro-batch p50 above the constant source", "ms", [shown[0].value - shown[1].value], LATENCY_TARGET)]


def _json(text: object) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def measured(workload: Workload, parts: tuple[str, ...], repeat: int, step: Callable[[str], Any]) -> Iterator[Figure]:
    """Measure the named parts. `step` is called with the name of each step."""
    plan = workload.plan
    kinds: dict[str, list[tuple[Pair, Callable[[], Read], Callable[[], Read]]]] = {"batch": [], "stream": [], "sink": []}
    for columns, schema in (("value", VALUE), ("seven columns", SEVEN)):
        most = workload.ceiling(schema)
        for ours, of, is_target in ((workload.ours(schema), "", True), (workload.bare_flight(schema), ", bare Flight", False)):
            pair = Pair(f"batch read, {columns}{of}", READ_TARGET if is_target else None)
            kinds["batch"].append((pair, partial(workload.batch_read, ours), partial(workload.batch_read, most)))
            pair = Pair(f"stream read, {columns}, {plan.per_trigger:,} rows a trigger{of}", STREAM_TARGET if is_target else None)
            kinds["stream"].append((pair, partial(workload.stream_read, ours), partial(workload.stream_read, most)))
    kinds["sink"].append(
        (
            Pair("batch write, durable", SINK_TARGET),
            lambda: workload.batch_write(workload.our_sink()),
            lambda: workload.batch_write({"format": CEILING}),
        )
    )
    constant = workload.ceiling(VALUE)
    kinds["sink"].append(
        (
            Pair(f"stream write, durable, {plan.per_trigger:,} rows a trigger", SINK_TARGET),
            lambda: workload.stream_read(constant, workload.our_sink()),
            lambda: workload.stream_read(constant, {"format": CEILING}),
        )
    )
    for part in parts:
        for pair, ours_once, ceiling_once in kinds.get(part, ()):
            yield from in_turns(pair, ours_once, ceiling_once, repeat, step)
    if "stream" in parts:
        with step("Spark's own rate-micro-batch"):
            yield Figure("rate-micro-batch → noop, without Python", "rows/s", [workload.rate_micro_batch()])
    if "latency" in parts:
        with step("micro-batches of few rows"):
            yield from latency_figures(workload.latency(True), workload.latency(False), workload.latency(True, workload.our_sink()))


@click.command()
@options.common
@options.size()
@click.option("--rows", type=click.IntRange(1_000), default=4_000_000, show_default=True, help="Rows of one turn.")
@click.option("--per-trigger", type=click.IntRange(1_000), default=1_000_000, show_default=True, help="Rows of one micro-batch.")
@click.option("--seconds", type=click.FloatRange(1), default=10.0, show_default=True, help="Duration of the part `latency`.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Measure only this part; may be repeated.")
@click.option("--master", metavar="URL", default="local[2]", show_default=True, help="Spark master.")
def spark(
    value_bytes: int, repeat: int, output: str, parent: Path | None, rows: int, per_trigger: int, seconds: float, only: tuple[str, ...],
    master: str,
) -> None:  # fmt: skip
    """Measure Spark over topics, beside the ceiling of any Python source and sink.

    batch: a topic into noop. stream: the same in micro-batches. sink: constant rows into a topic, durable. latency: micro-batches of
    about a hundred arriving rows per second. The ceilings are a source of constant batches and a writer that only counts. `bare Flight` is
    a source that receives such batches over Arrow Flight from a server that keeps them in memory: the most that the broker could reach.
    """
    config: dict[str, NoteValue] = {"rows": rows, "value_bytes": value_bytes, "per_trigger": per_trigger, "master": master}
    plan = SparkPlan(rows, value_bytes, per_trigger, seconds)
    with (
        options.measuring("spark", repeat, output, parent, config) as bench,
        flight_broker(bench.directory, "durable", None) as endpoint,
        spark_flight.batch_server(bench.directory, value_bytes) as bare_address,
    ):
        running = session("headrace benchmarks", master, **{"spark.log.level": "OFF"})
        spark_ceiling.register(running)
        spark_flight.register(running)
        workload = Workload(running, endpoint.address, bare_address, bench.directory, plan)
        try:
            for figure in measured(workload, only or tuple(PARTS), repeat, lambda name: bench.steps.step(name, 1)):
                bench.report.add(figure)
        finally:
            workload.close()
            running.stop()


if __name__ == "__main__":
    main(spark, "spark")
