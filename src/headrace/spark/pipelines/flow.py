"""One sink of a running pipeline: its query, its restarts, its state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from headrace.spark.pipelines.checkpoint import unfinished
from headrace.spark.pipelines.diagnosis import Diagnosis, diagnose, offsets_of
from headrace.spark.pipelines.keys import AVAILABLE_NOW
from headrace.spark.pipelines.model import Pipeline, Sink
from headrace.spark.pipelines.plan import connection_options, frames, shaped
from headrace.spark.pipelines.progress import QueryState, moment_of
from headrace.spark.pipelines.restarts import Restarts

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Flow:
    """The way from the sources to one sink."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, sink: Sink, *, once: bool) -> None:
        self.pipeline, self.sink = pipeline, sink
        self.checkpoint = f"{pipeline.checkpoint}/{sink.name}"
        self.trigger = AVAILABLE_NOW if once else sink.trigger or pipeline.trigger
        self.state = QueryState(sink.name)
        self.restarts = Restarts(pipeline.restart)
        self.query: StreamingQuery | None = None
        self.failure: Diagnosis | None = None
        self.surrender = ""
        self._wake_ms = 0
        self._seen = ""
        # Each sink reads for itself, at its own pace; so the group that shows its progress is its own too.
        every = frames(spark, pipeline, group=f"{pipeline.name}.{sink.name}")
        self._frame = shaped(every[sink.source], sink)

    def start(self, now_ms: int) -> None:
        """Begin, or begin again where the checkpoint says. A failure counts like one of the query."""
        try:
            self.query = self._writer().start()
        except (PySparkException, Py4JJavaError) as failure:
            self._failed(now_ms, diagnose(failure), before_start=True)
            return
        self.state = replace(self.state, state="running", error="")

    def look(self, now_ms: int) -> None:
        """See what has become of the query; start it again when it is time to."""
        if self.state.state == "waiting" and now_ms >= self._wake_ms:
            self.start(now_ms)
        if self.state.state != "running":
            return
        assert self.query is not None, "a running flow has a query"
        self._take_progress(self.query)
        if self.query.isActive:
            return
        failure = self.query.exception()
        if failure is None:
            self.state = replace(self.state, state="finished")
        else:
            self._failed(now_ms, diagnose(failure), batch=self._failing_batch(str(failure)))

    @property
    def is_over(self) -> bool:
        return self.state.state in ("finished", "stopped", "failed")

    @property
    def is_starting(self) -> bool:
        """The query has not heard from its sources yet."""
        if self.query is None or not self.query.isActive:
            return False
        return str(self.query.status["message"]).startswith(("Initializing", "Getting offsets"))

    @property
    def is_between_batches(self) -> bool:
        """True too when there is no query that could be in the midst of one."""
        return self.query is None or not self.query.isActive or not self.query.status["isTriggerActive"]

    def stop(self) -> None:
        """At once. A batch that is under way runs again at the next start, under the same number."""
        if self.query is not None and self.query.isActive:
            self.query.stop()
            self._take_progress(self.query)
        if not self.is_over:
            self.state = replace(self.state, state="stopped")

    def explain_failure(self) -> str:
        """What happened, where, and what to do about it."""
        assert self.failure is not None, "only a failed flow can tell"
        text = f"sink {self.sink.name}: {self.failure.text}"
        batch = unfinished(Path(self.checkpoint))
        if batch is not None:
            ranges = str(batch)
            text += f"; batch {batch.batch}{f' holds {ranges}' if ranges else ''}"
        if self.surrender:
            text += f"; {self.surrender}"
        if batch is not None and not self.failure.kind:
            text += (
                ". Nothing is lost: mend the step and run it again, and this batch is tried again; or let such records go to the "
                "dead letters (bad_records, expect, reject)"
            )
        return text

    def _take_progress(self, query: StreamingQuery) -> None:
        """All reports since the last look: batches may be quicker than looks, and Spark remembers a hundred."""
        # The Python objects for them are made of some fifty calls each; their JSON is one.
        known: Any = query._jsq.recentProgress()
        new: list[str] = []
        for index in range(len(known) - 1, -1, -1):
            report = known[index].json()
            if moment_of(report) <= self._seen:
                break
            new.append(report)
        for report in reversed(new):
            before = self.state.batch
            self.state, self._seen = self.state.after(report), moment_of(report)
            if self.state.batch != before:
                self.restarts.succeeded()

    def _failing_batch(self, text: str) -> str:
        """What names the batch it died in: its number, or where the checkpoint cannot be read from here, the offsets Spark tells."""
        batch = unfinished(Path(self.checkpoint))
        return offsets_of(text)[1] if batch is None else str(batch.batch)

    def _failed(self, now_ms: int, why: Diagnosis, *, batch: str = "", before_start: bool = False) -> None:
        verdict = self.restarts.failed(now_ms, batch, why)
        self.failure = why
        # What cannot even start, for another reason than a broker that is away, will not start later either.
        is_hopeless = before_start and not (why.kind and why.retriable)
        self.state = replace(self.state, failures=self.restarts.count, error=why.text, state="waiting")
        if verdict.surrender or is_hopeless:
            self.surrender = verdict.surrender
            self.state = replace(self.state, state="failed")
        self._wake_ms = now_ms + verdict.wait_ms

    def _writer(self) -> Any:
        writer: Any = self._frame.writeStream.queryName(f"{self.pipeline.name}.{self.sink.name}").outputMode(self.sink.mode)
        writer = writer.option("checkpointLocation", self.checkpoint)
        if self.trigger == AVAILABLE_NOW:
            writer = writer.trigger(availableNow=True)
        elif self.trigger:
            writer = writer.trigger(processingTime=self.trigger)
        return self._to_sink(writer)

    def _to_sink(self, writer: Any) -> Any:
        sink = self.sink
        if sink.kind == "topic":
            options = {**connection_options(self.pipeline), **({"topic": sink.topic} if sink.topic else {})}
            if sink.mode == "append":
                return writer.format("headrace").options(**options)
            # Spark lets sinks written in Python append only. A batch written by hand is published once too, by the same two numbers.
            return writer.foreachBatch(lambda frame, batch: frame.write.format("headrace").options(**options).mode("append").save())
        if sink.kind == "console":
            return writer.foreachBatch(lambda frame, batch: _show(frame, sink, batch))
        from headrace.spark.pipelines.tables.writing import TableWriter, open_table

        return writer.foreachBatch(TableWriter(open_table(sink, self.pipeline.place(sink.path)), sink.mode, sink.merge).write)


@dataclass(frozen=True, slots=True)
class FirstRows:
    """What a task runs for a console: it lets so many rows pass, and goes through the others all the same. A `limit` would not, and
    where a step keeps state (joins, duplicates) Spark fails a batch whose rows were not all asked for."""

    count: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        left = self.count
        for batch in batches:
            if left > 0:
                yield batch.slice(0, left)
            left -= batch.num_rows


def _show(frame: DataFrame, sink: Sink, batch: int) -> None:
    rows = frame.mapInArrow(FirstRows(sink.rows + 1), frame.schema).toArrow().to_pylist()
    print(f"{sink.name}: batch {batch}")
    for row in rows[: sink.rows]:
        print("  " + ", ".join(f"{name}={value}" for name, value in row.items()))
    if len(rows) > sink.rows:
        print("  …")
    sys.stdout.flush()
