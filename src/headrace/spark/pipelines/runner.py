"""Pipeline runner: one query per sink, until all are finished, one has failed, or a stop is requested."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError

from headrace.errors import HeadraceError, TopicExists, UnknownTopic
from headrace.flight.client import FlightClient
from headrace.spark.connection import connect
from headrace.spark.options import Options
from headrace.spark.pipelines.diagnosis import is_engine_lost
from headrace.spark.pipelines.executions import Execution
from headrace.spark.pipelines.flow import Flow
from headrace.spark.pipelines.model import Pipeline
from headrace.spark.pipelines.plan import check_topics, servers
from headrace.spark.pipelines.progress import QueryState
from headrace.spark.servers import servers_of
from headrace.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS: Final = 0.2
STATUS_SECONDS: Final = 1.0
STOP_SECONDS_MAX: Final = 60.0
"""Time limit of a stop for running batches."""

START_SECONDS_MAX: Final = 15.0
"""Time limit for a query to read its first offsets before the next query starts."""

SHUFFLE_PARTITIONS_LOCAL: Final = "4"
"""With Spark's default of 200, a micro-batch of a few rows takes seconds. A cluster keeps the default."""


class PipelineFailed(HeadraceError):
    """The pipeline has failed. `kind` is the error code of the cause, which decides the exit code."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of an execution: `finished` (all records read) or `stopped`."""

    state: str
    queries: list[QueryState]


class Runner:
    """One execution. It polls `stop`, and calls `on_progress` after every poll of the queries."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        execution: Execution,
        *,
        once: bool = False,
        stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[list[QueryState]], None] = lambda states: None,
    ) -> None:
        self._spark, self._pipeline, self._execution = spark, pipeline, execution
        self._once, self._stop, self._on_progress = once, stop, on_progress
        self._flows: list[Flow] = []
        self._master = str(spark.conf.get("spark.master", ""))
        self._written = 0.0

    def run(self) -> Outcome:
        """Run until the end. Raises `PipelineFailed` when a query gives up, after stopping the others."""
        try:
            ensure_topics(self._pipeline)
            self._flows = [Flow(self._spark, self._pipeline, sink, once=self._once) for sink in self._pipeline.sinks.values()]
            self._start()
            outcome = self._watch()
        except BaseException as failure:
            if is_engine_lost(failure):
                text = f"the Spark process has ended; see {self._execution.directory / 'spark.log'}"
                self._write("failed", error=text)
                raise PipelineFailed(text) from failure
            self._abandon()
            self._write("failed", error=str(failure) or type(failure).__name__)
            raise
        self._write(outcome.state)
        return outcome

    def _start(self) -> None:
        """Start the queries one after the other: each starts its own processes, and Spark gives each process ten seconds to answer."""
        for flow in self._flows:
            flow.start(_now_ms())
            deadline = time.monotonic() + START_SECONDS_MAX
            while flow.is_starting and time.monotonic() < deadline and not self._stop():
                time.sleep(0.02)

    def _watch(self) -> Outcome:
        while True:
            for flow in self._flows:
                flow.poll(_now_ms())
            self._report()
            for flow in self._flows:
                if flow.state.state == "failed":
                    assert flow.failure is not None, "a failed flow knows why"
                    raise PipelineFailed(flow.explain_failure(), flow.failure.kind)
            if all(flow.is_over for flow in self._flows):
                return Outcome("finished", [flow.state for flow in self._flows])
            if self._stop() or self._execution.is_stop_wanted:
                self._write("stopping")
                self._end()
                return Outcome("stopped", [flow.state for flow in self._flows])
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """Stop all queries, each between two batches if its batch ends in time."""
        deadline = time.monotonic() + STOP_SECONDS_MAX
        before = {flow.sink.name: _batch(flow) for flow in self._flows}
        waiting = [flow for flow in self._flows if not flow.is_over]
        while waiting:
            for flow in list(waiting):
                # The next batch may have started already; stopping it early is equivalent.
                if flow.is_between_batches or _batch(flow) != before[flow.sink.name] or time.monotonic() >= deadline:
                    flow.stop()
                    waiting.remove(flow)
            if waiting:
                time.sleep(0.02)
        self._on_progress([flow.state for flow in self._flows])

    def _abandon(self) -> None:
        """Stop the queries after a failure."""
        try:
            self._end()
        except (Py4JError, ConnectionError) as failure:
            if not is_engine_lost(failure):
                raise

    def _report(self) -> None:
        self._on_progress([flow.state for flow in self._flows])
        if time.monotonic() - self._written >= STATUS_SECONDS:
            self._write("running")

    def _write(self, state: str, error: str = "") -> None:
        self._written = time.monotonic()
        self._execution.write(state, [flow.state.plain() for flow in self._flows], now_ms=_now_ms(), master=self._master, error=error)


def _batch(flow: Flow) -> int | None:
    progress = flow.query.lastProgress if flow.query is not None and flow.query.isActive else None
    return None if progress is None else int(progress["batchId"])


def ensure_topics(pipeline: Pipeline) -> None:
    """Create the missing topics of the sinks."""
    wanted = [sink for sink in pipeline.sinks.values() if sink.topic]
    if not wanted:
        return
    client = connect(servers(pipeline))
    for sink in wanted:
        try:
            client.describe([sink.topic])
        except UnknownTopic:
            try:
                client.create_topic(sink.topic, sink.partitions)
            except TopicExists:
                pass  # created concurrently


def run_pipeline(
    pipeline: Pipeline,
    *,
    file: str,
    master: str = "local[*]",
    once: bool = False,
    conf: Mapping[str, str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[list[QueryState]], None] = lambda states: None,
) -> Outcome:
    """Lock the checkpoint, start Spark, run the pipeline, stop Spark. Raises `PipelineFailed` and `PlanError`."""
    with Execution(pipeline.name, pipeline.checkpoint, file=file, graph=pipeline.graph(), now_ms=_now_ms()) as execution:
        execution.write("starting", [], now_ms=_now_ms(), master=master)
        log = execution.directory / "spark.log"
        log.write_bytes(b"")
        try:
            check_topics(pipeline)
            spark = open_session(pipeline, master=master, conf=dict(conf or {}), log=log)
        except BaseException as failure:
            execution.write("failed", [], now_ms=_now_ms(), master=master, error=str(failure))
            raise
        try:
            return Runner(spark, pipeline, execution, once=once, stop=stop, on_progress=on_progress).run()
        finally:
            close_session(spark, log)


def close_session(spark: SparkSession, log: Path | None = None) -> None:
    """Stop the session, unless its Java process has ended."""
    with stderr_to(log):
        try:
            spark.stop()
        except (Py4JError, OSError):
            pass


def open_session(pipeline: Pipeline, *, master: str, conf: dict[str, str], log: Path | None = None) -> SparkSession:
    """Return a session with our settings, overridden by the pipeline, overridden by `conf`. Spark's output goes to `log`."""
    return bare_session(f"headrace {pipeline.name}", master, {**pipeline.conf, **conf}, log)


def bare_session(app_name: str, master: str, conf: Mapping[str, str], log: Path | None = None) -> SparkSession:
    """Return a session without a pipeline."""
    settings = {"spark.sql.shuffle.partitions": SHUFFLE_PARTITIONS_LOCAL} if master.startswith("local") else {}
    settings |= {"spark.ui.enabled": "false", **conf}
    # These loggers write a stack trace for failures that the runner reports in one line.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "py4j"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    with stderr_to(log):
        return session(app_name, master, **settings)


def connected(options: Mapping[str, str]) -> FlightClient:
    """Connect with the options of the data source."""
    return connect(servers_of(Options(options)))


@contextmanager
def stderr_to(log: Path | None) -> Iterator[None]:
    """Redirect standard error to this file, also for processes started meanwhile: Spark's Java process logs a lot."""
    if log is None:
        yield
        return
    kept = os.dup(2)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(opened, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(opened)


def _now_ms() -> int:
    return int(time.time() * 1000)
