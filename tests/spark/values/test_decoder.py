"""The task side of typed values: typed columns from bytes, and the handling of bad records."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import pickle
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ByteType, DecimalType, LongType, StringType, StructField, StructType

from headrace.arrow import values as decoding
from headrace.arrow.values import Decoder, UnreadableRecord
from headrace.errors import Unavailable
from headrace.schemas.protobuf import ProtobufSchema
from headrace.spark.values import plan, typed_schema
from tests.spark.values.registry import Registry, options, rows

ORDER = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}, "more": {}},
}
GOOD, BAD = b'{"id":1}', b'{"id":"x"}'


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    made.require("t", "json", ORDER)
    return made


def decoder_of(registry: Registry, schema: StructType | None = None, **more: str) -> Decoder:
    given = options(**{"value_format": "json", **more})
    return plan(given, schema or typed_schema(given, registry.client), registry.client)


def values(batch: pa.RecordBatch) -> list[Any]:
    found: list[Any] = batch.column("value").to_pylist()
    return found


def test_values_are_typed_and_the_other_columns_stay(registry: Registry) -> None:
    typed = decoder_of(registry, includeHeaders="true")
    out = typed.decode(rows([b'{"id":1,"at":"2026-01-02T03:04:05+01:00","more":[1]}', None, b'{"id":2}']), "t", registry.client)
    assert out.schema.equals(typed.schema)
    moment = datetime.datetime(2026, 1, 2, 2, 4, 5, tzinfo=datetime.UTC)
    assert values(out) == [{"id": 1, "at": moment, "more": "[1]"}, None, {"id": 2, "at": None, "more": None}]
    assert out.column("offset").to_pylist() == [100, 101, 102]
    assert out.column("headers").to_pylist() == [[{"key": "h", "value": b"1"}]] * 3


def test_the_schema_is_exactly_what_spark_wants(registry: Registry) -> None:
    given = options(value_format="json", includeHeaders="true", badRecords="null")
    schema = typed_schema(given, registry.client)
    out = plan(given, schema, registry.client).decode(rows([GOOD]), "t", registry.client)
    assert out.schema.equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)


def test_a_batch_without_rows_comes_out_as_one(registry: Registry) -> None:
    for policy in ("fail", "dlq", "null"):
        assert decoder_of(registry, badRecords=policy).decode(rows([]), "t", registry.client).num_rows == 0


def test_a_decoder_travels(registry: Registry) -> None:
    there = pickle.loads(pickle.dumps(decoder_of(registry)))
    assert values(there.decode(rows([GOOD]), "t", registry.client))[0]["id"] == 1


# Bad records


def test_fail_names_topic_partition_offset_and_reason(registry: Registry) -> None:
    with pytest.raises(
        UnreadableRecord, match=r"topic t, partition 3, offset 101: .* json: Expected `int`, got `str` - at `\$.id`"
    ) as caught:
        decoder_of(registry).decode(rows([GOOD, BAD, b"{"]), "t", registry.client)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.offset) == (str(caught.value), 101)


def test_null_leaves_the_value_out_and_says_why(registry: Registry) -> None:
    out = decoder_of(registry, badRecords="null").decode(rows([GOOD, BAD, None]), "t", registry.client)
    assert [value and value["id"] for value in values(out)] == [1, None, None]
    errors = out.column("_error").to_pylist()
    assert errors[0] is errors[2] is None and "`$.id`" in errors[1]
    assert decoder_of(registry, badRecords="null").decode(rows([GOOD]), "t", registry.client).column("_error").to_pylist() == [None]
    assert registry.letters == []


def test_dlq_moves_the_record_and_leaves_the_row_out(registry: Registry) -> None:
    out = decoder_of(registry, badRecords="dlq").decode(rows([BAD, GOOD, b"no", GOOD]), "t", registry.client)
    assert out.column("offset").to_pylist() == [101, 103]
    assert [value["id"] for value in values(out)] == [1, 1]
    ((topic, letters),) = registry.letters
    assert topic == "t"
    assert [(letter["partition"], letter["offset"], letter["reason"]) for letter in letters] == [
        (3, 100, "unreadable"),
        (3, 102, "unreadable"),
    ]
    assert letters[1]["error"].startswith("as json: not JSON")


def test_a_broker_that_is_away_for_a_moment_gets_the_bad_records_when_it_is_back(registry: Registry) -> None:
    registry.away = 2
    assert decoder_of(registry, badRecords="dlq").decode(rows([BAD]), "t", registry.client).num_rows == 0
    assert len(registry.letters) == 1


def test_a_bad_record_that_cannot_be_moved_fails_the_task(registry: Registry) -> None:
    registry.away = 1_000
    typed = decoder_of(registry, badRecords="dlq", kafkaConsumer_pollTimeoutMs="20")
    with pytest.raises(Unavailable):
        typed.decode(rows([BAD]), "t", registry.client)


def test_a_batch_of_bad_records_only_is_empty(registry: Registry) -> None:
    assert decoder_of(registry, badRecords="dlq").decode(rows([BAD, BAD]), "t", registry.client).num_rows == 0


def test_very_many_bad_records_are_moved_in_turns(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DEAD_LETTERS_MOVED_MAX", 2)
    decoder_of(registry, badRecords="dlq").decode(rows([BAD] * 5), "t", registry.client)
    assert [len(letters) for _, letters in registry.letters] == [2, 2, 1]


def test_unselected_columns_are_not_returned(registry: Registry) -> None:
    typed = decoder_of(registry, StructType([StructField("value", StructType([StructField("id", LongType())]))]), badRecords="dlq")
    out = typed.decode(rows([GOOD, BAD], typed.columns), "t", registry.client)
    assert out.schema.names == ["value"] and values(out) == [{"id": 1}]
    assert len(registry.letters) == 1


def test_without_the_value_nothing_is_decoded(registry: Registry) -> None:
    typed = decoder_of(registry, StructType([StructField("offset", LongType())]))
    assert typed.decode(rows([BAD], typed.columns), "t", registry.client).to_pydict() == {"offset": [100]}


def test_errors_may_be_selected_without_values(registry: Registry) -> None:
    typed = decoder_of(registry, StructType([StructField("_error", StringType())]), badRecords="null")
    out = typed.decode(rows([GOOD, BAD], typed.columns), "t", registry.client)
    assert out.schema.names == ["_error"]
    assert [error is None for error in out.column("_error").to_pylist()] == [True, False]


def test_what_arrow_does_not_take_is_a_bad_record_too(registry: Registry) -> None:
    wanted = StructType([StructField("value", StructType([StructField("price", DecimalType(4, 2)), StructField("small", ByteType())]))])
    typed = decoder_of(registry, wanted, badRecords="dlq")
    out = typed.decode(
        rows([b'{"price":12.34}', b'{"price":12.345}', b'{"price":123.4}', b'{"small":128}', b'{"small":-128}'], typed.columns),
        "t",
        registry.client,
    )
    assert [(str(value["price"]), value["small"]) for value in values(out)] == [("12.34", None), ("None", -128)]
    assert [letter["offset"] for letter in registry.letters[0][1]] == [101, 102, 103]


# Formats


def test_a_string_is_text_and_what_is_no_utf8_is_bad(registry: Registry) -> None:
    typed = decoder_of(registry, value_format="string", badRecords="null")
    assert values(typed.decode(rows(["é".encode(), b"", None]), "t", registry.client)) == ["é", "", None]
    out = typed.decode(rows([b"a", b"b\xff", None]), "t", registry.client)
    assert values(out) == ["a", None, None]
    assert out.column("_error").to_pylist() == [None, "not UTF-8: invalid start byte at byte 1", None]


def _avro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def test_avro_with_logical_types(registry: Registry) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}},
            {"name": "either", "type": ["null", "int", "string"]},
            {"name": "tags", "type": {"type": "map", "values": "int"}},
        ],
    }
    registry.require("t", "avro", schema)
    bare = json.loads(json.dumps(schema).replace('"logicalType"', '"was"'))
    raw = {"day": -1, "at": 1_700_000_000_000, "price": b"\x04\xd2", "either": "x", "tags": {"a": 1}}
    out = decoder_of(registry, value_format="avro").decode(rows([_avro(bare, raw)]), "t", registry.client)
    (value,) = values(out)
    assert value == {
        "day": datetime.date(1969, 12, 31),
        "at": datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC),
        "price": decimal.Decimal("12.34"),
        "either": {"member0": None, "member1": "x"},
        "tags": [("a", 1)],
    }


def test_avro_in_confluents_framing_is_read_when_asked(registry: Registry) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
    framed, bare = b"\0\0\0\0\x07" + _avro(schema, {"id": 1}), _avro(schema, {"id": 2})
    given: dict[str, Any] = {"value_format": "avro", "value_schema": json.dumps(schema), "badRecords": "null"}
    out = decoder_of(registry, value_framing="confluent", **given).decode(rows([framed, bare, None]), "t", registry.client)
    assert values(out) == [{"id": 1}, None, None]
    assert out.column("_error").to_pylist()[1].startswith("no Confluent framing: expected a zero byte and a schema id of 4 bytes, got 04")
    assert values(decoder_of(registry, **given).decode(rows([bare]), "t", registry.client)) == [{"id": 2}]


def test_json_in_confluents_framing_is_read_with_the_types_of_the_user(registry: Registry) -> None:
    wanted = StructType([StructField("value", StructType([StructField("id", LongType())]))])
    out = decoder_of(registry, wanted, value_framing="confluent").decode(rows([b"\0\0\0\0\x07" + GOOD]), "t", registry.client)
    assert values(out) == [{"id": 1}]


def test_protobuf(registry: Registry) -> None:
    source = b'syntax = "proto3"; message M { enum E { A = 0; } uint64 id = 1; E e = 2; map<int32, string> m = 3; repeated bytes b = 4; }'
    registry.require("t", "protobuf", source)
    raw = ProtobufSchema(source).message_class(id=2**64 - 1, m={5: "x"}, b=[b"\0"]).SerializeToString()
    out = decoder_of(registry, value_format="protobuf", badRecords="null").decode(rows([raw, b"\xff"]), "t", registry.client)
    assert values(out) == [{"id": 2**64 - 1, "e": "A", "m": [(5, "x")], "b": [b"\0"]}, None]


# Versions


def test_values_of_older_versions_are_read(registry: Registry) -> None:
    registry.require("t", "json", {"properties": {"id": {"type": "integer"}}}, {**ORDER, "required": ["id", "at"]})
    assert [value["id"] for value in values(decoder_of(registry).decode(rows([b'{"id":7}']), "t", registry.client))] == [7]


def test_a_version_registered_while_the_query_runs_is_requested_when_needed(registry: Registry) -> None:
    old = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
    new = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}, {"name": "x", "type": "string", "default": ""}]}
    registry.require("t", "avro", old)
    typed = decoder_of(registry, value_format="avro", badRecords="null")
    asked = registry.asked
    typed.decode(rows([_avro(old, {"id": 1})]), "t", registry.client)
    assert registry.asked == asked, "nothing was wrong"
    registry.require("t", "avro", old, new)
    batch = rows([_avro(old, {"id": 1}), _avro(new, {"id": 2, "x": "y"}), b""])
    out = typed.decode(batch, "t", registry.client)
    assert values(out) == [{"id": 1}, {"id": 2}, None]
    assert registry.asked == asked + 1
    assert [error is None for error in out.column("_error").to_pylist()] == [True, True, False]


def test_a_registry_that_does_not_answer_changes_nothing(registry: Registry) -> None:
    typed = decoder_of(registry, badRecords="null")
    registry.failure = Unavailable("away")
    assert values(typed.decode(rows([BAD]), "t", registry.client)) == [None]


# Random input


@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=20), st.sampled_from([GOOD, BAD, b'{"id":1.0}', b'{"id":2,"at":"x"}'])), max_size=12)
)
def test_every_row_is_read_or_moved_and_none_is_lost(found: list[bytes | None]) -> None:
    made = Registry()
    made.require("t", "json", ORDER)
    out = decoder_of(made, badRecords="dlq").decode(rows(found), "t", made.client)
    kept = out.column("offset").to_pylist()
    moved = [letter["offset"] for _, letters in made.letters for letter in letters]
    assert sorted(kept + moved) == list(range(100, 100 + len(found)))
    out = decoder_of(made, badRecords="null").decode(rows(found), "t", made.client)
    assert [place for place, error in enumerate(out.column("_error").to_pylist(), 100) if error] == moved
