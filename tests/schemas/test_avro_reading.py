"""Avro values as plain objects, compared with fastavro."""

from __future__ import annotations

import io
import json
from decimal import Decimal as Number
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidSchema
from headrace.schemas.avro import AvroSchema
from headrace.schemas.avro_reading import AvroReader
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape


def reader(schema: Any, *others: Any) -> AvroReader:
    return AvroReader(json.dumps(schema).encode(), [json.dumps(other).encode() for other in others])


def written(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return out.getvalue()


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in fields]}


def logical(kind: Any, word: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": word, **more}


FIXED_16 = {"type": "fixed", "name": "F", "size": 16}
SHAPES: list[tuple[Any, Shape, Any, Any]] = [
    # schema, shape, what fastavro writes, what is read
    ("boolean", Kind.BOOLEAN, True, True),
    ("int", Kind.INT32, -(2**31), -(2**31)),
    ("long", Kind.INT64, 2**63 - 1, 2**63 - 1),
    ("float", Kind.FLOAT32, 1.5, 1.5),
    ("double", Kind.FLOAT64, 0.1, 0.1),
    ("bytes", Kind.BINARY, b"\0\xff", b"\0\xff"),
    ("string", Kind.STRING, "é", "é"),
    ("null", Kind.STRING, None, None),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, Kind.STRING, "B", "B"),
    ({"type": "fixed", "name": "F", "size": 2}, Kind.BINARY, b"ab", b"ab"),
    ({"type": "array", "items": "int"}, ListOf(Kind.INT32), [1, 2], [1, 2]),
    ({"type": "map", "values": "long"}, MapOf(Kind.INT64), {"a": 1}, [("a", 1)]),
    (record(("a", "int")), Record((Field("a", Kind.INT32),)), {"a": 1}, {"a": 1}),
    (record(), Kind.STRING, {}, None),
    (["null", "string"], Kind.STRING, None, None),
    (["string", "null"], Kind.STRING, "x", "x"),
    (["null"], Kind.STRING, None, None),
    (["null", "int", "long"], Kind.INT64, 2**40, 2**40),
    (["double", "float"], Kind.FLOAT64, 1.5, 1.5),
    (["int", "null", "string"], Record((Field("member0", Kind.INT32), Field("member1", Kind.STRING))), "x", {"member1": "x"}),
    (["int", "null", "string"], Record((Field("member0", Kind.INT32), Field("member1", Kind.STRING))), None, None),
    (logical("int", "date"), Kind.DATE, 19_000, 19_000),
    (logical("long", "timestamp-micros"), Kind.TIMESTAMP, 17 * 10**14, 17 * 10**14),
    (logical("long", "timestamp-millis"), Kind.TIMESTAMP, 17 * 10**11, 17 * 10**14),
    (logical("long", "local-timestamp-micros"), Kind.TIMESTAMP_NTZ, 5, 5),
    (logical("long", "local-timestamp-millis"), Kind.TIMESTAMP_NTZ, 5, 5_000),
    (logical("int", "time-millis"), Kind.INT32, 5, 5),
    (logical("long", "time-micros"), Kind.INT64, 5, 5),
    (logical("string", "uuid"), Kind.STRING, "8e6d", "8e6d"),
    ({**FIXED_16, "logicalType": "uuid"}, Kind.STRING, bytes(range(16)), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
    ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, Kind.BINARY, b"x" * 12, b"x" * 12),
    (logical("bytes", "decimal", precision=6, scale=2), Decimal(6, 2), b"\xff\x85", Number("-1.23")),
    (logical("bytes", "decimal", precision=3), Decimal(3, 0), b"\x7b", Number(123)),
    ({**FIXED_16, "logicalType": "decimal", "precision": 38, "scale": 38}, Decimal(38, 38), b"\0" * 15 + b"\1", Number("1E-38")),
    (logical("bytes", "decimal", precision=39), Kind.BINARY, b"\x01", b"\x01"),
    (logical("string", "decimal", precision=3), Kind.STRING, "x", "x"),
    (logical("string", "date"), Kind.STRING, "x", "x"),
    (logical("int", "made-up"), Kind.INT32, 1, 1),
]


@pytest.mark.parametrize(("schema", "shape", "value", "expected"), SHAPES, ids=[json.dumps(row[0])[:70] for row in SHAPES])
def test_a_schema_gives_its_values_this_shape(schema: Any, shape: Shape, value: Any, expected: Any) -> None:
    bare = json.loads(json.dumps(schema).replace('"logicalType"', '"was"'))
    read = reader(schema)
    assert read.shape == shape
    assert read.read([written(bare, value), None]) == ([expected, None], {})


def test_a_bare_word_is_a_schema() -> None:
    assert AvroReader(b"string").shape == Kind.STRING


def test_a_named_type_may_be_used_again() -> None:
    schema = record(("a", {"type": "fixed", "name": "F", "size": 1, "logicalType": "decimal", "precision": 2}), ("b", ["null", "F"]))
    assert reader(schema).shape == Record((Field("a", Decimal(2, 0)), Field("b", Decimal(2, 0))))
    assert reader(schema).read([b"\x07\x02\x08"]) == ([{"a": Number(7), "b": Number(8)}], {})


@pytest.mark.parametrize(
    "schema",
    [
        record(("next", ["null", "R"])),
        record(("children", {"type": "array", "items": "R"})),
        record(("inner", record(("outer", {"type": "map", "values": "R"}), name="S"))),
    ],
)
def test_a_schema_that_contains_itself_is_rejected_with_its_name(schema: Any) -> None:
    with pytest.raises(InvalidSchema, match="R contains itself"):
        reader(schema)


ORDER = record(
    ("id", "long"),
    ("name", "string"),
    ("lines", {"type": "array", "items": record(("count", "int"), ("price", ["null", "double"]), name="Line")}),
    ("tags", {"type": "map", "values": ["null", "boolean"]}),
    ("kind", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
    ("at", logical("long", "timestamp-micros")),
    ("price", logical("bytes", "decimal", precision=4, scale=2)),
)
BARE = json.loads(json.dumps(ORDER).replace('"logicalType"', '"was"'))
GOOD = {
    "id": 300,
    "name": "ann",
    "lines": [{"count": 1, "price": None}],
    "tags": {"a": None, "b": True},
    "kind": "B",
    "at": 5,
    "price": b"\x7b",
}


@pytest.mark.parametrize("size", range(len(written(BARE, GOOD))))
def test_a_value_cut_anywhere_is_unreadable(size: int) -> None:
    rows, faults = reader(ORDER).read([written(BARE, GOOD)[:size]])
    assert rows == [None] and list(faults) == [0]


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        ("long", b"\x02\x00", "1 bytes behind the datum"),
        ("long", b"\xff" * 11, "more than 64 bits"),
        ("long", b"\xff" * 9 + b"\x02", "more than 64 bits"),
        ("int", written("long", 2**31), "is no int"),
        ("boolean", b"\x02", "no boolean"),
        ("string", b"\x02\xff", "utf-8"),
        ("string", b"\x01", "-1 bytes announced"),
        ("bytes", b"\x7e\x00", "63 bytes announced"),
        (["null", "int"], b"\x04", "branch 2 of a union of 2"),
        (["null", "int"], b"\x01", "branch -1"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x01", "symbol -1"),
        ({"type": "array", "items": "int"}, b"\x7e\x00", "63 items announced"),
        ({"type": "array", "items": "int"}, b"\x01\x08\x02\x00", "does not end where it says"),
        ({"type": "fixed", "name": "F", "size": 2}, b"a", "2 bytes expected"),
        (logical("bytes", "decimal", precision=2), b"\x02\x64", "more than 2 digits"),
        (logical("long", "timestamp-millis"), written("long", 2**60), "out of the range"),
        ("double", b"\0" * 7, "ends too early"),
        ("long", b"", "ends too early"),
    ],
)
def test_what_cannot_be_read_says_why(schema: Any, value: bytes, words: str) -> None:
    rows, faults = reader(schema).read([value, None])
    assert rows == [None, None]
    assert list(faults) == [0] and words in faults[0]


def test_a_block_may_say_its_size() -> None:
    assert reader({"type": "array", "items": "int"}).read([b"\x03\x04\x02\x04\x00"]) == ([[1, 2]], {})


# Versions

V1 = record(("id", "int"), ("name", "string"))
V2 = {**record(("id", "long"), ("name", "string")), "fields": [
    {"name": "id", "type": "long"},
    {"name": "full_name", "type": "string", "aliases": ["name"]},
    {"name": "country", "type": ["null", "string"], "default": None},
    {"name": "at", "type": logical("long", "timestamp-millis"), "default": 7},
]}  # fmt: skip


def test_a_value_of_another_version_is_resolved_to_the_wanted_one() -> None:
    old = written(V1, {"id": 1, "name": "ann"})
    assert reader(V2).read([old])[1] == {0: "the value ends too early"}
    assert reader(V2, V1).read([old]) == ([{"id": 1, "full_name": "ann", "country": None, "at": 7_000}], {})


def test_a_value_of_a_newer_version_is_read_with_what_the_wanted_one_knows() -> None:
    newer = record(("id", "int"), ("name", "string"), ("more", "string"))
    assert reader(V1, newer).read([written(newer, {"id": 1, "name": "ann", "more": "x"})]) == ([{"id": 1, "name": "ann"}], {})


def test_a_version_that_does_not_resolve_leaves_the_value_unreadable() -> None:
    other = record(("id", "int"), ("name", "string"), ("x", "string"))
    rows, faults = reader(record(("id", "string"), ("y", "int")), other).read([written(other, {"id": 1, "name": "a", "x": "b"})])
    assert rows == [None] and "another version" in faults[0]


# Comparison with values that fastavro writes, and with the validating walk.

NAMES = st.from_regex("[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "bytes": st.binary(max_size=8),
    "string": st.text(st.characters(codec="utf-8"), max_size=8),
}


def schemas() -> st.SearchStrategy[Any]:
    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            inner.map(lambda item: {"type": "array", "items": item}),
            inner.map(lambda value: {"type": "map", "values": value}),
            st.sampled_from(list(PLAIN)).map(lambda kind: ["null", kind]),
            st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(lambda fields: ("record", fields)),
        )

    return st.recursive(st.sampled_from(list(PLAIN)), deeper, max_leaves=5).map(_named)


def _named(plan: Any, path: str = "R") -> Any:
    """Give each record a unique name."""
    if isinstance(plan, tuple):
        return record(*((name, _named(kind, f"{path}_{index}")) for index, (name, kind) in enumerate(plan[1].items())), name=path)
    if isinstance(plan, dict):
        return {key: part if key == "type" else _named(part, f"{path}_i") for key, part in plan.items()}
    return plan


def values_of(schema: Any) -> st.SearchStrategy[Any]:
    if isinstance(schema, list):
        return st.none() | values_of(schema[1])
    if isinstance(schema, str):
        return PLAIN[schema]
    if schema["type"] == "array":
        return st.lists(values_of(schema["items"]), max_size=3)
    if schema["type"] == "map":
        return st.dictionaries(PLAIN["string"], values_of(schema["values"]), max_size=3)
    return st.fixed_dictionaries({field["name"]: values_of(field["type"]) for field in schema["fields"]})


def _with_maps(schema: Any, value: Any) -> Any:
    """Return the expected object: maps are lists of pairs."""
    if isinstance(schema, list):
        return None if value is None else _with_maps(schema[1], value)
    if isinstance(schema, str):
        return value
    if schema["type"] == "array":
        return [_with_maps(schema["items"], one) for one in value]
    if schema["type"] == "map":
        return [(key, _with_maps(schema["values"], one)) for key, one in value.items()]
    return {field["name"]: _with_maps(field["type"], value[field["name"]]) for field in schema["fields"]}


@given(st.data())
def test_what_fastavro_writes_is_read_back(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    rows = data.draw(st.lists(values_of(schema), max_size=4))
    found, faults = reader(schema).read([written(schema, row) for row in rows])
    assert faults == {}
    assert found == [_with_maps(schema, row) for row in rows]


@given(schemas(), st.binary(max_size=40))
def test_what_is_readable_is_what_the_broker_accepts(schema: Any, value: bytes) -> None:
    faults = reader(schema).read([value])[1]
    assert (not faults) is AvroSchema(json.dumps(schema).encode()).accepts([value])
