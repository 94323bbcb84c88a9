"""What Spark reads from topics and writes to them, beside the most it takes from any Python source and gives to any Python sink.

Every figure takes turns with its ceiling in the same session, and the ratio is taken within each turn: a machine that slows down slows
both. The first turn of each kind is not counted, so that workers are there and code is compiled.
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

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.bench.faults import BenchFailed
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.bench.spark_ceiling import NAME as CEILING
from headrace.flight.client import FlightClient, Servers

READ_TARGET, STREAM_TARGET, SINK_TARGET = Target(at_least=0.8), Target(at_least=0.8), Target(at_least=0.7)
LATENCY_TARGET: Final = Target(at_most=30.0)
SEVEN: Final = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
VALUE: Final = "value binary"
PARTITIONS: Final = 2
ARRIVALS_PER_SECOND: Final = 100
_PULSE_SECONDS: Final = 0.02
_WARM_BATCHES: Final = 5
_LOOK_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class SparkPlan:
    rows: int
    value_bytes: int
    per_trigger: int
    seconds: float
    """How long micro-batches of few rows are watched."""


@dataclass(slots=True)
class Pair:
    """Turns of ours and of the ceiling."""

    name: str
    target: Target | None
    ours: list[float] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        share = [own / most for own, most in zip(self.ours, self.ceiling, strict=True)]
        return [
            Figure(self.name, "rows/s", self.ours),
            Figure(f"{self.name}: ceiling", "rows/s", self.ceiling),
            Figure(f"{self.name} ÷ ceiling", "×", share, self.target),
        ]


class Stage:
    """A session, a topic that is full, and room for checkpoints."""

    def __init__(self, spark: SparkSession, address: str, directory: Path, plan: SparkPlan) -> None:
        self.spark, self.address, self.directory, self.plan = spark, address, directory, plan
        self.client = FlightClient(Servers.parse(address))
        self.topic = self._fill()

    def close(self) -> None:
        self.client.close()

    def _fill(self) -> str:
        topic, plan = "bench", self.plan
        self.client.create_topic(topic, PARTITIONS)
        values = pa.RecordBatch.from_pydict({"value": pa.array([b"x" * plan.value_bytes] * 65_536, pa.binary())})
        for partition in range(PARTITIONS):
            rows = plan.rows // PARTITIONS
            self.client.append(topic, (values.slice(0, min(65_536, rows - at)) for at in range(0, rows, 65_536)), partition=partition)
        return topic

    # What is read from: a topic, or constant batches.

    def ours(self, schema: str) -> dict[str, Any]:
        options = {"servers": self.address, "subscribe": self.topic, "startingOffsets": "earliest"}
        return {"format": "headrace", "schema": schema, **options, "maxOffsetsPerTrigger": self.plan.per_trigger}

    def ceiling(self, schema: str) -> dict[str, Any]:
        rows = {"rows": self.plan.rows // PARTITIONS * PARTITIONS, "size": self.plan.value_bytes, "perTrigger": self.plan.per_trigger}
        return {"format": CEILING, "schema": schema, **rows}

    def batch_read(self, source: dict[str, Any]) -> float:
        options = {name: value for name, value in source.items() if name not in ("maxOffsetsPerTrigger", "perTrigger")}
        frame = self.spark.read.load(**options)
        seconds = _timed(lambda: frame.write.format("noop").mode("overwrite").save())
        return self.plan.rows / seconds

    def stream_read(self, source: dict[str, Any], sink: dict[str, Any] | None = None) -> float:
        """Rows a second from the second micro-batch on."""
        query = self._writer(source, sink).trigger(availableNow=True).start()
        query.awaitTermination()
        steady = [progress for progress in query.recentProgress if progress["numInputRows"]][1:]
        if not steady:
            raise BenchFailed("one micro-batch took all: more rows, or fewer per trigger, are needed")
        return float(1000 * sum(p["numInputRows"] for p in steady) / sum(p["durationMs"]["triggerExecution"] for p in steady))

    def batch_write(self, sink: dict[str, Any]) -> float:
        value = F.lit("x" * self.plan.value_bytes).cast("binary").alias("value")
        frame: DataFrame = self.spark.range(self.plan.rows).select(value)
        return self.plan.rows / _timed(lambda: frame.write.mode("append").save(**sink))

    def our_sink(self) -> dict[str, Any]:
        topic = f"sink-{secrets.token_hex(4)}"
        self.client.create_topic(topic, PARTITIONS)
        return {"format": "headrace", "servers": self.address, "topic": topic}

    def _writer(self, source: dict[str, Any], sink: dict[str, Any] | None) -> Any:
        """A query from here to there, or to nowhere, with a checkpoint of its own."""
        format, *options = (sink or {"format": "noop"}).items()
        checkpoint = self.directory / f"checkpoint-{secrets.token_hex(4)}"
        frame = self.spark.readStream.load(**source)
        return frame.writeStream.format(format[1]).options(**dict(options)).option("checkpointLocation", str(checkpoint))

    def rate_micro_batch(self) -> float:
        """Spark's own source, without Python: rows a second from the second micro-batch on."""
        source = {"format": "rate-micro-batch", "rowsPerBatch": self.plan.per_trigger, "numPartitions": PARTITIONS}
        found = self._batches(source, None, _WARM_BATCHES, 0.0)
        return float(1000 * sum(p["numInputRows"] for p in found) / sum(p["durationMs"]["triggerExecution"] for p in found))

    # Few rows at a time.

    def latency(self, is_ours: bool, sink: dict[str, Any] | None = None) -> Latency:
        """Micro-batches over rows that trickle in: how long each takes, and how old its first row is when it ends."""
        if is_ours:
            topic = f"trickle-{secrets.token_hex(4)}"
            self.client.create_topic(topic)
            source: dict[str, Any] = {"format": "headrace", "servers": self.address, "subscribe": topic, "startingOffsets": "earliest"}
            with trickle(self.client, topic, self.plan.value_bytes) as born:

                def born_at(offset: int) -> float:
                    return born[bisect_right(born, offset, key=lambda row: row[0]) - 1][1]

                return self._watched({**source, "schema": VALUE}, sink, topic, born_at)
        rate = {"size": self.plan.value_bytes, "perSecond": ARRIVALS_PER_SECOND}
        return self._watched({"format": CEILING, "schema": VALUE, **rate}, sink, "constant", None)

    def _watched(self, source: dict[str, Any], sink: dict[str, Any] | None, topic: str, born: Callable[[int], float] | None) -> Latency:
        latency = Latency()
        for progress in self._batches(source, sink, _WARM_BATCHES, self.plan.seconds):
            duration = progress["durationMs"]
            latency.work_ms.append(float(duration["triggerExecution"] - duration.get("latestOffset", 0)))
            if born is not None:
                first = int((_json(progress["sources"][0]["startOffset"]) or {}).get(topic, {}).get("0", 0))
                ended = datetime.datetime.fromisoformat(progress["timestamp"]).timestamp() * 1000 + duration["triggerExecution"]
                latency.age_ms.append(ended - born(first))
        return latency

    def _batches(self, source: dict[str, Any], sink: dict[str, Any] | None, skipped: int, seconds: float) -> list[Any]:
        """The progress of micro-batches that had rows, without the first ones: those of so many seconds, and one at least."""
        query = self._writer(source, sink).start()
        found: dict[int, Any] = {}
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
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
    """Of each micro-batch, without the wait for rows."""
    age_ms: list[float] = field(default_factory=list)
    """Of its first row when it ended."""

    def figure(self, name: str) -> Figure:
        ordered = sorted(self.work_ms)
        notes: dict[str, NoteValue] = {"p99 ms": percentile(ordered, 99), "batches": len(ordered)}
        if self.age_ms:
            ages = sorted(self.age_ms)
            notes |= {"oldest row p50 ms": percentile(ages, 50), "p99": percentile(ages, 99)}
        return Figure(name, "ms", ordered, None, notes)


@contextmanager
def trickle(flight_client: FlightClient, topic: str, value_bytes: int) -> Iterator[list[tuple[int, float]]]:
    """Rows one by one, about a hundred a second; yields (offset, Unix ms of its acknowledgement) of each."""
    born: list[tuple[int, float]] = []
    over = threading.Event()
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"x" * value_bytes] * int(ARRIVALS_PER_SECOND * _PULSE_SECONDS), pa.binary())})

    def drip() -> None:
        while not over.wait(_PULSE_SECONDS):
            placed = flight_client.append(topic, [batch], partition=0).placements[0]
            born.append((placed[1], time.time() * 1000))

    thread = threading.Thread(target=drip, name="trickle", daemon=True)
    thread.start()
    try:
        yield born
    finally:
        over.set()
        thread.join()


def latency_figures(ours: Latency, ceiling: Latency, to_topic: Latency) -> list[Figure]:
    pairs = (("micro-batch topic → noop", ours), ("micro-batch constant → noop", ceiling), ("micro-batch topic → topic", to_topic))
    shown = [latency.figure(name) for name, latency in pairs]
    return [*shown, Figure("micro-batch p50 above the constant source", "ms", [shown[0].value - shown[1].value], LATENCY_TARGET)]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _json(text: object) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def measured(stage: Stage, parts: tuple[str, ...], repeat: int, step: Callable[[str], Any]) -> Iterator[Figure]:
    """All figures of the parts asked for. `step` says what is being done."""
    plan = stage.plan
    kinds: dict[str, list[tuple[Pair, Callable[[], float], Callable[[], float]]]] = {"batch": [], "stream": [], "sink": []}
    for columns, schema in (("value", VALUE), ("seven columns", SEVEN)):
        ours, most = stage.ours(schema), stage.ceiling(schema)
        kinds["batch"].append(
            (Pair(f"batch read, {columns}", READ_TARGET), partial(stage.batch_read, ours), partial(stage.batch_read, most))
        )
        name = f"stream read, {columns}, {plan.per_trigger:,} rows a trigger"
        kinds["stream"].append((Pair(name, STREAM_TARGET), partial(stage.stream_read, ours), partial(stage.stream_read, most)))
    kinds["sink"].append(
        (
            Pair("batch write, durable", SINK_TARGET),
            lambda: stage.batch_write(stage.our_sink()),
            lambda: stage.batch_write({"format": CEILING}),
        )
    )
    constant = stage.ceiling(VALUE)
    kinds["sink"].append(
        (
            Pair(f"stream write, durable, {plan.per_trigger:,} rows a trigger", SINK_TARGET),
            lambda: stage.stream_read(constant, stage.our_sink()),
            lambda: stage.stream_read(constant, {"format": CEILING}),
        )
    )
    for part in parts:
        for pair, ours_once, ceiling_once in kinds.get(part, ()):
            yield from _in_turns(pair, ours_once, ceiling_once, repeat, step)
    if "stream" in parts:
        with step("Spark's own rate-micro-batch"):
            yield Figure("rate-micro-batch → noop, without Python", "rows/s", [stage.rate_micro_batch()])
    if "latency" in parts:
        with step("micro-batches of few rows"):
            yield from latency_figures(stage.latency(True), stage.latency(False), stage.latency(True, stage.our_sink()))


def _in_turns(
    pair: Pair, ours: Callable[[], float], ceiling: Callable[[], float], repeat: int, step: Callable[[str], Any]
) -> Iterator[Figure]:
    with step(f"{pair.name}, warming up"):
        ceiling()
        ours()
    for number in range(repeat):
        with step(f"{pair.name} {number + 1}/{repeat}"):
            pair.ceiling.append(ceiling())
            pair.ours.append(ours())
    yield from pair.figures()
