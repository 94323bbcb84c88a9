"""Dry run of a pipeline: sources with their offsets, the columns of every step, sinks; or the first error.

Spark plans the queries, so a pipeline that passes this check fails later only because of values of records.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.spark.connection import connect
from headrace.spark.options import Options
from headrace.spark.pipelines.diagnosis import diagnose
from headrace.spark.pipelines.model import Pipeline, Sink, Source
from headrace.spark.pipelines.plan import PlanError, check_topics, frames, servers, shaped, source_options
from headrace.spark.pipelines.runner import close_session, open_session
from headrace.spark.subscription import Subscription

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Node:
    """A line of the tree, with its children."""

    text: str
    below: list[Node] = field(default_factory=list)

    def lines(self, first: str = "", rest: str = "") -> list[str]:
        found = [first + self.text]
        for index, node in enumerate(self.below):
            is_last = index == len(self.below) - 1
            found += node.lines(rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))
        return found


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of the check, as plain values."""

    name: str
    checkpoint: str
    sources: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    sinks: list[dict[str, Any]]

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "checkpoint": self.checkpoint, "sources": self.sources, "steps": self.steps, "sinks": self.sinks}

    def tree(self) -> str:
        """Return the result as a text tree."""
        parts = [Node("sources", [_source_node(source) for source in self.sources])]
        if self.steps:
            parts.append(Node("steps", [Node(step["name"], [_columns_node(step["columns"])]) for step in self.steps]))
        parts.append(Node("sinks", [_sink_node(sink) for sink in self.sinks]))
        return "\n".join(Node(f"{self.name} (checkpoint {self.checkpoint})", parts).lines())


def inspect(pipeline: Pipeline, *, master: str = "local[*]", conf: dict[str, str] | None = None) -> Inspection:
    """Start Spark, plan, describe, stop Spark. Raises `PlanError` for the first error."""
    check_topics(pipeline)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "spark.log"
        spark = open_session(pipeline, master=master, conf=dict(conf or {}), log=log)
        try:
            return describe(spark, pipeline)
        finally:
            close_session(spark, log)


def describe(spark: SparkSession, pipeline: Pipeline) -> Inspection:
    """Plan and describe the pipeline in an existing session."""
    every = frames(spark, pipeline)
    for sink in pipeline.sinks.values():
        shaped(every[sink.source], sink)
        _check_mode(spark, every[sink.source], sink)
        if sink.path:
            _check_types(pipeline, every[sink.source], sink)
    return Inspection(
        pipeline.name,
        pipeline.checkpoint,
        [_source(pipeline, source, every[source.name]) for source in pipeline.sources.values()],
        [{"name": name, "columns": _columns(every[name])} for name in pipeline.steps],
        [_sink(pipeline, sink, every[sink.source]) for sink in pipeline.sinks.values()],
    )


def _check_mode(spark: SparkSession, frame: DataFrame, sink: Sink) -> None:
    """Check with Spark that this stream can be written in this mode."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException

    if not frame.isStreaming:
        raise PlanError(f"sinks.{sink.name}.from", f'{sink.source} is not a stream: at least one of its sources needs read = "stream"')
    jvm: Any = spark._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[sink.mode]()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    jframe: Any = frame._jdf
    try:
        checker.checkForStreaming(jframe.queryExecution().analyzed(), mode)
    except (Py4JJavaError, AnalysisException) as failure:
        raise PlanError(f"sinks.{sink.name}.mode", diagnose(failure).text) from None


def _check_types(pipeline: Pipeline, frame: DataFrame, sink: Sink) -> None:
    """Check that the table supports the types of the rows and that its library is installed."""
    from headrace.spark.pipelines.tables import TableError
    from headrace.spark.pipelines.tables.writing import arrow_schema, open_table

    try:
        open_table(sink, pipeline.place(sink.path)).schema(arrow_schema(frame))
    except TableError as failure:
        raise PlanError(f"sinks.{sink.name}", str(failure)) from None


def _source(pipeline: Pipeline, source: Source, frame: DataFrame) -> dict[str, Any]:
    client = connect(servers(pipeline))
    topics = Subscription.of(Options(source_options(pipeline, source))).topics(client)
    states = client.describe(topics)
    return {
        "name": source.name,
        "format": source.format,
        "read": source.read,
        "topics": [
            {
                "topic": topic,
                "partitions": [
                    {"partition": index, "first": each.first, "end": each.end} for index, each in enumerate(states[topic].partitions)
                ],
            }
            for topic in topics
        ],
        "columns": _columns(frame),
    }


def _sink(pipeline: Pipeline, sink: Sink, frame: DataFrame) -> dict[str, Any]:
    found: dict[str, Any] = {"name": sink.name, "from": sink.source, "kind": sink.kind, "mode": sink.mode}
    if sink.kind == "topic":
        found |= {"topic": sink.topic or "(column topic)", "columns": _columns(shaped(frame, sink))}
    elif sink.path:
        found |= {"path": pipeline.place(sink.path), "columns": _columns(frame)}
    return found


def _columns(frame: DataFrame) -> list[dict[str, str]]:
    return [{"name": each.name, "type": each.dataType.simpleString()} for each in frame.schema.fields]


def _columns_node(columns: list[dict[str, str]]) -> Node:
    return Node(", ".join(f"{each['name']} {each['type']}" for each in columns))


def _source_node(source: dict[str, Any]) -> Node:
    topics = [
        Node(f"topic {each['topic']}", [Node(f"partition {at['partition']}: {at['first']}–{at['end']}") for at in each["partitions"]])
        for each in source["topics"]
    ]
    return Node(f"{source['name']} ({source['format']}, {source['read']})", [_columns_node(source["columns"]), *topics])


def _sink_node(sink: dict[str, Any]) -> Node:
    where = sink.get("topic") or sink.get("path") or ""
    below = [_columns_node(sink["columns"])] if "columns" in sink else []
    return Node(f"{sink['name']}: {sink['from']} → {sink['kind']} {where}".rstrip() + f" ({sink['mode']})", below)
