"""Spark over topics of Headrace, beside the same rows in topics of Kafka: `headrace bench spark --against kafka`.

One session reads both in turns, each ratio is taken within a turn, and Kafka's topic is filled by copying that of Headrace. Kafka's side is
Spark's own connector in the JVM with its default settings. The first turn of each kind is not counted: it starts the Python workers and
compiles code. A stream is counted from its second micro-batch.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headrace.bench.children import BenchFailed, PeerMissing, serving
from headrace.bench.peers import kafka
from headrace.bench.report import Figure, NoteValue, Target
from headrace.flight.client import FlightClient, Servers
from headrace.kafka_server import JarsUnavailable, jars
from headrace.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.bench.options import Bench
    from headrace.kafka_server import Cluster

SEVEN: Final = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
VALUE: Final = "value binary"
PARTITIONS: Final = 2
FILL_ROWS: Final = 65_536
TRIGGER_LIMITS: Final = frozenset(("maxOffsetsPerTrigger", "perTrigger"))
"""Options that only a stream has."""
PHASES: Final = ("latestOffset", "getBatch", "queryPlanning", "walCommit", "addBatch", "commitOffsets")
"""Parts of a micro-batch in `StreamingQueryProgress.durationMs`; `addBatch` runs the tasks."""
KAFKA_PRODUCER: Final[Mapping[str, str | int]] = {
    "kafka.acks": "all",
    "kafka.batch.size": 1 << 19,
    "kafka.linger.ms": 20,
    "kafka.buffer.memory": 1 << 26,
}

Source = Mapping[str, Any]
"""Arguments of `load()`. `columns` selects columns of a source that takes no schema."""


@dataclass(frozen=True, slots=True)
class Read:
    """A measured read."""

    rate: float
    """Rows per second."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Median milliseconds of each part of a micro-batch; empty for a batch."""


@dataclass(slots=True)
class Pair:
    """Rates of Headrace and of what it is compared with, turn by turn."""

    name: str
    target: Target | None = None
    beside: str = "ceiling"
    ours: list[Read] = field(default_factory=list)
    theirs: list[Read] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        ratios = [own.rate / other.rate for own, other in zip(self.ours, self.theirs, strict=True)]
        return [
            Figure(self.name, "rows/s", [read.rate for read in self.ours], None, _phases(self.ours)),
            Figure(f"{self.name}: {self.beside}", "rows/s", [read.rate for read in self.theirs], None, _phases(self.theirs)),
            Figure(f"{self.name} ÷ {self.beside}", "×", ratios, self.target),
        ]


def _phases(reads: list[Read]) -> dict[str, NoteValue]:
    known = [read.phases for read in reads if read.phases]
    return {f"{name} ms": statistics.median(phases[name] for phases in known) for name in PHASES} if known else {}


def in_turns(pair: Pair, ours: Callable[[], Read], theirs: Callable[[], Read], repeat: int, step: Callable[[str], Any]) -> Iterator[Figure]:
    """Measure both sides `repeat` times after one turn to warm up. `step` is called with the name of each turn."""
    with step(f"{pair.name}, warming up"):
        theirs()
        ours()
    for number in range(repeat):
        with step(f"{pair.name} {number + 1}/{repeat}"):
            pair.theirs.append(theirs())
            pair.ours.append(ours())
    yield from pair.figures()


def fill(client: FlightClient, topic: str, rows: int, value_bytes: int) -> None:
    """Create a topic and append half of the rows to each of its partitions."""
    client.create_topic(topic, PARTITIONS)
    values = pa.RecordBatch.from_pydict({"value": pa.array([b"x" * value_bytes] * FILL_ROWS, pa.binary())})
    each = rows // PARTITIONS
    for partition in range(PARTITIONS):
        client.append(topic, (values.slice(0, min(FILL_ROWS, each - at)) for at in range(0, each, FILL_ROWS)), partition=partition)


def batch_read(spark: SparkSession, source: Source, rows: int) -> Read:
    """Read all rows into Spark's noop sink."""
    frame = loaded(spark.read, {name: value for name, value in source.items() if name not in TRIGGER_LIMITS})
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return Read(rows / (time.perf_counter() - began))


def stream_read(spark: SparkSession, source: Source, rows: int, checkpoint: Path, sink: Source | None = None) -> Read:
    """Read all rows in micro-batches into the sink (default: noop), and measure from the second micro-batch on."""
    query = stream(spark, source, checkpoint, sink).trigger(availableNow=True).start()
    query.awaitTermination()
    found = [progress for progress in query.recentProgress if progress["numInputRows"]]
    if sum(progress["numInputRows"] for progress in found) != rows:
        raise BenchFailed(f"a stream of {source['format']}: expected {rows} rows, got {[each['numInputRows'] for each in found]}")
    if len(found) == 1:
        raise BenchFailed("one micro-batch read all rows: raise --rows or lower --per-trigger")
    return steady_read(found[1:])


def steady_read(progresses: list[Any]) -> Read:
    """Return the rate and the phases of these micro-batches."""
    durations = [progress["durationMs"] for progress in progresses]
    rows, milliseconds = sum(p["numInputRows"] for p in progresses), sum(d["triggerExecution"] for d in durations)
    return Read(1000 * rows / milliseconds, {name: float(statistics.median(d.get(name, 0) for d in durations)) for name in PHASES})


def stream(spark: SparkSession, source: Source, checkpoint: Path, sink: Source | None = None) -> Any:
    """Return the writer of a query from the source to the sink (default: noop), with its own checkpoint."""
    into = dict(sink or {"format": "noop"})
    writer = loaded(spark.readStream, source).writeStream.format(into.pop("format")).options(**into)
    return writer.option("checkpointLocation", str(checkpoint / f"checkpoint-{secrets.token_hex(4)}"))


def loaded(reader: Any, source: Source) -> DataFrame:
    options = dict(source)
    columns = options.pop("columns", "*")
    frame: DataFrame = reader.load(**options).select(columns)
    return frame


@dataclass(frozen=True, slots=True)
class Comparison:
    """Workload of both sides."""

    rows: int
    value_bytes: int
    per_trigger: int
    master: str


def connector() -> list[Path]:
    """Return the jars of Spark's Kafka connector. Raises `PeerMissing` if they cannot be resolved."""
    try:
        return sorted(jars.resolved(jars.SPARK).glob("*.jar"))
    except JarsUnavailable as missing:
        raise PeerMissing(str(missing)) from None


def against_kafka(bench: Bench, comparison: Comparison) -> Iterator[Figure]:
    """Measure batch and stream reads of Headrace beside those of Spark's Kafka connector."""
    with bench.steps.step("resolve Spark's Kafka connector", 1):
        libraries = connector()
    environment = {"HEADRACE__STORAGE__ACK": "durable"}
    with (
        kafka.server(bench.directory, 1) as cluster,
        serving(bench.directory, ("--listen-flight", "127.0.0.1:0"), environment=environment) as served,
        _session(comparison.master, libraries) as spark,
    ):
        address, topic = served.protocols["flight"][0], "bench"
        with bench.steps.step("fill both topics", 1):
            with FlightClient(Servers.parse(address)) as client:
                fill(client, topic, comparison.rows, comparison.value_bytes)
            ours: Source = {"format": "headrace", "servers": address, "subscribe": topic, "startingOffsets": "earliest"}
            theirs = _copy(spark, ours, cluster)
        yield from _compared(spark, bench, comparison, ours, theirs)


def _copy(spark: SparkSession, ours: Source, cluster: Cluster) -> Source:
    """Copy the topic to Kafka, each row to the same partition, and return it as a source."""
    topic, bootstrap = kafka.new_topic(cluster, PARTITIONS), {"kafka.bootstrap.servers": cluster.bootstrap}
    rows = loaded(spark.read, {**ours, "schema": "value binary, partition int"})
    rows.write.format("kafka").options(**bootstrap, **KAFKA_PRODUCER, topic=topic).save()
    return {"format": "kafka", **bootstrap, "subscribe": topic, "startingOffsets": "earliest"}


def _compared(spark: SparkSession, bench: Bench, comparison: Comparison, ours: Source, theirs: Source) -> Iterator[Figure]:
    rows, limit = comparison.rows // PARTITIONS * PARTITIONS, {"maxOffsetsPerTrigger": comparison.per_trigger}
    chosen: dict[str, tuple[Source, Source]] = {
        "value": ({"schema": VALUE}, {"columns": "value"}),
        "seven columns": ({"schema": SEVEN}, {}),
    }
    for columns, (own, other) in chosen.items():
        sides = [{**ours, **own}, {**theirs, **other}]
        kinds: list[tuple[str, list[Callable[[], Read]]]] = [
            (f"batch read, {columns}", [partial(batch_read, spark, side, rows) for side in sides]),
            (
                f"stream read, {columns}, {comparison.per_trigger:,} rows a trigger",
                [partial(stream_read, spark, {**side, **limit}, rows, bench.directory) for side in sides],
            ),
        ]
        for name, (our_turn, their_turn) in kinds:
            pair = Pair(name, beside="kafka")
            yield from in_turns(pair, our_turn, their_turn, bench.repeat, lambda step: bench.steps.step(step, 1))


@contextmanager
def _session(master: str, libraries: list[Path]) -> Iterator[SparkSession]:
    running = session("headrace bench", master, **{"spark.log.level": "OFF", "spark.jars": ",".join(map(str, libraries))})
    try:
        yield running
    finally:
        running.stop()
