"""Avro: values that fit, hostile ones, the resolution rules of the specification."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_VALUE_DEPTH_MAX
from headrace.schemas import Schema, SchemaType, compile_schema


def avro(definition: Any) -> Schema:
    return compile_schema(SchemaType.AVRO, json.dumps(definition).encode())


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t, **(d[0] if d else {})} for n, t, *d in fields], **more}


def encoded(definition: Any, datum: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(definition), datum)
    return out.getvalue()


EVERYTHING = record(
    ("n", "null"),
    ("b", "boolean"),
    ("i", "int"),
    ("l", "long"),
    ("f", "float"),
    ("d", "double"),
    ("y", "bytes"),
    ("s", "string"),
    ("a", {"type": "array", "items": "long"}),
    ("m", {"type": "map", "values": ["null", "string"]}),
    ("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
    ("x", {"type": "fixed", "name": "X", "size": 3}),
    ("next", ["null", "R"]),
    ("when", {"type": "int", "logicalType": "date"}),
)
datums: st.SearchStrategy[dict[str, Any]] = st.deferred(
    lambda: st.fixed_dictionaries(
        {
            "n": st.none(),
            "b": st.booleans(),
            "i": st.integers(-(2**31), 2**31 - 1),
            "l": st.integers(-(2**63), 2**63 - 1),
            "f": st.floats(width=32),
            "d": st.floats(),
            "y": st.binary(max_size=10),
            "s": st.text(max_size=10),
            "a": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
            "m": st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=2),
            "e": st.sampled_from("AB"),
            "x": st.binary(min_size=3, max_size=3),
            "next": st.none() | datums,
            "when": st.integers(0, 20_000),
        }
    )
)


@settings(max_examples=100)
@given(datums, st.data())
def test_what_fastavro_writes_fits_and_no_part_of_it_does(datum: Any, data: st.DataObject) -> None:
    schema, value = avro(EVERYTHING), encoded(EVERYTHING, datum)
    assert schema.accepts([value, None]) and schema.faults(value) == []
    cut = data.draw(st.integers(0, len(value) - 1))
    assert not schema.accepts([value[:cut]])
    assert schema.faults(value + b"\x00") == [f"byte {len(value)}: 1 bytes behind the datum"]


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_no_bytes_can_do_more_than_not_fit(value: bytes) -> None:
    schema = avro(EVERYTHING)
    assert schema.accepts([value]) == (schema.faults(value) == [])


@pytest.mark.parametrize(
    ("definition", "value", "fault"),
    [
        ("int", b"\x80\x80\x80\x80\x10", "byte 0: 2147483648 is no int"),
        ("long", b"\xff" * 10, "byte 0: a number without an end"),
        ("long", b"\xff" * 9 + b"\x02", "byte 0: a number of more than 64 bits"),
        ("boolean", b"\x02", "byte 0: no boolean"),
        ("bytes", b"\x09", "byte 0: -5 bytes announced, 0 left"),
        ("string", b"\xfe\xff\xff\xff\x0fa", "byte 0: 2147483647 bytes announced, 1 left"),
        ("string", b"\x02\xff", "byte 1: text is not UTF-8"),
        (["null", "int"], b"\x04", "byte 0: branch 2 of a union of 2"),
        (["null", "int"], b"\x01", "byte 0: branch -1 of a union of 2"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x01", "byte 0: symbol -1 of an enumeration of 1"),
        (
            {"type": "array", "items": "long"},
            b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f",
            "byte 0: 4611686018427387903 items announced, 0 bytes left",
        ),
        ({"type": "array", "items": "long"}, b"\x01\x04\x02\x00", "byte 0: a block does not end where it says"),
    ],
    ids=repr,
)
def test_a_fault_says_at_which_byte(definition: Any, value: bytes, fault: str) -> None:
    assert avro(definition).faults(value)[0].startswith(fault) and not avro(definition).accepts([value])


def test_a_value_nested_a_million_levels_deep_is_rejected() -> None:
    schema = avro(record(("next", ["null", "R"])))
    deepest = SCHEMA_VALUE_DEPTH_MAX // 2 - 1
    assert schema.accepts([b"\x02" * deepest + b"\x00"])
    assert schema.faults(b"\x02" * 1_000_000) == [
        f"byte {SCHEMA_VALUE_DEPTH_MAX // 2}: nested more than {SCHEMA_VALUE_DEPTH_MAX} levels deep"
    ]


@pytest.mark.parametrize(
    "definition",
    [
        "strange",
        {"type": "record", "fields": []},
        record(("a", "Unknown")),
        {"type": "enum", "name": "E", "symbols": ["A", "A"]},
        {"type": "array", "items": "null"},
        {"type": "array", "items": record()},
        {"type": "array", "items": record(("n", "null"))},
        {"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}},
        [1],
        {"type": 3},
    ],
    ids=repr,
)
def test_a_definition_that_is_wrong_or_unbounded_is_rejected(definition: Any) -> None:
    with pytest.raises(InvalidSchema):
        avro(definition)


def test_a_definition_nested_too_deeply_is_rejected_at_once() -> None:
    begin = time.process_time()
    for text in (b"[" * 100_000, b'{"type":"array","items":' * 100 + b'"int"' + b"}" * 100):
        with pytest.raises(InvalidSchema, match="deep"):
            compile_schema(SchemaType.AVRO, text)
    assert time.process_time() - begin < 2


ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
SHORT_ENUM = {"type": "enum", "name": "E", "symbols": ["A"]}
# writer, reader, the place of the first conflict or None
TABLE: list[tuple[Any, Any, str | None]] = [
    ("int", "long", None),
    ("int", "double", None),
    ("long", "int", "/"),
    ("float", "double", None),
    ("double", "float", "/"),
    ("string", "bytes", None),
    ("bytes", "string", None),
    ("string", "int", "/"),
    ("int", ["null", "long"], None),
    (["null", "int"], "int", "/"),
    (["int", "string"], ["string", "long"], None),
    (["int", "null"], ["string", "long"], "/"),
    (record(("a", "int")), record(("a", "long")), None),
    (record(("a", "int")), record(("a", "int"), ("b", "int")), "/b"),
    (record(("a", "int")), record(("a", "int"), ("b", "int", {"default": 0})), None),
    (record(("a", "int"), ("b", "int")), record(("a", "int")), None),
    (record(("a", "int")), record(("c", "int", {"aliases": ["a"]})), None),
    (record(("a", "string")), record(("a", "int")), "/a"),
    (record(("a", "int")), record(("a", "int"), name="Other"), "/"),
    (record(("a", "int")), record(("a", "int"), name="Other", aliases=["R"]), None),
    (ENUM, SHORT_ENUM, "/"),
    (SHORT_ENUM, ENUM, None),
    (ENUM, {**SHORT_ENUM, "default": "A"}, None),
    ({"type": "fixed", "name": "F", "size": 2}, {"type": "fixed", "name": "F", "size": 3}, "/"),
    ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, None),
    ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, "/items"),
    ({"type": "map", "values": "long"}, {"type": "map", "values": "int"}, "/values"),
    (record(("v", "int"), ("next", ["null", "R"])), record(("v", "long"), ("next", ["null", "R"])), None),
    (record(("v", "long"), ("next", ["null", "R"])), record(("v", "int"), ("next", ["null", "R"])), "/v"),
    ({"type": "int", "logicalType": "date"}, "int", None),
]


@pytest.mark.parametrize(("writer", "reader", "place"), TABLE, ids=repr)
def test_resolution_is_that_of_the_specification(writer: Any, reader: Any, place: str | None) -> None:
    found = avro(reader).conflicts(avro(writer))
    assert found == [] if place is None else found[0].startswith(f"{place}: "), found
    assert avro(reader).conflicts(avro(reader)) == []
