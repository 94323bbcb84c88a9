"""Protobuf messages as plain objects."""

from __future__ import annotations

from decimal import Decimal as Number
from typing import Any

import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidSchema
from headrace.schemas.protobuf import ProtobufSchema
from headrace.schemas.protobuf_reading import ProtobufReader
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape

ALL = b"""
syntax = "proto3";
message All {
  bool b = 1; string s = 2; bytes y = 3; float f = 4; double d = 5;
  int32 i32 = 6; sint32 s32 = 7; sfixed32 sf32 = 8; uint32 u32 = 9; fixed32 f32 = 10;
  int64 i64 = 11; sint64 s64 = 12; sfixed64 sf64 = 13; uint64 u64 = 14; fixed64 f64 = 15;
  enum Kind { NONE = 0; SOME = 1; }
  Kind kind = 16;
  message Line { optional int32 count = 1; }
  Line line = 17; repeated Line lines = 18; repeated int32 numbers = 19; repeated Kind kinds = 20;
  map<string, Line> by_name = 21; map<int32, Kind> by_number = 22;
  optional string maybe = 23;
  oneof choice { int32 left = 24; string right = 25; }
}
"""
LINE = Record((Field("count", Kind.INT32),))
SHAPES: dict[str, Shape] = {
    "b": Kind.BOOLEAN, "s": Kind.STRING, "y": Kind.BINARY, "f": Kind.FLOAT32, "d": Kind.FLOAT64,
    "i32": Kind.INT32, "s32": Kind.INT32, "sf32": Kind.INT32, "u32": Kind.INT64, "f32": Kind.INT64,
    "i64": Kind.INT64, "s64": Kind.INT64, "sf64": Kind.INT64, "u64": Decimal(20, 0), "f64": Decimal(20, 0),
    "kind": Kind.STRING, "line": LINE, "lines": ListOf(LINE), "numbers": ListOf(Kind.INT32), "kinds": ListOf(Kind.STRING),
    "by_name": MapOf(LINE), "by_number": MapOf(Kind.STRING, Kind.INT32), "maybe": Kind.STRING, "left": Kind.INT32, "right": Kind.STRING,
}  # fmt: skip


def message(definition: bytes, **fields: Any) -> bytes:
    return bytes(ProtobufSchema(definition).message_class(**fields).SerializeToString())


def one(definition: bytes, value: bytes) -> Any:
    rows, faults = ProtobufReader(definition).read([value])
    assert faults == {}
    return rows[0]


def test_a_message_gives_its_values_this_shape() -> None:
    shape = ProtobufReader(ALL).shape
    assert isinstance(shape, Record)
    assert {field.name: field.shape for field in shape.fields} == SHAPES


def test_what_was_not_set_is_null_where_that_can_be_known() -> None:
    empty = one(ALL, b"")
    assert {name for name, value in empty.items() if value is None} == {"line", "maybe", "left", "right"}
    assert (empty["i32"], empty["s"], empty["kind"], empty["lines"], empty["by_name"]) == (0, "", "NONE", [], [])
    assert one(ALL, message(ALL, maybe="", right=""))["maybe"] == ""


def test_values_of_every_type() -> None:
    row = one(
        ALL,
        message(
            ALL,
            u64=2**64 - 1,
            f64=1,
            u32=2**32 - 1,
            kind=1,
            lines=[{"count": 1}, {}],
            kinds=[0, 1],
            by_name={"a": {"count": 2}},
            by_number={-1: 1},
            left=5,
            y=b"\xff",
        ),
    )
    assert (row["u64"], row["f64"], row["u32"]) == (Number(2**64 - 1), Number(1), 2**32 - 1)
    assert (row["kind"], row["kinds"], row["by_number"]) == ("SOME", ["NONE", "SOME"], [(-1, "SOME")])
    assert (row["lines"], row["by_name"]) == ([{"count": 1}, {"count": None}], [("a", {"count": 2})])
    assert (row["left"], row["right"], row["y"]) == (5, None, b"\xff")


def test_an_enumeration_knows_its_first_name_and_shows_what_it_does_not_know() -> None:
    definition = b'syntax = "proto3"; message M { enum E { option allow_alias = true; A = 0; B = 1; C = 1; } E e = 1; }'
    assert one(definition, message(definition, e=1)) == {"e": "B"}
    assert one(definition, message(definition, e=9)) == {"e": "9"}


def test_a_message_that_contains_itself_is_rejected_with_its_name() -> None:
    for definition in (
        b'syntax = "proto3"; message M { M next = 1; }',
        b'syntax = "proto3"; message M { N n = 1; } message N { map<string, M> all = 1; }',
    ):
        with pytest.raises(InvalidSchema, match="M contains itself"):
            ProtobufReader(definition)


def test_keys_without_a_sign_are_rejected() -> None:
    with pytest.raises(InvalidSchema, match="keys"):
        ProtobufReader(b'syntax = "proto3"; message M { map<uint64, string> m = 1; }')


def test_a_message_without_fields_is_a_null() -> None:
    assert ProtobufReader(b'syntax = "proto3"; message M {}').read([b"", None]) == ([None, None], {})


def _with_timestamp() -> bytes:
    stamp = FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(stamp)
    own = FileDescriptorProto(name="own.proto", syntax="proto3", dependency=[stamp.name])
    own.message_type.add(name="M").field.add(name="at", number=1, label=1, type=11, type_name=".google.protobuf.Timestamp")
    return bytes(FileDescriptorSet(file=[stamp, own]).SerializeToString())


def test_the_well_known_timestamp_is_one() -> None:
    definition = _with_timestamp()
    assert ProtobufReader(definition).shape == Record((Field("at", Kind.TIMESTAMP),))
    assert one(definition, message(definition, at={"seconds": 5, "nanos": 1_999})) == {"at": 5_000_001}
    assert one(definition, b"") == {"at": None}
    rows, faults = ProtobufReader(definition).read([message(definition, at={"seconds": 2**62})])
    assert rows == [None] and "out of the range" in faults[0]


@pytest.mark.parametrize("value", [b"\xff", b"\x12\x05ab", b"\x12\x01\xff"])
def test_what_cannot_be_read_says_so(value: bytes) -> None:
    rows, faults = ProtobufReader(ALL).read([b"", value, None])
    assert rows[1:] == [None, None] and list(faults) == [1]
    assert "All" in faults[1]


# Versions

V1 = b'syntax = "proto2"; message M { required int32 id = 1; optional string gone = 2; }'
V2 = b'syntax = "proto2"; message M { required int64 id = 1; required string country = 3; }'


def test_a_value_of_another_version_is_read_with_what_it_has() -> None:
    old = message(V1, id=7, gone="x")
    assert ProtobufReader(V2).read([old])[1] == {0: "country: missing"}
    assert ProtobufReader(V2, [V1]).read([old]) == ([{"id": 7, "country": None}], {})
    assert ProtobufReader(V2, [V1]).read([b"\x1a\x01x"])[1] == {0: "id: missing"}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "s": st.text(st.characters(codec="utf-8"), max_size=5),
            "d": st.floats(allow_nan=False),
            "i64": st.integers(-(2**63), 2**63 - 1),
            "numbers": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
            "maybe": st.text(max_size=3, alphabet="abc"),
        },
    )
)
def test_what_is_set_is_read_back(fields: dict[str, Any]) -> None:
    row = one(ALL, message(ALL, **fields))
    assert {name: row[name] for name in fields} == fields


@given(st.binary(max_size=40))
def test_what_is_readable_is_what_the_broker_accepts(value: bytes) -> None:
    faults = ProtobufReader(ALL).read([value])[1]
    assert (not faults) is ProtobufSchema(ALL).accepts([value])
