"""SQL queries over topics: each topic that a query names becomes a view of its current records.

Spark's parser finds the tables of a query. A topic name that is not an SQL name needs backquotes (`` `orders-eu` ``); a name with dots,
such as `orders.by_minute`, does not if it is a topic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructType, _parse_datatype_string

from headrace.arrow.values import ERROR_COLUMN
from headrace.errors import ConfigError, UnknownTopic
from headrace.flight.client import FlightClient
from headrace.spark.pipelines.diagnosis import diagnose, explained
from headrace.spark.pipelines.keys import nearest
from headrace.spark.pipelines.plan import read_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RELATION: Final = re.compile(r"'UnresolvedRelation \[(.*?)\], \[")
_CHANGE: Final = re.compile(r"'?(DeleteFromTable|UpdateTable|MergeIntoTable|InsertInto\w*|OverwriteBy\w*|TruncateTable)\b")
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/", re.DOTALL)


class QueryError(ConfigError):
    """Spark cannot run the query. `kind` is the code of a broker error, else empty."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading topics in a query."""

    options: Mapping[str, str]
    format: str = ""
    """json, avro or protobuf: add the fields of values as columns. Empty: only if the topic requires a schema."""
    schema: str = ""
    more: Mapping[str, str] = field(default_factory=dict)


def relations(spark: SparkSession, query: str) -> list[str]:
    """Return the tables that a query names, without those it defines. Raises `QueryError` for invalid SQL and for changes."""
    session: Any = spark._jsparkSession
    try:
        plan = session.sessionState().sqlParser().parsePlan(query).toString()
    except ParseException as failure:
        raise QueryError(explained(failure)) from None
    if _CHANGE.match(plan):
        raise QueryError("queries cannot change a topic: use `headrace pub` or a pipeline to add records")
    own = set(re.findall(r"^\s*[:+|\- ]*CTE \[(.*)\]", plan, re.MULTILINE))
    defined = {name.strip() for names in own for name in names.split(",")}
    found = [name.replace(", ", ".") for name in _RELATION.findall(plan)]
    return list(dict.fromkeys(name for name in found if name not in defined))


def run_query(spark: SparkSession, client: FlightClient, query: str, reading: ReadOptions) -> DataFrame:
    """Plan a query over topics. Raises `QueryError` and `UnknownTopic`."""
    topics = client.topics()
    named = relations(spark, query)
    for name in named:
        if name in topics:
            _view(spark, client, name, reading)
        elif "." not in name and not _is_table(spark, name):
            raise _unknown(name, topics)
    # Spark reads a name with dots as schema and table; quotes make it a topic.
    text = quoted(query, [name for name in named if "." in name and name in topics])
    try:
        return spark.sql(text)
    except (AnalysisException, ParseException) as failure:
        raise QueryError(explained(failure), diagnose(failure).kind) from None


@dataclass(frozen=True, slots=True)
class Answer:
    """The first rows of a query, and the number of values by topic that could not be decoded and were null."""

    rows: pa.Table
    unread: dict[str, int]


def answer(frame: DataFrame, limit: int) -> Answer:
    """Return the first rows and the count of undecodable values, which results do not show otherwise. Raises `QueryError`."""
    first = frame.limit(limit)
    try:
        rows = first.toArrow()
    except PySparkException as failure:
        found = diagnose(failure)
        raise QueryError(found.text, found.kind) from None
    # Spark has counted during the read; this does not run the query again.
    jframe: Any = first._jdf
    counts = jframe.queryExecution().observedMetrics()
    topics = [name for name in counts.keys().mkString("\n").split("\n") if name]
    unread = {topic: int(counts.apply(topic).getLong(0)) for topic in topics}
    return Answer(rows, {topic: count for topic, count in unread.items() if count})


def quoted(query: str, names: list[str]) -> str:
    """Return the query with these names in backquotes, except inside quotes and comments."""
    if not names:
        return query
    pattern = re.compile(r"(?<![\w.`])(" + "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) + r")(?![\w`])")
    parts, place = [], 0
    for kept in _QUOTED.finditer(query):
        parts += [pattern.sub(r"`\1`", query[place : kept.start()]), kept[0]]
        place = kept.end()
    return "".join([*parts, pattern.sub(r"`\1`", query[place:])])


def _view(spark: SparkSession, client: FlightClient, topic: str, reading: ReadOptions) -> None:
    """Register a topic as a view: key and value as strings, with a schema also the fields of the values as columns."""
    try:
        _frame(spark, client, topic, reading).createOrReplaceTempView(f"`{topic}`")
    except PySparkException as failure:
        raise QueryError(explained(failure), diagnose(failure).kind) from None


def _frame(spark: SparkSession, client: FlightClient, topic: str, reading: ReadOptions) -> DataFrame:
    options = {**reading.options, "subscribe": topic, "includeHeaders": "true", **reading.more}
    required = client.schema(topic)
    form = reading.format or (required.kind if required is not None else "")
    columns = reading.schema
    raw = spark.read.format("headrace").options(**options)
    if form == "json" and required is None and not columns:
        columns = guessed_columns(raw.load())
    if not form or (form == "json" and required is None and not columns):
        return raw.load().withColumns({name: F.col(name).cast("string") for name in ("key", "value")})
    typed = raw.options(**{"value.format": form, "badRecords": "null"})
    if columns:
        typed = typed.schema(read_schema(columns, headers=True, errors=True))
    frame = typed.load().observe(topic, F.count(ERROR_COLUMN).alias("unread"))
    frame = frame.withColumn("key", F.col("key").cast("string"))
    kind = frame.schema["value"].dataType
    fields = kind.fieldNames() if isinstance(kind, StructType) else []
    # Spark compares names without case.
    taken = {name.lower() for name in frame.columns}
    return frame.select("*", *(F.col(f"value.`{name}`") for name in fields if name.lower() not in taken))


def guessed_columns(frame: DataFrame, records_max: int = 1000) -> str:
    """Return the columns of the first values as DDL; empty if none is a JSON object."""
    values = [row.value for row in frame.select(F.col("value").cast("string").alias("value")).limit(records_max).collect()]
    objects = [value for value in values if value and _is_object(value)]
    if not objects:
        return ""
    [row] = frame.sparkSession.range(1).select(F.schema_of_json(F.lit(f"[{','.join(objects)}]")).alias("ddl")).collect()
    kind = _parse_datatype_string(row.ddl)
    element = kind.elementType if isinstance(kind, ArrayType) else kind
    return ", ".join(f"`{each.name}` {each.dataType.simpleString()}" for each in element.fields) if isinstance(element, StructType) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _is_table(spark: SparkSession, name: str) -> bool:
    return bool(spark.catalog.tableExists(f"`{name}`"))


def _unknown(name: str, topics: list[str]) -> UnknownTopic:
    failure = UnknownTopic(name)
    failure.args = (f"there is no topic {name!r}{nearest(name, topics)}",)
    return failure
