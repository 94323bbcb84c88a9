"""Compatibility of JSON Schemas: a table of pairs, and a model that searches a counterexample to every proof."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace.schemas import Compatibility, Schema, SchemaType, compile_schema, conflicts


def json_schema(definition: Any) -> Schema:
    return compile_schema(SchemaType.JSON, json.dumps(definition).encode())


def gaps(writer: Any, reader: Any) -> list[str]:
    return json_schema(reader).conflicts(json_schema(writer))


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


INT, NUM, STR = {"type": "integer"}, {"type": "number"}, {"type": "string"}
TREE = {"$ref": "#/$defs/n", "$defs": {"n": closed(v=INT, next={"$ref": "#/$defs/n"})}}
TREE_NUM = {"$ref": "#/$defs/n", "$defs": {"n": closed(v=NUM, next={"$ref": "#/$defs/n"})}}

# writer, reader, the place of the first conflict or None
TABLE: list[tuple[Any, Any, str | None]] = [
    (INT, NUM, None),
    (NUM, INT, "/"),
    (INT, True, None),
    (True, INT, "/"),
    (False, INT, None),
    (INT, False, "/"),
    (INT, {"type": ["integer", "null"]}, None),
    ({"type": ["integer", "null"]}, INT, "/"),
    ({"enum": ["a"]}, {"enum": ["a", "b"]}, None),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "/"),
    ({"const": "a"}, {"enum": ["a"]}, None),
    ({"enum": [1, 2]}, INT, None),
    ({"enum": [1, True]}, INT, "/"),
    ({"enum": [1, 2]}, {"minimum": 1}, None),
    ({"enum": [0, 2]}, {"minimum": 1}, "/"),
    (STR, {"enum": ["a"]}, "/"),
    ({"minimum": 2}, {"minimum": 1}, None),
    ({"minimum": 0}, {"minimum": 1}, "/"),
    ({"minimum": 1}, {"exclusiveMinimum": 1}, "/"),
    ({"exclusiveMinimum": 1}, {"minimum": 1}, None),
    ({"maximum": 2}, {"exclusiveMaximum": 2}, "/"),
    ({"type": "string"}, {"minimum": 1}, None),
    ({"maxLength": 3}, {"maxLength": 5}, None),
    ({"maxLength": 5}, {"maxLength": 3}, "/"),
    ({}, {"minLength": 0}, None),
    ({"pattern": "a"}, {"pattern": "a"}, None),
    ({"pattern": "a"}, {"pattern": "b"}, "/"),
    ({"multipleOf": 4}, {"multipleOf": 2}, None),
    ({"multipleOf": 3}, {"multipleOf": 2}, "/"),
    (INT, {"multipleOf": 1}, None),
    (closed(a=INT), closed(a=NUM, b=STR), None),
    (closed(a=INT, b=STR), closed(a=INT), "/b"),
    (closed(a=INT), closed(("a",), a=INT), "/a"),
    (closed(("a",), a=INT), closed(a=INT), None),
    (closed(a=STR), closed(a=INT), "/a"),
    ({"properties": {"a": INT}}, {"properties": {"a": INT, "b": INT}}, "/b"),
    ({"properties": {"a": INT}}, {"properties": {"a": INT, "b": True}}, None),
    ({"properties": {"a": INT}}, closed(a=INT), "/"),
    (closed(a=INT), {"properties": {"a": INT}}, None),
    ({"additionalProperties": INT}, {"additionalProperties": NUM}, None),
    ({"additionalProperties": NUM}, {"additionalProperties": INT}, "/"),
    ({"additionalProperties": INT}, {"properties": {"a": NUM}}, None),
    ({"patternProperties": {"^a": INT}}, {"patternProperties": {"^a": NUM}}, None),
    ({"patternProperties": {"^a": STR}}, {"patternProperties": {"^a": NUM}}, "/^a"),
    (closed(a=INT), {"patternProperties": {"^a": NUM}}, None),
    ({"items": INT}, {"items": NUM}, None),
    ({"items": NUM}, {"items": INT}, "/items"),
    ({}, {"items": INT}, "/items"),
    ({"prefixItems": [INT], "items": False}, {"items": INT}, None),
    ({"prefixItems": [INT, STR]}, {"prefixItems": [INT, INT]}, "/1"),
    ({"items": INT, "maxItems": 1}, {"prefixItems": [INT, STR]}, None),
    ({"maxItems": 1}, {"uniqueItems": True}, None),
    ({}, {"uniqueItems": True}, "/"),
    (INT, {"anyOf": [STR, NUM]}, None),
    ({"anyOf": [INT, STR]}, {"anyOf": [STR, NUM]}, None),
    ({"oneOf": [INT, STR]}, {"type": ["string", "number"]}, None),
    ({"anyOf": [INT, STR]}, INT, "/"),
    ({"type": ["integer", "string"]}, {"anyOf": [STR, NUM]}, None),
    ({"allOf": [INT, {"minimum": 3}]}, {"type": "number", "minimum": 2}, None),
    ({"type": "integer", "minimum": 3}, {"allOf": [NUM, {"minimum": 2}]}, None),
    (INT, {"oneOf": [INT, STR]}, "/oneOf"),
    (INT, {"not": STR}, "/not"),
    ({"not": STR}, {"not": STR}, None),
    ({"if": INT, "then": {"minimum": 1}}, {"if": INT, "then": {"minimum": 1}}, None),
    ({"if": INT, "then": {"minimum": 1}}, {"if": INT}, "/if"),
    ({"contains": INT}, {"contains": INT, "minContains": 2}, "/contains"),
    ({"dependentRequired": {"a": ["b"]}}, {"dependentRequired": {"a": ["b"]}}, None),
    ({"required": ["b"]}, {"dependentRequired": {"a": ["b"]}}, None),
    ({}, {"dependentRequired": {"a": ["b"]}}, "/a"),
    (TREE, TREE_NUM, None),
    (TREE_NUM, TREE, "/v"),
    (closed(title={"title": "t"}), closed(title={}), None),
    (
        {"properties": {"a": INT}, "unevaluatedProperties": False},
        {"properties": {"a": NUM}, "unevaluatedProperties": False},
        "/unevaluated",
    ),
]


@pytest.mark.parametrize(("writer", "reader", "place"), TABLE, ids=repr)
def test_the_reader_takes_what_the_writer_writes_or_the_place_is_named(writer: Any, reader: Any, place: str | None) -> None:
    found = gaps(writer, reader)
    if place is None:
        assert found == []
    else:
        assert found and found[0].startswith(f"{place}: "), found


@pytest.mark.parametrize("definition", [one for writer, reader, _ in TABLE for one in (writer, reader)], ids=repr)
def test_every_schema_is_compatible_with_itself(definition: Any) -> None:
    assert gaps(definition, definition) == []


def test_each_mode_looks_in_its_own_direction() -> None:
    old, new = json_schema(INT), json_schema(NUM)
    assert conflicts(old, new, Compatibility.NONE) == conflicts(old, new, Compatibility.BACKWARD) == []
    assert conflicts(old, new, Compatibility.FORWARD) and conflicts(old, new, Compatibility.FULL)
    assert conflicts(new, old, Compatibility.NONE) == conflicts(new, old, Compatibility.FORWARD) == []
    assert conflicts(new, old, Compatibility.BACKWARD)


def test_another_language_is_no_successor() -> None:
    avro = compile_schema(SchemaType.AVRO, b'"long"')
    assert conflicts(json_schema(INT), avro, Compatibility.BACKWARD) == ["/: the type changes from json to avro"]
    assert conflicts(json_schema(INT), avro, Compatibility.NONE) == []


def test_a_comparison_that_would_not_end_soon_is_rejected() -> None:
    wide = {"anyOf": [{"properties": {f"p{number}": {"enum": [number]}}, "required": [f"p{number}"]} for number in range(300)]}
    other = {"anyOf": wide["anyOf"][::-1]}
    assert gaps(wide, other) == ["/: proving the two compatible takes more than 20000 comparisons"]


scalars = st.sampled_from([None, True, False, 0, 1, 2, 3, 1.5, -1, "", "a", "ab", "abc"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
assertions: list[st.SearchStrategy[dict[str, Any]]] = [
    st.sampled_from(["integer", "number", "string", "object", "array", "null", "boolean"]).map(lambda one: {"type": one}),
    st.lists(st.sampled_from(["integer", "string", "null", "object"]), min_size=1, unique=True).map(lambda some: {"type": some}),
    st.lists(scalars, min_size=1, max_size=3).map(lambda some: {"enum": some}),
    *(
        st.integers(0, 3).map(lambda limit, word=word: {word: limit})  # type: ignore[misc]  # a default keeps the loop's word
        for word in ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")
    ),
    st.lists(st.sampled_from("abc"), unique=True, max_size=2).map(lambda names: {"required": names}),
]


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(lambda parts: {"properties": parts}),
        st.tuples(st.dictionaries(st.sampled_from("abc"), inner, max_size=2), inner).map(
            lambda both: {"properties": both[0], "additionalProperties": both[1]}
        ),
        inner.map(lambda part: {"items": part}),
        st.tuples(inner, inner).map(lambda both: {"prefixItems": [both[0]], "items": both[1]}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        inner.map(lambda part: {"not": part}),
        inner.map(lambda part: {"patternProperties": {"^a": part}, "additionalProperties": False}),
    )


schemas = st.recursive(st.one_of(st.booleans(), *assertions), grown, max_leaves=4)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(schemas, schemas, st.lists(values, min_size=5, max_size=20))
def test_no_value_refutes_a_proof(writer: Any, reader: Any, samples: list[Any]) -> None:
    write, read = json_schema(writer), json_schema(reader)
    assume(not read.conflicts(write))
    for sample in samples:
        encoded = json.dumps(sample).encode()
        assert not write.accepts([encoded]) or read.accepts([encoded]), (sample, writer, reader)
