"""Typed values with a real Spark and a real broker."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from pyspark.errors import PySparkException

from headrace.schemas.protobuf import ProtobufSchema
from tests.spark.serving import FlightBroker
from tests.spark.values.conftest import Load, SchemaAdmin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Fresh = Callable[..., str]
ORDER = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "at": {"type": "string", "format": "date-time"},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"count": {"type": "integer"}}}},
        "tags": {"type": "object", "additionalProperties": {"type": "number"}},
        "more": {},
    },
}
FIRST = b'{"id":1,"name":"\xc3\xa9","at":"2026-01-02T03:04:05Z","lines":[{"count":2}],"tags":{"a":1},"more":{"x":[1]}}'


def test_json_by_the_schema_of_the_topic(schema_admin: SchemaAdmin, load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    schema_admin.register(topic, "json", ORDER)
    schema_admin.require(topic, topic)
    schema_admin.put(topic, FIRST, None, b'{"id":2}')
    frame = load(topic, **{"value.format": "json"})
    assert frame.schema["value"].dataType.simpleString() == (
        "struct<id:bigint,name:string,at:timestamp,lines:array<struct<count:bigint>>,tags:map<string,double>,more:string>"
    )
    first, tombstone, last = frame.orderBy("offset").collect()
    assert (first.value.id, first.value.name, first.value.more) == (1, "é", '{"x":[1]}')
    assert (first.value.lines[0]["count"], first.value.tags) == (2, {"a": 1.0})
    assert tombstone.value is None and last.value.asDict() == {
        "id": 2, "name": None, "at": None, "lines": None, "tags": None, "more": None,
    }  # fmt: skip
    spread = frame.where("value is not null").select("value.*", "offset").selectExpr("id", "unix_millis(at) AS at", "offset")
    assert [tuple(row) for row in spread.orderBy("offset").collect()] == [(1, 1_767_323_045_000, 0), (2, None, 2)]


def test_avro_and_protobuf(schema_admin: SchemaAdmin, load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic("-avro")
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
            {"name": "either", "type": ["int", "string"]},
        ],
    }
    schema_admin.register(topic, "avro", schema)
    schema_admin.require(topic, topic)
    out = io.BytesIO()
    row = {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("-1.50"), "either": "x"}
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), row)
    schema_admin.put(topic, out.getvalue())
    (value,) = load(topic, **{"value.format": "avro"}).select("value.*").collect()
    assert (value.day, value.price, value.either.asDict()) == (row["day"], row["price"], {"member0": None, "member1": "x"})

    topic = fresh_topic("-proto")
    source = b'syntax = "proto3"; message M { uint64 id = 1; map<string, int32> counts = 2; enum E { A = 0; B = 1; } E kind = 3; }'
    schema_admin.register(topic, "protobuf", source)
    schema_admin.require(topic, topic)
    schema_admin.put(topic, ProtobufSchema(source).message_class(id=2**64 - 1, counts={"a": 1}, kind=1).SerializeToString())
    (value,) = load(topic, **{"value.format": "protobuf"}).select("value.*").collect()
    assert value.asDict() == {"id": decimal.Decimal(2**64 - 1), "counts": {"a": 1}, "kind": "B"}


def test_a_users_schema_and_strings(schema_admin: SchemaAdmin, load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    schema_admin.put(topic, b'{"id":1,"name":"a","price":1.50}')
    typed = load(topic, "value struct<price: decimal(5,2), id: int>, offset bigint", **{"value.format": "json"})
    assert [row.asDict(recursive=True) for row in typed.collect()] == [
        {"value": {"price": decimal.Decimal("1.50"), "id": 1}, "offset": 0},
    ]
    assert load(topic, **{"value.format": "string"}).select("value").collect()[0].value == '{"id":1,"name":"a","price":1.50}'


def test_a_bad_record_fails_the_query_with_its_place(schema_admin: SchemaAdmin, load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic(partitions=2)
    schema_admin.put(topic, b'{"id":1}', b'{"id":"x"}', partition=1)
    frame = load(topic, "value struct<id: bigint>", **{"value.format": "json"})
    with pytest.raises(PySparkException, match=rf"topic {topic}, partition 1, offset 1: the value cannot be read as json: Expected `int"):
        frame.collect()


def test_a_bad_record_can_be_a_null_with_a_reason(schema_admin: SchemaAdmin, load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    schema_admin.put(topic, b'{"id":1}', b"no")
    frame = load(topic, **{"value.format": "json", "value.schema": json.dumps(ORDER), "badRecords": "null"})
    good, bad = frame.orderBy("offset").select("value.id", "_error").collect()
    assert (good.id, good._error, bad.id) == (1, None, None)
    assert bad._error.startswith("not JSON")


def test_bad_records_of_a_stream_lie_among_the_dead_letters_once(
    spark: SparkSession, broker: FlightBroker, schema_admin: SchemaAdmin, fresh_topic: Fresh, tmp_path: Path
) -> None:
    topic = fresh_topic(partitions=2)
    schema_admin.put(topic, b'{"id":1}', b"bad 1", b'{"id":2}', partition=0)
    schema_admin.put(topic, b"bad 2", b'{"id":3}', partition=1)
    options: dict[str, Any] = {
        "servers": broker.address,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "value.format": "json",
        "value.schema": json.dumps(ORDER),
        "badRecords": "dlq",
    }
    for run in range(2):  # the second has a new checkpoint and finds the same bad records again
        frame = spark.readStream.format("headrace").options(**options).load().select("value.id")
        query = frame.writeStream.format("memory").queryName(f"typed_{run}").option("checkpointLocation", str(tmp_path / str(run)))
        query.trigger(availableNow=True).start().awaitTermination()
        assert sorted(row.id for row in spark.table(f"typed_{run}").collect()) == [1, 2, 3]
    letters = schema_admin.dead_letters(topic)
    assert sorted(letter.value for letter in letters) == [b"bad 1", b"bad 2"]
    assert all(letter.reason.startswith("unreadable: as json: not JSON") for letter in letters)


def test_mistakes_are_reported_by_load(load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    with pytest.raises(PySparkException, match=f"topic {topic} has no required schema"):
        load(topic, **{"value.format": "avro"})
    with pytest.raises(PySparkException, match="option badRecords needs value.format"):
        load(topic, badRecords="dlq")


def test_a_new_version_is_read_while_a_query_of_the_old_one_runs(schema_admin: SchemaAdmin, load: Load, fresh_topic: Fresh) -> None:
    topic = fresh_topic()
    old = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
    new = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "x", "type": "string", "default": "?"}]}
    schema_admin.register(topic, "avro", old)
    schema_admin.require(topic, topic)
    schema_admin.put(topic, b"\x02")
    before = load(topic, **{"value.format": "avro"})
    schema_admin.register(topic, "avro", new)
    schema_admin.put(topic, b"\x04\x02y")
    assert [row.id for row in before.select("value.id", "offset").orderBy("offset").collect()] == [1, 2]
    after = load(topic, **{"value.format": "avro"}).orderBy("offset").select("value.*").collect()
    assert [tuple(row) for row in after] == [(1, "?"), (2, "y")]
