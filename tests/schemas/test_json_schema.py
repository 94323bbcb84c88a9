"""JSON Schema: valid values, rejected definitions, and bounded time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.errors import InvalidSchema
from headrace.limits import JSON_VALUE_DEPTH_MAX, SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX
from headrace.schemas import Schema, SchemaType, compile_schema


def json_schema(definition: Any) -> Schema:
    return compile_schema(SchemaType.JSON, json.dumps(definition).encode())


ORDER = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "integer", "minimum": 1}, "note": {"type": "string", "pattern": "^[a-z ]*$"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("value", [b'{"id":1}', b'{"id":1.0}', b' {"note":"a b","id":2} '])
def test_a_value_that_fits_has_no_fault(value: bytes) -> None:
    assert json_schema(ORDER).accepts([value]) and json_schema(ORDER).faults(value) == []


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (b"{}", '/: "id" is a required property'),
        (b'{"id":0}', "/id: 0 is less than the minimum of 1"),
        (b'{"id":"x"}', '/id: "x" is not of type "integer"'),
        (b'{"id":1,"note":"A"}', '/note: "A" does not match "^[a-z ]*$"'),
        (b'{"id":1,"x":1}', "/: Additional properties are not allowed ('x' was unexpected)"),
        (b"", "invalid JSON message: Input data was truncated"),
        (b'{"id":1} x', "invalid JSON message: JSON is malformed: trailing characters (byte 10)"),
        (b"[" * 100_000, "invalid JSON message: nested too deeply"),
    ],
)
def test_a_fault_says_where_and_what(value: bytes, fault: str) -> None:
    schema = json_schema(ORDER)
    assert not schema.accepts([b'{"id":1}', value])
    assert schema.faults(value) == [fault]


def test_text_that_is_not_utf_8_is_a_fault() -> None:
    assert not json_schema(True).accepts([b'"\xff"'])
    assert json_schema(True).faults(b'"\xff"')[0].startswith("invalid JSON message")


def test_a_tombstone_fits_and_an_empty_value_does_not() -> None:
    assert json_schema(ORDER).accepts([None, b'{"id":1}', None])
    assert not json_schema(ORDER).accepts([None, b""])


def doubling(levels: int) -> dict[str, Any]:
    parts: dict[str, Any] = {f"p{level}": {"allOf": [{"$ref": f"#/$defs/p{level + 1}"}] * 2} for level in range(levels)}
    return {"$ref": "#/$defs/p0", "$defs": {**parts, f"p{levels}": {"type": "integer"}}}


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"items": inner}
    return inner


SELF = {"$ref": "#"}


@pytest.mark.parametrize(
    ("definition", "because"),
    [
        ({"$ref": "http://127.0.0.1:1/schema"}, "only references inside"),
        ({"$ref": "file:///etc/passwd"}, "only references inside"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "only references inside"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "only references inside"),
        ({"$dynamicRef": "#a"}, "not supported"),
        ({"properties": {"a": {"$id": "http://x/"}}}, "$id of its own"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "not draft 2020-12"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"$ref": "#/type", "type": "object"}, "no schema"),
        ({"$ref": "#anchor"}, "leads nowhere"),
        (SELF, "refers to itself"),
        ({"anyOf": [{"not": SELF}]}, "refers to itself"),
        (doubling(30), "more than 10000 parts"),
        ({"allOf": [{"properties": {"a": SELF}}, {"properties": {"a": SELF}}]}, "two ways"),
        ({"properties": {"a": SELF}, "patternProperties": {"a": SELF}}, "two ways"),
        ({"oneOf": [{"items": SELF}, {"items": SELF}]}, "two ways"),
        ({"properties": {"a": SELF}, "unevaluatedProperties": False}, "unevaluated"),
        (nested(SCHEMA_DEPTH_MAX + 1), "levels deep"),
        ({"pattern": "(?=a)b"}, "regex"),
        ({"pattern": r"(a)\1"}, "regex"),
        ({"pattern": "((a{0,1000}){0,1000}){0,1000}"}, "regex"),
        ({"type": "strange"}, "draft 2020-12"),
        ({"minimum": "three"}, "draft 2020-12"),
        ({"properties": [1]}, "draft 2020-12"),
        ([1], "is an object"),
    ],
    ids=repr,
)
def test_a_hostile_or_wrong_schema_is_rejected_at_once(definition: Any, because: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidSchema, match=because.replace("$", r"\$")):
        json_schema(definition)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "definition",
    [
        b"",
        b"  ",
        b"{",
        b'{"a":"\xff"}',
        b"[" * 100_000,
        b" " * (SCHEMA_BYTES_MAX - 1) + b"{}",
    ],
    ids=lambda text: str(text[:10]),
)
def test_what_is_no_definition_is_rejected(definition: bytes) -> None:
    with pytest.raises(InvalidSchema):
        compile_schema(SchemaType.JSON, definition)


def test_a_definition_of_the_largest_size_is_taken() -> None:
    assert compile_schema(SchemaType.JSON, b" " * (SCHEMA_BYTES_MAX - 2) + b"{}").accepts([b"1"])


@pytest.mark.parametrize(
    "definition",
    [
        {"properties": {"left": SELF, "right": SELF, "value": {"type": "integer"}}},
        {"properties": {"a": SELF}, "additionalProperties": SELF},
        {"prefixItems": [SELF], "items": SELF},
        {"oneOf": [{"type": "array", "items": SELF}, {"type": "object", "additionalProperties": SELF}, {"type": "string"}]},
        {"$ref": "#tree", "$defs": {"tree": {"$anchor": "tree", "items": {"$ref": "#/$defs/tree"}}}},
        doubling(8),
        nested(SCHEMA_DEPTH_MAX - 1),
        {"pattern": "^(a+)+$"},
    ],
    ids=repr,
)
def test_a_schema_that_costs_no_more_than_the_value_is_taken(definition: Any) -> None:
    assert json_schema(definition).accepts([b'"aaa"' if "pattern" in definition or "oneOf" in definition else b"1"])


def test_a_pattern_that_backtracks_elsewhere_is_matched_in_linear_time() -> None:
    schema = json_schema({"pattern": "^(a+)+$"})
    begin = time.process_time()
    assert not schema.accepts([b'"' + b"a" * 100_000 + b'!"'])
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("depth", [JSON_VALUE_DEPTH_MAX + 1, 5_000])
def test_a_value_is_judged_down_to_the_greatest_depth_and_rejected_beyond_it(depth: int) -> None:
    schema = json_schema({"properties": {"a": SELF}})
    deepest = b'{"a":' * JSON_VALUE_DEPTH_MAX + b"1" + b"}" * JSON_VALUE_DEPTH_MAX
    assert schema.accepts([deepest, b"[" + b"[]," * JSON_VALUE_DEPTH_MAX + b"[]]"])
    assert schema.faults(deepest) == []
    for deeper in (b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth + b"]" * depth):
        assert not schema.accepts([deeper])
        assert schema.faults(deeper) == ["invalid JSON message: nested too deeply"]
