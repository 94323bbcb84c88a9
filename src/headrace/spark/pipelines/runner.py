"""Running a pipeline: one query per sink, watched until all are finished, one has failed for good, or somebody says stop."""

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

LOOK_SECONDS: Final = 0.2
STATUS_SECONDS: Final = 1.0
STOP_SECONDS_MAX: Final = 60.0
"""How long a stop waits for the batches that are under way."""

START_SECONDS_MAX: Final = 15.0
"""How long one query waits for the one before it to have read its first offsets."""

SHUFFLE_PARTITIONS_LOCAL: Final = "4"
"""Spark's own 200 would make a micro-batch of a few rows take seconds; on a cluster its default stays."""


class PipelineFailed(HeadraceError):
    """A pipeline that gave up; `kind` is that of the cause, which decides the exit code."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `finished` (all there was to read is read) or `stopped`."""

    state: str
    queries: list[QueryState]


class Runner:
    """One run. `stop` is asked often whether it should end; `tell` hears of every look."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        run: Execution,
        *,
        once: bool = False,
        stop: Callable[[], bool] = lambda: False,
        tell: Callable[[list[QueryState]], None] = lambda states: None,
    ) -> None:
        self._spark, self._pipeline, self._run = spark, pipeline, run
        self._once, self._stop, self._tell = once, stop, tell
        self._flows: list[Flow] = []
        self._master = str(spark.conf.get("spark.master", ""))
        self._written = 0.0

    def run(self) -> Outcome:
        """Raises `PipelineFailed` when a query has failed for good; the others are stopped then."""
        try:
            ensure_topics(self._pipeline)
            self._flows = [Flow(self._spark, self._pipeline, sink, once=self._once) for sink in self._pipeline.sinks.values()]
            self._start()
            outcome = self._watch()
        except BaseException as failure:
            if is_engine_lost(failure):
                text = f"the Spark process has ended; what it said last is in {self._run.directory / 'spark.log'}"
                self._write("failed", error=text)
                raise PipelineFailed(text) from failure
            self._abandon()
            self._write("failed", error=str(failure) or type(failure).__name__)
            raise
        self._write(outcome.state)
        return outcome

    def _start(self) -> None:
        """One after the other: each query starts processes of its own, and Spark gives each of these ten seconds to answer."""
        for flow in self._flows:
            flow.start(_now_ms())
            deadline = time.monotonic() + START_SECONDS_MAX
            while flow.is_starting and time.monotonic() < deadline and not self._stop():
                time.sleep(0.02)

    def _watch(self) -> Outcome:
        while True:
            for flow in self._flows:
                flow.look(_now_ms())
            self._report()
            for flow in self._flows:
                if flow.state.state == "failed":
                    assert flow.failure is not None, "a failed flow knows why"
                    raise PipelineFailed(flow.explain_failure(), flow.failure.kind)
            if all(flow.is_over for flow in self._flows):
                return Outcome("finished", [flow.state for flow in self._flows])
            if self._stop() or self._run.is_stop_wanted:
                self._write("stopping")
                self._end()
                return Outcome("stopped", [flow.state for flow in self._flows])
            time.sleep(LOOK_SECONDS)

    def _end(self) -> None:
        """Stop all queries, each between two batches if one comes to its end in time."""
        deadline = time.monotonic() + STOP_SECONDS_MAX
        before = {flow.sink.name: _batch(flow) for flow in self._flows}
        waiting = [flow for flow in self._flows if not flow.is_over]
        while waiting:
            for flow in list(waiting):
                # A batch that has just ended may be followed at once by the next: stopping that one early is as good.
                if flow.is_between_batches or _batch(flow) != before[flow.sink.name] or time.monotonic() >= deadline:
                    flow.stop()
                    waiting.remove(flow)
            if waiting:
                time.sleep(0.02)
        self._tell([flow.state for flow in self._flows])

    def _abandon(self) -> None:
        """Stop what can be stopped on the way out."""
        try:
            self._end()
        except (Py4JError, ConnectionError) as failure:
            if not is_engine_lost(failure):
                raise

    def _report(self) -> None:
        self._tell([flow.state for flow in self._flows])
        if time.monotonic() - self._written >= STATUS_SECONDS:
            self._write("running")

    def _write(self, state: str, error: str = "") -> None:
        self._written = time.monotonic()
        self._run.write(state, [flow.state.plain() for flow in self._flows], now_ms=_now_ms(), master=self._master, error=error)


def _batch(flow: Flow) -> int | None:
    progress = flow.query.lastProgress if flow.query is not None and flow.query.isActive else None
    return None if progress is None else int(progress["batchId"])


def ensure_topics(pipeline: Pipeline) -> None:
    """Make the topics that sinks write to, with as many partitions as they say."""
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
                pass  # somebody else was quicker


def run_pipeline(
    pipeline: Pipeline,
    *,
    file: str,
    master: str = "local[*]",
    once: bool = False,
    conf: Mapping[str, str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[list[QueryState]], None] = lambda states: None,
) -> Outcome:
    """From nothing to the end: lock the checkpoint, start Spark, run, end Spark. Raises `PipelineFailed` and what planning raises."""
    with Execution(pipeline.name, pipeline.checkpoint, file=file, now_ms=_now_ms()) as run:
        run.write("starting", [], now_ms=_now_ms(), master=master)
        log = run.directory / "spark.log"
        log.write_bytes(b"")
        try:
            check_topics(pipeline)
            spark = open_session(pipeline, master=master, conf=dict(conf or {}), log=log)
        except BaseException as failure:
            run.write("failed", [], now_ms=_now_ms(), master=master, error=str(failure))
            raise
        try:
            return Runner(spark, pipeline, run, once=once, stop=stop, tell=tell).run()
        finally:
            close_session(spark, log)


def close_session(spark: SparkSession, log: Path | None = None) -> None:
    """A session whose Java has died cannot be stopped, and need not be."""
    with talking_to(log):
        try:
            spark.stop()
        except (Py4JError, OSError):
            pass


def open_session(pipeline: Pipeline, *, master: str, conf: dict[str, str], log: Path | None = None) -> SparkSession:
    """A session with the settings of the pipeline, over ours, under those of the command line; what Spark says goes to `log`."""
    return bare_session(f"headrace {pipeline.name}", master, {**pipeline.conf, **conf}, log)


def bare_session(app: str, master: str, conf: Mapping[str, str], log: Path | None = None) -> SparkSession:
    """The same without a pipeline."""
    settings = {"spark.sql.shuffle.partitions": SHUFFLE_PARTITIONS_LOCAL} if master.startswith("local") else {}
    settings |= {"spark.ui.enabled": "false", **conf}
    # They log every failed analysis and every broken connection with its stack; we say it in one line.
    for talker in ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "py4j"):
        logging.getLogger(talker).setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    with talking_to(log):
        return session(app, master, **settings)


def connected(options: Mapping[str, str]) -> FlightClient:
    """A connection by the options of the data source."""
    return connect(servers_of(Options(options)))


@contextmanager
def talking_to(log: Path | None) -> Iterator[None]:
    """While it lasts, our standard error is this file; a process that is started meanwhile keeps it. Spark's Java is talkative."""
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
