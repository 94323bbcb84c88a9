"""Planning: DataFrames for the sources, steps and sinks of a pipeline. No query starts yet."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructField, StructType

from headrace.arrow.values import ERROR_COLUMN
from headrace.errors import ConfigError, HeadraceError, UnknownTopic
from headrace.flight.client import Servers
from headrace.spark.columns import raw_schema
from headrace.spark.connection import connect
from headrace.spark.options import Options
from headrace.spark.pipelines.diagnosis import diagnose, explained
from headrace.spark.pipelines.files import module_beside, reason_of
from headrace.spark.pipelines.keys import Watermark, nearest
from headrace.spark.pipelines.model import Pipeline, Sink, Source, Step, Transform
from headrace.spark.pipelines.rejection import expect, use_servers
from headrace.spark.retry import RetryPolicy
from headrace.spark.servers import servers_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORD_COLUMNS: Final = frozenset({"key", "value", "headers", "topic", "partition"})


class PlanError(ConfigError):
    """A source, step or sink cannot be planned. `kind` is the code of a broker error, else empty."""

    def __init__(self, place: str, text: str, kind: str = "") -> None:
        super().__init__(f"{place}: {text}")
        self.place, self.kind = place, kind


def connection_options(pipeline: Pipeline) -> dict[str, str]:
    """Return the connection options of sources and sinks. They hold the location of the password, not the password."""
    options = {"servers": pipeline.servers}
    if pipeline.user:
        kind, _, place = pipeline.password.partition(":")
        secret = f"file:{pipeline.directory / Path(place).expanduser()}" if kind == "file" else pipeline.password
        options |= {"user": pipeline.user, "password": secret}
    if pipeline.tls:
        options["tls"] = "true"
    if pipeline.ca:
        options["tls.ca"] = pipeline.ca
    return options


def servers(pipeline: Pipeline) -> Servers:
    """Return the servers for a direct connection."""
    pipeline.secret()
    return servers_of(Options(connection_options(pipeline)))


def check_topics(pipeline: Pipeline) -> None:
    """Check that the broker answers and the topics of the sources exist, before Spark takes seconds to start."""
    where = servers(pipeline)
    client = connect(where)
    known: list[str] | None = None
    RetryPolicy(retries=0).before_start(client.topics, where.addresses)
    for source in pipeline.sources.values():
        for topic in source.topics:
            try:
                client.describe([topic])
            except UnknownTopic as failure:
                known = client.topics() if known is None else known
                text = f"there is no topic {topic!r}{nearest(topic, known)}"
                raise PlanError(f"sources.{source.name}", text, failure.code) from None
            if _wants_schema(source) and client.schema(topic) is None:
                way = 'schema = "id long, …"' if source.format == "json" else 'options = { "value.schema" = "…" }'
                raise PlanError(f"sources.{source.name}", f"topic {topic!r} has no required schema: set {way}")


def _wants_schema(source: Source) -> bool:
    return source.format in ("json", "avro", "protobuf") and not source.schema and "value.schema" not in source.options


def frames(spark: SparkSession, pipeline: Pipeline, *, group: str = "") -> dict[str, DataFrame]:
    """Return every source and step as a DataFrame, and register it as a view. Progress of the sources is committed to `group`."""
    where = servers(pipeline)
    use_servers(where)
    found: dict[str, DataFrame] = {}

    def add(place: str, name: str, make: Callable[[], DataFrame]) -> None:
        frame = _planned(place, make)
        frame.createOrReplaceTempView(f"`{name}`")
        found[name] = frame

    for source in pipeline.sources.values():
        add(f"sources.{source.name}", source.name, partial(_source_frame, spark, pipeline, source, where, group))
    for step in pipeline.steps.values():
        add(f"steps.{step.name}", step.name, partial(_step_frame, spark, pipeline, step, found))
    return found


def shaped(frame: DataFrame, sink: Sink) -> DataFrame:
    """Return the rows in the form of the sink: records for a topic."""
    _check_merge(frame, sink)
    return _planned(f"sinks.{sink.name}", lambda: _records(frame, sink)) if sink.kind == "topic" else frame


def _check_merge(frame: DataFrame, sink: Sink) -> None:
    # Delta can compare structs, such as a window; neither format can compare arrays and maps.
    unsupported = (ArrayType, MapType) if sink.kind == "delta" else (ArrayType, MapType, StructType)
    for key in sink.merge:
        if key not in frame.columns:
            raise PlanError(f"sinks.{sink.name}.merge", f"{sink.source} has no column {key!r}{nearest(key, frame.columns)}")
        kind = frame.schema[key].dataType
        if isinstance(kind, unsupported):
            raise PlanError(f"sinks.{sink.name}.merge", f"{key} is {kind.simpleString()}, which cannot be a merge key of {sink.kind}")


def _planned(place: str, make: Callable[[], DataFrame]) -> DataFrame:
    try:
        return make()
    except (AnalysisException, ParseException) as failure:
        raise PlanError(place, explained(failure), diagnose(failure).kind) from None
    except (PySparkException, Py4JJavaError) as failure:
        found = diagnose(failure)
        raise PlanError(place, found.text, found.kind) from None


def source_options(pipeline: Pipeline, source: Source, group: str = "") -> dict[str, str]:
    """Return the options of the format `headrace` for a source."""
    options = connection_options(pipeline)
    if source.pattern:
        options["subscribePattern"] = source.pattern
    else:
        options["subscribe"] = ",".join(source.topics)
    options["startingOffsets"] = source.starting
    if source.format != "raw":
        options["value.format"] = source.format
        options["badRecords"] = source.bad_records
    if group:
        options["kafka.group.id"] = group
    return {**options, **source.options}


def _source_frame(spark: SparkSession, pipeline: Pipeline, source: Source, where: Servers, group: str) -> DataFrame:
    is_stream = source.read == "stream"
    reader: Any = spark.readStream if is_stream else spark.read
    options = source_options(pipeline, source, group if is_stream else "")
    reader = reader.format("headrace").options(**options)
    if source.schema:
        has_headers = options.get("includeHeaders", "").lower() == "true"
        reader = reader.schema(read_schema(source.schema, headers=has_headers, errors=source.bad_records == "null"))
    frame: DataFrame = reader.load()
    if source.format != "raw":
        frame = unpacked(frame)
    if source.expect:
        frame = expect(frame, source.expect, where)
    return _watermarked(frame, source.watermark)


def read_schema(columns: str, *, headers: bool, errors: bool) -> StructType:
    """Return the schema of a read whose value columns are given as DDL."""
    value = StructType.fromDDL(columns)
    fields = [StructField("value", value) if each.name == "value" else each for each in raw_schema(headers=headers).fields]
    return StructType([*fields, *([StructField(ERROR_COLUMN, StringType())] if errors else [])])


def unpacked(frame: DataFrame) -> DataFrame:
    """Return the fields of the value as columns, then those of the record. A record column whose name is taken becomes `record_NAME`."""
    kind = frame.schema["value"].dataType
    fields = kind.fieldNames() if isinstance(kind, StructType) else []
    # Spark compares names without case.
    taken = {name.lower() for name in fields}
    columns = [F.col(f"value.`{name}`") for name in fields]
    for name in frame.columns:
        if name in ("timestampType", *(["value"] if fields else [])):
            continue
        column = F.col(name).cast("string") if name == "key" else F.col(name)
        columns.append(column.alias(f"record_{name}" if name.lower() in taken else name))
    return frame.select(*columns)


def _step_frame(spark: SparkSession, pipeline: Pipeline, step: Step, above: Mapping[str, DataFrame]) -> DataFrame:
    if step.function is None and not step.python:
        return _watermarked(spark.sql(step.sql or _text_of(pipeline, step)), step.watermark)
    function = step.function or find_function(pipeline, step)
    names = step.inputs or tuple(inspect.signature(function).parameters)
    arguments = []
    for name in names:
        if name != "spark" and name not in above:
            raise PlanError(f"steps.{step.name}", f"there is no source or step {name!r} above it{nearest(name, above)}")
        arguments.append(spark if name == "spark" else above[name])
    made = _called(step, function, arguments)
    if not hasattr(made, "createOrReplaceTempView"):
        raise PlanError(f"steps.{step.name}", f"expected a DataFrame from the function, not {type(made).__name__}")
    return _watermarked(made, step.watermark)


def _called(step: Step, function: Transform, arguments: Sequence[Any]) -> Any:
    try:
        return function(*arguments)
    except (PySparkException, Py4JError):
        raise  # reported like an error in SQL
    except HeadraceError as failure:
        raise PlanError(f"steps.{step.name}", str(failure)) from None
    except Exception as failure:  # user code may raise any exception; report it with the step and its line
        line = traceback.extract_tb(failure.__traceback__)[1:2]
        where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in line)
        raise PlanError(f"steps.{step.name}", reason_of(failure) + where) from failure


def _text_of(pipeline: Pipeline, step: Step) -> str:
    path = Path(pipeline.place(step.sql_file))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise PlanError(f"steps.{step.name}.sql_file", f"{path}: {getattr(failure, 'strerror', None) or failure}") from None


def find_function(pipeline: Pipeline, step: Step) -> Transform:
    """Import `module:function`. Spark sends a module beside the pipeline's file with the tasks."""
    module_name, _, function_name = step.python.partition(":")
    try:
        module = module_beside(pipeline.directory, module_name)
    except ModuleNotFoundError as failure:
        where = f"in {pipeline.directory} or installed"
        raise PlanError(f"steps.{step.name}.python", f"no module {failure.name} {where}") from None
    except Exception as failure:  # user code may raise any exception; report it with the step
        raise PlanError(f"steps.{step.name}.python", f"{module_name}: {reason_of(failure)}") from failure
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise PlanError(f"steps.{step.name}.python", f"{module_name} has no function {function_name}{nearest(function_name, names)}")
    found: Transform = function
    return found


def _watermarked(frame: DataFrame, watermark: Watermark | None) -> DataFrame:
    return frame if watermark is None else frame.withWatermark(watermark.column, watermark.delay)


def _records(frame: DataFrame, sink: Sink) -> DataFrame:
    """Return records: rows that have only record columns unchanged, other rows as JSON objects."""
    names = frame.columns
    if not sink.topic and "topic" not in names:
        raise PlanError(f"sinks.{sink.name}", "no topic: set topic, or add a column topic in the step")
    is_record = "value" in names and isinstance(frame.schema["value"].dataType, (StringType, BinaryType)) and set(names) <= RECORD_COLUMNS
    if is_record and not sink.key and not sink.value:
        return frame
    content = [name for name in names if sink.topic or name != "topic"]
    value = F.expr(sink.value) if sink.value else F.to_json(F.struct(*(F.col(f"`{name}`") for name in content)))
    columns = [_bytes_or_text(frame, value).alias("value")]
    if sink.key:
        columns.append(_bytes_or_text(frame, F.expr(sink.key)).alias("key"))
    if not sink.topic:
        columns.append(F.col("topic"))
    return frame.select(*columns)


def _bytes_or_text(frame: DataFrame, column: Any) -> Any:
    kind = frame.select(column.alias("c")).schema["c"].dataType
    return column if isinstance(kind, (StringType, BinaryType)) else column.cast("string")
