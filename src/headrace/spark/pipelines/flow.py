"""Query of one sink of a running pipeline, with its restarts and state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from headrace.spark.pipelines import traces
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
    """Streaming query from the sources to one sink."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, sink: Sink, *, once: bool) -> None:
        self.pipeline, self.sink = pipeline, sink
        self.checkpoint = f"{pipeline.checkpoint}/{sink.name}"
        self.trigger = AVAILABLE_NOW if once else sink.trigger or pipeline.trigger
        self.state = QueryState(sink.name)
        self.restarts = Restarts(pipeline.restart)
        self.query: StreamingQuery | None = None
        self.failure: Diagnosis | None = None
        self.give_up = ""
        self._wake_ms = 0
        self._seen = ""
        self._send_span = traces.report()
        # Each sink reads at its own pace, so each has its own group for progress.
        every = frames(spark, pipeline, group=f"{pipeline.name}.{sink.name}")
        self._frame = shaped(every[sink.source], sink)

    def start(self, now_ms: int) -> None:
        """Start the query from its checkpoint. A failure counts as a failure of the query."""
        try:
            self.query = self._writer().start()
        except (PySparkException, Py4JJavaError) as failure:
            self._failed(now_ms, diagnose(failure), before_start=True)
            return
        self.state = replace(self.state, state="running", error="")

    def poll(self, now_ms: int) -> None:
        """Update the state of the query; restart it when its pause is over."""
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
        """Whether the query still waits for the first offsets of its sources."""
        if self.query is None or not self.query.isActive:
            return False
        return str(self.query.status["message"]).startswith(("Initializing", "Getting offsets"))

    @property
    def is_between_batches(self) -> bool:
        """Whether no batch is running; also true without a query."""
        return self.query is None or not self.query.isActive or not self.query.status["isTriggerActive"]

    def stop(self) -> None:
        """Stop the query at once. The next start repeats an unfinished batch under the same number."""
        if self.query is not None and self.query.isActive:
            self.query.stop()
            self._take_progress(self.query)
        if not self.is_over:
            self.state = replace(self.state, state="stopped")

    def explain_failure(self) -> str:
        """Return what failed, in which batch, and what to do."""
        assert self.failure is not None, "the flow has failed"
        text = f"sink {self.sink.name}: {self.failure.text}"
        batch = unfinished(Path(self.checkpoint))
        if batch is not None:
            ranges = str(batch)
            text += f"; batch {batch.batch}{f' holds {ranges}' if ranges else ''}"
        if self.give_up:
            text += f"; {self.give_up}"
        if batch is not None and not self.failure.kind:
            text += (
                ". No record is lost: fix the step and run the pipeline again, which repeats this batch; or move such records to the "
                "dead letters (bad_records, expect, reject)"
            )
        return text

    def _take_progress(self, query: StreamingQuery) -> None:
        """Apply all progress reports since the last poll. Spark keeps the last hundred."""
        # A Python object for a report takes about fifty calls, its JSON takes one.
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
            if self._send_span is not None:
                self._send_span(self.pipeline.name, self.state.name, report)

    def _failing_batch(self, text: str) -> str:
        """Return the number of the failed batch, or if the checkpoint cannot be read, the offsets from Spark's message."""
        batch = unfinished(Path(self.checkpoint))
        return offsets_of(text)[1] if batch is None else str(batch.batch)

    def _failed(self, now_ms: int, why: Diagnosis, *, batch: str = "", before_start: bool = False) -> None:
        decision = self.restarts.failed(now_ms, batch, why)
        self.failure = why
        # A query that cannot start will not start later, unless the broker was unavailable.
        is_hopeless = before_start and not (why.kind and why.retriable)
        self.state = replace(self.state, failures=self.restarts.count, error=why.text, state="waiting")
        if decision.give_up or is_hopeless:
            self.give_up = decision.give_up
            self.state = replace(self.state, state="failed")
        self._wake_ms = now_ms + decision.wait_ms

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
            # Spark allows only append for Python sinks. foreachBatch also publishes once, by query id and batch id.
            return writer.foreachBatch(lambda frame, batch: frame.write.format("headrace").options(**options).mode("append").save())
        if sink.kind == "console":
            return writer.foreachBatch(lambda frame, batch: _show(frame, sink, batch))
        from headrace.spark.pipelines.tables.writing import TableWriter, open_table

        return writer.foreachBatch(TableWriter(open_table(sink, self.pipeline.place(sink.path)), sink.mode, sink.merge).write)


@dataclass(frozen=True, slots=True)
class FirstRows:
    """Task of a console sink: yields the first rows and consumes the others. `limit` would not consume them, and Spark fails a batch of a
    stateful step (join, deduplication) whose rows were not all consumed."""

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
