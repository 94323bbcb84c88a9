"""JSON values as plain objects: shapes of schemas, and faults of values."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidSchema
from headrace.schemas.contract import SchemaType
from headrace.schemas.json_reading import JsonReader, reader
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape, reader_of

ANY: dict[str, Any] = {}
STRING, LONG = {"type": "string"}, {"type": "integer"}


def shape(schema: Any) -> Shape:
    return reader(json.dumps(schema).encode()).shape


def record(**fields: Shape) -> Record:
    return Record(tuple(Field(name, kind, is_nullable=False) for name, kind in fields.items()))


SHAPES: list[tuple[Any, Shape]] = [
    (LONG, Kind.INT64),
    ({"type": "number"}, Kind.FLOAT64),
    ({"type": "boolean"}, Kind.BOOLEAN),
    (STRING, Kind.STRING),
    ({"type": "string", "format": "date-time"}, Kind.TIMESTAMP),
    ({"type": "string", "format": "date"}, Kind.DATE),
    ({"type": "string", "format": "email"}, Kind.STRING),
    ({"type": ["null", "string"]}, Kind.STRING),
    ({"type": ["integer", "number"]}, Kind.FLOAT64),
    ({"type": ["integer", "string"]}, Kind.JSON),
    ({"anyOf": [LONG, {"type": "null"}]}, Kind.INT64),
    ({"oneOf": [{"const": None}, {"type": "string", "format": "date"}]}, Kind.DATE),
    ({"anyOf": [LONG, STRING]}, Kind.JSON),
    ({"anyOf": [{"type": "string", "minLength": 3}, STRING]}, Kind.STRING),
    ({"enum": ["a", "b", None]}, Kind.STRING),
    ({"enum": [1, 2]}, Kind.INT64),
    ({"enum": [1, 2.5]}, Kind.FLOAT64),
    ({"type": "number", "enum": [1, 2]}, Kind.FLOAT64),
    ({"enum": [1, "a"]}, Kind.JSON),
    ({"enum": [{"a": 1}]}, Kind.JSON),
    ({"const": True}, Kind.BOOLEAN),
    (ANY, Kind.JSON),
    (True, Kind.JSON),
    ({"type": "object"}, Kind.JSON),
    ({"type": "array"}, ListOf(Kind.JSON)),
    ({"type": "array", "items": {"type": "array", "items": LONG}}, ListOf(ListOf(Kind.INT64))),
    ({"type": "array", "prefixItems": [LONG, STRING]}, Kind.JSON),
    ({"type": "object", "additionalProperties": {"type": "number"}}, MapOf(Kind.FLOAT64)),
    ({"type": "object", "additionalProperties": LONG, "patternProperties": {"^x": STRING}}, Kind.JSON),
    ({"properties": {"a": LONG}, "additionalProperties": STRING}, record(a=Kind.INT64)),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"properties": {"c": STRING}}}}, record(a=record(c=Kind.STRING))),
    ({"allOf": [{"properties": {"a": LONG}}, {"properties": {"b": STRING}}]}, record(a=Kind.INT64, b=Kind.STRING)),
    ({"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": STRING}, "description": "one"}, Kind.STRING),
    ({"allOf": [{"properties": {"a": LONG}}, {"properties": {"a": STRING}}]}, Kind.JSON),
    ({"allOf": [LONG, STRING]}, Kind.JSON),
    (
        {"properties": {"name": STRING, "child": {"$ref": "#"}}},
        Record((Field("name", Kind.STRING, is_nullable=False), Field("child", Kind.JSON))),
    ),
]


@pytest.mark.parametrize(("schema", "expected"), SHAPES, ids=[json.dumps(schema)[:60] for schema, _ in SHAPES])
def test_a_schema_gives_its_values_this_shape(schema: Any, expected: Shape) -> None:
    assert shape(schema) == expected


def test_required_and_nullable_are_kept_apart() -> None:
    found = shape({"properties": {"a": LONG, "b": {"type": ["integer", "null"]}, "c": LONG}, "required": ["a", "b"]})
    assert isinstance(found, Record)
    assert [(field.name, field.is_required, field.is_nullable) for field in found.fields] == [
        ("a", True, False),
        ("b", True, True),
        ("c", False, False),
    ]


ORDER = json.dumps(
    {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": LONG,
            "name": STRING,
            "at": {"type": "string", "format": "date-time"},
            "day": {"type": "string", "format": "date"},
            "lines": {"type": "array", "items": {"type": "object", "properties": {"count": LONG}}},
            "tags": {"type": "object", "additionalProperties": LONG},
            "more": {},
        },
    }
).encode()


def one(value: bytes) -> Any:
    rows, faults = reader(ORDER).read([value])
    assert faults == {}
    return rows[0]


def fault(value: bytes) -> str:
    rows, faults = reader(ORDER).read([value])
    assert rows == [None]
    return faults[0]


def test_values_become_objects_of_the_shape() -> None:
    assert one(b'{"id":1,"name":"\xc3\xa9","day":"2026-02-03","tags":{"a":1},"lines":[{"count":2},null],"unknown":{"a":[1]}}') == {
        "id": 1,
        "name": "é",
        "day": datetime.date(2026, 2, 3),
        "tags": {"a": 1},
        "lines": [{"count": 2}, None],
    }
    assert one(b' {"id":1}\n') == {"id": 1}
    assert one(b'{"id":1,"id":2,"name":null}') == {"id": 2, "name": None}


@pytest.mark.parametrize("name", ["é", "日本", "order-id", "with space", "", "\U0001f600"])
def test_a_property_may_have_any_name(name: str) -> None:
    definition = json.dumps({"properties": {name: LONG}, "required": [name]}).encode()
    for value in (json.dumps({name: 1}), json.dumps({name: 1}, ensure_ascii=False)):
        assert reader(definition).read([value.encode()]) == ([{name: 1}], {})


def test_a_time_keeps_its_zone_and_one_without_is_left_to_the_column() -> None:
    assert one(b'{"id":1,"at":"2026-02-03T04:05:06.789+02:00"}')["at"].utcoffset() == datetime.timedelta(hours=2)
    assert one(b'{"id":1,"at":"2026-02-03T04:05:06"}')["at"] == datetime.datetime(2026, 2, 3, 4, 5, 6)


def test_what_has_no_type_is_the_text_as_it_was_written() -> None:
    assert one(b'{"id":1,"more":{"a": [1.50,  "x"]}}')["more"] == '{"a": [1.50,  "x"]}'
    assert one(b'{"id":1,"more":"text"}')["more"] == '"text"'
    assert one(b'{"id":1,"more":null}')["more"] is None
    assert reader(b"{}").read([b"[1, 2]", b"null", None]) == (["[1, 2]", None, None], {})


def test_an_integer_may_be_written_with_a_point() -> None:
    assert one(b'{"id":1.0,"lines":[{"count":2e2}],"tags":{"a":3.0},"more":{"b": 1.0}}') == {
        "id": 1,
        "lines": [{"count": 200}],
        "tags": {"a": 3},
        "more": '{"b": 1.0}',
    }
    assert isinstance(one(b'{"id":1.0}')["id"], int)


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1])
def test_the_ends_of_64_bits_are_read(number: int) -> None:
    assert one(b'{"id":%d}' % number)["id"] == number


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"id":1} {}', "not JSON"),
        (b'\xef\xbb\xbf{"id":1}', "not JSON"),
        (b'{"id":1,"name":"\xff"}', "not JSON"),
        (b'{"id":1,"more":"\xff"}', "not JSON"),
        (b'{"id":1,"name":"\\ud800"}', "not JSON"),
        (b'{"id":NaN}', "not JSON"),
        (b'{"id":1,"more":' + b"[" * 100_000, "not JSON: nested too deeply"),
        (b"{}", "missing required field `id`"),
        (b'{"id":null}', "`$.id`"),
        (b'{"id":"1"}', "Expected `int`, got `str` - at `$.id`"),
        (b'{"id":1.5}', "`$.id`"),
        (b'{"id":9223372036854775808}', "`$.id`"),
        (b'{"id":9.3e18}', "`$.id`"),
        (b'{"id":true}', "`$.id`"),
        (b'{"id":1,"lines":[{"count":"x"}]}', "`$.lines[0].count`"),
        (b'{"id":1,"at":"yesterday"}', "`$.at`"),
        (b'{"id":1,"day":"2026-02-30"}', "`$.day`"),
        (b"[1]", "Expected `object`"),
        (b"null", "Expected `object`"),
    ],
)
def test_what_cannot_be_read_says_why_and_where(value: bytes, words: str) -> None:
    assert words in fault(value)


def test_the_unreadable_are_named_by_their_index_and_the_others_read() -> None:
    rows, faults = reader(ORDER).read([b'{"id":1}', b"no", None, b'{"id":2}', b"{}"])
    assert rows == [{"id": 1}, None, None, {"id": 2}, None]
    assert sorted(faults) == [1, 4]


def test_a_shape_from_a_user_reads_other_types_too() -> None:
    wanted = Record(
        (
            Field("price", Decimal(10, 2)),
            Field("raw", Kind.BINARY),
            Field("small", Kind.INT8),
            Field("real", Kind.FLOAT32),
            Field("local", Kind.TIMESTAMP_NTZ),
        )
    )
    read = JsonReader(wanted).read
    rows, faults = read(
        [b'{"price":1.25,"raw":"AAE=","small":-128,"real":1}', b'{"small":128}', b'{"local":"2026-01-01T00:00:00"}', b"null"]
    )
    assert rows[0] == {"price": decimal.Decimal("1.25"), "raw": b"\0\x01", "small": -128, "real": 1.0}
    assert rows[2] == {"local": datetime.datetime(2026, 1, 1)}
    assert list(faults) == [1]


# Versions

V1 = json.dumps({"properties": {"id": LONG, "old": STRING}, "required": ["id"]}).encode()
V2 = json.dumps({"properties": {"id": LONG, "country": STRING}, "required": ["id", "country"]}).encode()
V3 = json.dumps({"properties": {"id": STRING, "country": STRING}, "required": ["id", "country"]}).encode()


def test_a_value_of_another_version_is_read_with_what_it_has() -> None:
    assert reader(V2).read([b'{"id":1}'])[1] == {0: "Object missing required field `country`"}
    assert reader(V2, [V1]).read([b'{"id":1,"old":"x"}', b'{"country":"se"}']) == (
        [{"id": 1}, None],
        {1: "Object missing required field `id`"},
    )


def test_a_value_of_another_version_whose_types_do_not_fit_is_unreadable() -> None:
    rows, faults = reader(V3, [V2, V1]).read([b'{"id":1,"country":"se"}', b'{"id":"1","country":"se"}'])
    assert rows == [None, {"id": "1", "country": "se"}]
    assert faults == {0: "Expected `str | null`, got `int` - at `$.id`"}


def test_a_schema_that_is_none_is_rejected() -> None:
    for definition in (b"{", b"[]", b'{"$ref":"http://example.com"}', b" " * 300_000):
        with pytest.raises(InvalidSchema):
            reader_of(SchemaType.JSON, definition)


# Round trips

SCALARS: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.BOOLEAN: st.booleans(),
    Kind.INT64: st.integers(-(2**63), 2**63 - 1),
    Kind.FLOAT64: st.floats(allow_nan=False, allow_infinity=False),
    Kind.STRING: st.text(st.characters(codec="utf-8")),
}
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


def shapes() -> st.SearchStrategy[Shape]:
    return st.recursive(
        st.sampled_from(list(SCALARS)),
        lambda inner: st.one_of(
            inner.map(ListOf),
            inner.map(MapOf),
            st.dictionaries(NAMES, inner, min_size=1, max_size=4).map(
                lambda fields: Record(tuple(Field(name, kind) for name, kind in fields.items()))
            ),
        ),
        max_leaves=6,
    )


def values_of(kind: Shape) -> st.SearchStrategy[Any]:
    match kind:
        case ListOf():
            return st.lists(st.none() | values_of(kind.item), max_size=3)
        case MapOf():
            return st.dictionaries(NAMES, st.none() | values_of(kind.value), max_size=3)
        case Record():
            return st.fixed_dictionaries({}, optional={field.name: st.none() | values_of(field.shape) for field in kind.fields})
        case Decimal():
            raise AssertionError("not generated")
    return SCALARS[kind]


@given(st.data())
def test_what_is_written_as_json_is_read_back(data: st.DataObject) -> None:
    kind = data.draw(shapes())
    rows = data.draw(st.lists(values_of(kind), max_size=5))
    assert JsonReader(kind).read([json.dumps(row).encode() for row in rows]) == (rows, {})


@given(shapes(), st.binary(max_size=60))
def test_no_bytes_raise(kind: Shape, value: bytes) -> None:
    rows, faults = JsonReader(kind).read([value])
    assert rows == [None] or not faults
