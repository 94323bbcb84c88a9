"""Protobuf: sources and descriptor sets, values, field numbers."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidSchema
from headrace.schemas import Schema, SchemaType, compile_schema
from headrace.schemas.proto_source import parse_source


def proto(source: str) -> Schema:
    return compile_schema(SchemaType.PROTOBUF, source.encode())


def message(body: str, rest: str = "") -> Schema:
    return proto(f'syntax = "proto3"; package shop; message M {{ {body} }} {rest}')


FULL = """
// The whole language that is read.
syntax = "proto3";
package shop.v1;
option java_package = "x";
/* a block ** of text */
message Order {
  option deprecated = true;
  int64 id = 1;
  optional string note = 2 [deprecated = true, json_name = "n"];
  repeated Line lines = 3;
  map<string, Line> by_name = 4;
  oneof payment { string card = 5; bytes token = 6; }
  enum State { option allow_alias = true; NEW = 0; OPEN = 0; PAID = 0x1; reserved 5; }
  State state = 7;
  message Line { .shop.v1.Order parent = 1; double price = 2; }
  reserved 9, 20 to 30, 100 to max;
  reserved "old", 'older';
}
service Orders { rpc Get (Order) returns (Order) { option idempotency_level = IDEMPOTENT; } }
"""


def test_a_source_with_everything_in_it_is_read() -> None:
    schema = proto(FULL)
    assert schema.accepts([b"", b"\x08\x05", b"\x12\x01a", None])
    names = [field.name for field in parse_source(FULL).message_type[0].field]
    assert names == ["id", "note", "lines", "by_name", "card", "token", "state"]


@pytest.mark.parametrize("value", [b"\x08", b"\x12\x05a", b"\x12\x01\xff", b"\x0a" * 1_000, b"\x1b" * 1_000], ids=repr)
def test_a_value_that_is_no_such_message_is_a_fault(value: bytes) -> None:
    schema = proto(FULL)
    assert not schema.accepts([b"", value])
    assert schema.faults(value)[0].startswith("not a shop.v1.Order")


def test_nesting_without_end_is_a_fault_and_no_crash() -> None:
    schema = message("M m = 1;")
    value = b""
    for _ in range(3_000):
        size, head = len(value), b""
        while size > 0x7F:
            head, size = head + bytes([size & 0x7F | 0x80]), size >> 7
        value = b"\x0a" + head + bytes([size]) + value
    assert not schema.accepts([value])


def test_a_required_field_is_missed() -> None:
    assert proto("message M { required int32 a = 1; optional int32 b = 2; }").faults(b"\x10\x01") == ["/a: missing"]


def test_a_serialized_set_is_as_good_as_its_source() -> None:
    file = FileDescriptorProto()
    file.CopyFrom(parse_source(FULL))
    base = FileDescriptorProto(name="base.proto", syntax="proto3", package="base")
    base.message_type.add(name="Money").field.add(name="cents", number=1, type=3, label=1)
    file.dependency.append("base.proto")
    file.message_type[0].field.add(name="total", number=8, label=1, type=11, type_name=".base.Money")
    schema = compile_schema(SchemaType.PROTOBUF, FileDescriptorSet(file=[base, file]).SerializeToString())
    assert schema.accepts([b"\x42\x02\x08\x05"]) and not schema.accepts([b"\x42\x02\x08"])
    assert schema.conflicts(proto(FULL)) == []


@pytest.mark.parametrize(
    ("source", "because"),
    [
        ("message", "ends too early"),
        ('syntax = "proto3";', "no message"),
        ('syntax = "proto4"; message M {}', "syntax"),
        ('import "x.proto"; message M {}', "imports"),
        ("message M { int32 a = 1; }", "optional, required or repeated"),
        ('syntax = "proto3"; message M { int32 a = 0; }', "number 0"),
        ('syntax = "proto3"; message M { int32 a = 1; int32 b = 1; }', "duplicate"),
        ('syntax = "proto3"; message M { Other a = 1; }', "Other"),
        ('syntax = "proto3"; message M { map<float, int32> a = 1; }', "key of a map"),
        ('syntax = "proto3"; message M { group G = 1 {} }', "group"),
        ("extend M { }", "not supported"),
        ('syntax = "proto3"; message M { int32 a = x; }', "no whole number"),
        ('syntax = "proto3"; message M { int32 a = 1 [x', "ends too early"),
        ("message M { # }", "not understood"),
        ('syntax = "proto3"; ' + "message M {" * 200, "levels deep"),
        ('syntax = "proto3"; message M {' + "".join(f"int32 f{number} = {number};" for number in range(1, 10_002)) + "}", "parts"),
        ("\x00\x01", "not understood"),
    ],
    ids=lambda text: text[:40],
)
def test_a_source_that_is_wrong_or_too_large_is_rejected(source: str, because: str) -> None:
    with pytest.raises(InvalidSchema, match=because):
        proto(source)


@settings(max_examples=200)
@given(st.text(max_size=80) | st.lists(st.sampled_from(FULL.split()), max_size=30).map(" ".join))
def test_no_text_can_do_more_than_be_rejected(text: str) -> None:
    try:
        proto(text)
    except InvalidSchema:
        pass


# writer, reader, the place of the first conflict or None
TABLE: list[tuple[str, str, str | None]] = [
    ("int32 a = 1;", "int64 a = 1;", None),
    ("int64 a = 1;", "int32 a = 1;", "/a"),
    ("uint32 a = 1;", "uint64 a = 1;", None),
    ("sint32 a = 1;", "int32 a = 1;", "/a"),
    ("fixed32 a = 1;", "uint32 a = 1;", "/a"),
    ("string a = 1;", "bytes a = 1;", None),
    ("bytes a = 1;", "string a = 1;", "/a"),
    ("int32 a = 1;", "int32 a = 1; string b = 2;", None),
    ("int32 a = 1; string b = 2;", "int32 a = 1;", None),
    ("int32 a = 1;", "int32 renamed = 1;", None),
    ("int32 a = 1;", "int32 a = 2;", "/a"),
    ("int32 a = 1;", "repeated int32 a = 1;", None),
    ("repeated int32 a = 1;", "int32 a = 1;", "/a"),
    ("N a = 1; message N { int32 b = 1; }", "N a = 1; message N { string b = 1; }", "/a/b"),
    ("N a = 1; message N { }", "P a = 1; message P { }", "/a"),
    ("map<string, int32> a = 1;", "map<string, int64> a = 1;", None),
    ("map<string, int64> a = 1;", "map<string, int32> a = 1;", "/a/value"),
    ("E a = 1; enum E { X = 0; Y = 1; }", "E a = 1; enum E { X = 0; }", "/a"),
    ("E a = 1; enum E { X = 0; }", "E a = 1; enum E { X = 0; Y = 1; }", None),
    ("E a = 1; enum E { X = 0; }", "E a = 1; enum E { Z = 0; }", "/a"),
    ("E a = 1; enum E { X = 0; }", "int32 a = 1;", None),
    ("string a = 1; string b = 2;", "oneof o { string a = 1; string b = 2; }", "/a"),
    ("oneof o { string a = 1; string b = 2; }", "string a = 1; string b = 2;", None),
    ("M a = 1; int32 b = 2;", "M a = 1; int64 b = 2;", None),
]


@pytest.mark.parametrize(("writer", "reader", "place"), TABLE)
def test_fields_are_known_by_their_numbers(writer: str, reader: str, place: str | None) -> None:
    found = message(reader).conflicts(message(writer))
    assert found == [] if place is None else found[0].startswith(f"{place}: "), found
    assert message(reader).conflicts(message(reader)) == []


def test_a_field_cannot_become_required() -> None:
    optional, required = proto("message M { optional int32 a = 1; }"), proto("message M { required int32 a = 1; }")
    assert required.conflicts(optional) == ["/a: required by the reader, the writer may leave it out"]
    assert optional.conflicts(required) == []
