"""The driver side of typed values: types from schemas, and errors before any task starts."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from headrace.arrow.values import ERROR_COLUMN
from headrace.errors import ConfigError, Unavailable
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape
from headrace.spark.columns import raw_schema
from headrace.spark.values import is_typed, plan, typed_schema
from headrace.spark.values.types import check_part, json_shape, spark_type
from tests.spark.values.registry import Registry, options

ORDER = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}, "name": {"type": ["string", "null"]}}}
AVRO = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "id", "type": "int"}, {"name": "tags", "type": {"type": "map", "values": "long"}}],
}


def columns(**types: str) -> StructType:
    """Without a session: `columns(value="struct<id bigint>", offset="bigint")`."""
    return StructType([StructField(name, _type(text)) for name, text in types.items()])


def _type(text: str) -> Any:
    return TYPES[text]


def struct(**fields: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


TYPES: dict[str, Any] = {spark_type(kind).simpleString(): spark_type(kind) for kind in Kind}
LONG, STRING = TYPES["bigint"], TYPES["string"]


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    made.require("t", "json", ORDER)
    return made


# Types

PAIRS: list[tuple[Shape, str]] = [
    (Kind.BOOLEAN, "boolean"),
    (Kind.INT8, "tinyint"),
    (Kind.INT16, "smallint"),
    (Kind.INT32, "int"),
    (Kind.INT64, "bigint"),
    (Kind.FLOAT32, "float"),
    (Kind.FLOAT64, "double"),
    (Kind.STRING, "string"),
    (Kind.BINARY, "binary"),
    (Kind.DATE, "date"),
    (Kind.TIMESTAMP, "timestamp"),
    (Kind.TIMESTAMP_NTZ, "timestamp_ntz"),
    (Decimal(10, 2), "decimal(10,2)"),
    (ListOf(Kind.INT64), "array<bigint>"),
    (MapOf(ListOf(Kind.DATE)), "map<string,array<date>>"),
    (Record((Field("a", Kind.INT64), Field("b", Record((Field("c", Kind.STRING),))))), "struct<a:bigint,b:struct<c:string>>"),
]


@pytest.mark.parametrize(("shape", "text"), PAIRS, ids=[text for _, text in PAIRS])
def test_a_shape_and_its_type_of_spark_are_two_ways_to_say_the_same(shape: Shape, text: str) -> None:
    assert spark_type(shape).simpleString() == text
    assert json_shape(spark_type(shape)) == shape


def test_json_text_is_a_string() -> None:
    assert spark_type(Kind.JSON) == StringType()


def test_what_must_not_be_null_is_required_of_json() -> None:
    wanted = StructType([StructField("a", LONG, nullable=False), StructField("b", LONG)])
    assert json_shape(wanted) == Record((Field("a", Kind.INT64, True, False), Field("b", Kind.INT64)))


# The schema of the read


def test_the_value_is_a_struct_among_the_other_columns(registry: Registry) -> None:
    schema = typed_schema(options(value_format="json"), registry.client)
    assert [field.name for field in schema.fields] == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    value = schema["value"].dataType
    assert isinstance(value, StructType) and value == struct(id=LONG, name=STRING)
    assert all(field.nullable for field in value.fields)


def test_headers_and_errors_are_columns_when_requested(registry: Registry) -> None:
    schema = typed_schema(options(value_format="json", includeHeaders="true", badRecords="null"), registry.client)
    assert schema.fieldNames()[-2:] == ["headers", ERROR_COLUMN]


def test_raw_is_the_default_and_asks_no_registry(registry: Registry) -> None:
    for given in (options(), options(value_format="raw")):
        assert typed_schema(given, registry.client) == raw_schema(headers=False)
        assert not is_typed(given)
    assert registry.asked == 0


def test_a_string_needs_no_schema() -> None:
    assert typed_schema(options(value_format="string"), Registry().client)["value"].dataType == STRING


def test_avro_and_protobuf_are_mapped_too(registry: Registry) -> None:
    registry.require("t", "avro", AVRO)
    assert (
        typed_schema(options(value_format="avro"), registry.client)["value"].dataType.simpleString()
        == "struct<id:int,tags:map<string,bigint>>"
    )
    registry.require("t", "protobuf", b'syntax = "proto3"; message M { repeated uint64 n = 1; }')
    value = typed_schema(options(value_format="protobuf"), registry.client)["value"].dataType
    assert value.simpleString() == "struct<n:array<decimal(20,0)>>"


def test_a_text_wins_over_the_registry_and_a_version_picks_one_of_it(registry: Registry) -> None:
    registry.require("t", "json", {"properties": {"a": {"type": "string"}}}, ORDER)
    given = options(value_format="json", value_schema=json.dumps({"properties": {"x": {"type": "boolean"}}}))
    assert typed_schema(given, registry.client)["value"].dataType.simpleString() == "struct<x:boolean>"
    assert registry.asked == 0
    first = typed_schema(options(value_format="json", value_version="1"), registry.client)
    assert first["value"].dataType.simpleString() == "struct<a:string>"


def test_topics_may_differ_in_the_version_and_the_highest_gives_the_types(registry: Registry) -> None:
    registry.require("t", "json", {"properties": {"a": {"type": "string"}}})
    registry.require("u", "json", {"properties": {"a": {"type": "string"}}}, ORDER)
    schema = typed_schema(options(subscribe="t,u", value_format="json"), registry.client)
    assert schema["value"].dataType == struct(id=LONG, name=STRING)


REJECTED: list[tuple[dict[str, str], str]] = [
    ({"value_format": "xml"}, "option value.format: expected raw or json or avro or protobuf or string"),
    ({"value_format": "json", "badRecords": "drop"}, "option badRecords: expected fail or dlq or null"),
    ({"badRecords": "dlq"}, "option badRecords needs value.format"),
    ({"value_schema": "{}"}, "option value.schema needs value.format"),
    ({"value_format": "avro"}, "topic t requires schema s, which is json, but value.format is avro"),
    ({"value_format": "json", "value_version": "7"}, "option value.version: .*7"),
    ({"value_format": "json", "value_version": "x"}, "option value.version: expected a number"),
    ({"value_format": "json", "value_schema": "{}", "value_version": "1"}, "both set"),
    ({"value_format": "json", "value_schema": "{"}, "option value.schema: the schema is not JSON"),
    ({"value_format": "avro", "value_schema": '{"type":"record"}'}, "option value.schema: not an Avro schema"),
    ({"value_format": "protobuf", "value_schema": "message"}, "option value.schema: "),
    ({"value_format": "json", "subscribe": "t,plain"}, "topic plain has no required schema .*in .schema"),
    ({"value_format": "avro", "subscribe": "plain"}, "topic plain has no required schema .*as the option value.schema"),
    ({"value_format": "json", "subscribe": "other,t"}, "topics other and t require two schemas, o and s"),
    ({"value_format": "json", "subscribe": "othr"}, "there is no topic othr; did you mean other"),
    ({"value_format": "avro", "subscribe": "loop"}, "schema s version 1: L contains itself"),
]


@pytest.mark.parametrize(("given", "words"), REJECTED, ids=[str(given) for given, _ in REJECTED])
def test_what_cannot_be_meant_is_rejected_on_the_driver(registry: Registry, given: dict[str, str], words: str) -> None:
    registry.names.append("plain")
    registry.require("other", "json", ORDER, name="o")
    registry.require("loop", "avro", {"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}]})
    with pytest.raises(ConfigError, match=words):
        typed_schema(options(**given), registry.client)


def test_a_broker_that_does_not_answer_is_named(registry: Registry) -> None:
    registry.failure = Unavailable("away")
    with pytest.raises(Unavailable, match="no broker answers at 127.0.0.1:1"):
        plan(options(value_format="json"), struct(value=struct(a=LONG)), registry.client)


def test_a_pattern_without_topics_needs_a_text() -> None:
    given = {"servers": "h:1", "subscribePattern": "x.*", "value.format": "json"}
    with pytest.raises(ConfigError, match="no topic exists yet"):
        typed_schema(type(options())(given), Registry().client)


# The plan of a read


def test_the_arrow_schema_is_the_one_spark_expects(registry: Registry) -> None:
    registry.require("t", "avro", AVRO)
    given = options(value_format="avro")
    decoder = plan(given, typed_schema(given, registry.client), registry.client)
    assert decoder.schema.field("value").type.field("id").type == pa.int32()
    assert decoder.columns == ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
    assert decoder.refreshes_schema


@pytest.mark.parametrize(
    ("bad_records", "schema", "read"),
    [
        ("fail", columns(value="string"), ("value", "partition", "offset")),
        ("dlq", columns(offset="bigint", value="string"), ("offset", "value", "partition")),
        ("null", columns(value="string"), ("value",)),
        ("null", columns(_error="string"), ("value",)),
        ("fail", columns(offset="bigint"), ("offset",)),
    ],
)
def test_what_a_task_reads_is_what_it_needs(bad_records: str, schema: StructType, read: tuple[str, ...]) -> None:
    assert plan(options(value_format="string", badRecords=bad_records), schema, Registry().client).columns == read


def test_a_users_type_decides_for_json() -> None:
    decoder = plan(options(value_format="json"), struct(value=struct(a=LONG)), Registry(names=["t"]).client)
    assert decoder.spec.shape == Record((Field("a", Kind.INT64),))
    assert not decoder.refreshes_schema


def test_a_users_type_wins_over_the_registry_for_json(registry: Registry) -> None:
    assert plan(options(value_format="json"), struct(value=struct(id=STRING)), registry.client).spec.shape is not None
    same = plan(options(value_format="json"), struct(value=struct(id=LONG, name=STRING)), registry.client)
    assert same.spec.shape is None and same.refreshes_schema, "the same type is no reason to forget what is required"


def test_a_users_type_may_leave_fields_of_avro_out_and_not_change_them(registry: Registry) -> None:
    registry.require("t", "avro", AVRO)
    given = options(value_format="avro")
    assert plan(given, struct(value=struct(id=TYPES["int"])), registry.client).schema.field("value").type.num_fields == 1
    with pytest.raises(ConfigError, match="column value.id is bigint, but the schema of the values has int"):
        plan(given, struct(value=struct(id=LONG)), registry.client)
    with pytest.raises(ConfigError, match="column value.nam: the schema has no such field, only id, tags"):
        plan(given, struct(value=struct(nam=STRING)), registry.client)


def test_parts_are_looked_for_inside_lists_and_maps() -> None:
    given = spark_type(Record((Field("a", ListOf(MapOf(Record((Field("b", Kind.INT64), Field("c", Kind.STRING)))))),)))
    check_part(spark_type(Record((Field("a", ListOf(MapOf(Record((Field("c", Kind.STRING),))))),))), given)
    with pytest.raises(ConfigError, match=r"column value.a\[\]\{\}.b is string"):
        check_part(spark_type(Record((Field("a", ListOf(MapOf(Record((Field("b", Kind.STRING),))))),))), given)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (columns(value="binary"), "has value as binary"),
        (columns(value="string", unknown="string"), "has an unknown column unknown"),
        (columns(value="string", offset="string"), "has offset as string"),
        (StructType([StructField("value", STRING, nullable=False)]), "value as not null"),
        (columns(value="string", _error="string"), "badRecords=null"),
    ],
)
def test_a_users_schema_that_cannot_be_given_is_rejected(schema: StructType, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(options(value_format="string"), schema, Registry().client)


def test_a_type_that_json_has_no_values_for_is_rejected() -> None:
    from pyspark.sql.types import DayTimeIntervalType

    with pytest.raises(ConfigError, match="column value.a: JSON cannot be read as interval"):
        plan(options(value_format="json"), struct(value=struct(a=DayTimeIntervalType())), Registry(names=["t"]).client)
