"""Shapes: types of values, independent of the schema language.

Readers (`reading.py`) decode bytes to plain objects of a shape; a consumer such as Spark converts the shape to its own types. A shape is
finite: a recursive schema has none.

| shape | plain object |
|---|---|
| boolean, int8 … int64, float32, float64, string, binary | the Python type of that name |
| decimal | `decimal.Decimal` |
| date | `datetime.date`, or int: days since 1970 |
| timestamp, timestamp without zone | `datetime.datetime`, or int: microseconds since 1970 |
| list, map, record | list; list of (key, value) or dict; dict, in which a missing name is a null |

Readers: decode values to plain objects.

Values do not carry the version of their schema. So a reader has the wanted version and others. It decodes a value with the wanted version
first, then with the others in turn, and converts the result to the wanted shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any, Final, Protocol, TypeAlias, cast

from headrace.errors import InvalidSchema
from headrace.extras import MissingExtra, needs
from headrace.limits import SCHEMA_BYTES_MAX
from headrace.schemas.contract import SchemaType


class Kind(StrEnum):
    BOOLEAN = "boolean"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    STRING = "string"
    BINARY = "binary"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMP_NTZ = "timestamp_ntz"
    JSON = "json"
    """A string of JSON text, for values without a matching type."""


INT_BITS: Final = {Kind.INT8: 8, Kind.INT16: 16, Kind.INT32: 32, Kind.INT64: 64}


@dataclass(frozen=True, slots=True)
class Decimal:
    precision: int
    scale: int


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Shape


@dataclass(frozen=True, slots=True)
class MapOf:
    value: Shape
    key: Kind = Kind.STRING


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    shape: Shape
    is_required: bool = False
    """Whether a value without this field is unreadable."""
    is_nullable: bool = True
    """Whether the field may be null."""


@dataclass(frozen=True, slots=True)
class Record:
    fields: tuple[Field, ...]


Shape: TypeAlias = Kind | Decimal | ListOf | MapOf | Record


_HOMES: Final = {
    SchemaType.JSON: ("headrace.schemas.json_reading", "reader"),
    SchemaType.AVRO: ("headrace.schemas.avro_reading", "AvroReader"),
    SchemaType.PROTOBUF: ("headrace.schemas.protobuf_reading", "ProtobufReader"),
}


class Reader(Protocol):
    """Reader of the values of one schema."""

    @property
    def shape(self) -> Shape: ...

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        """Return a plain object for each value, and the faults by index. Tombstones and unreadable values are None. Hot path."""


def reader_of(type: SchemaType, definition: bytes, others: Sequence[bytes] = ()) -> Reader:
    """Return the reader of a definition. `others` are other versions, in the order of trial. Raises `InvalidSchema`."""
    for one in (definition, *others):
        if len(one) > SCHEMA_BYTES_MAX:
            raise InvalidSchema(f"a schema of {len(one)} bytes exceeds the limit of {SCHEMA_BYTES_MAX} bytes")
    module, name = _HOMES[type]
    try:
        with needs(f"schema type {type}"):
            home = import_module(module)
    except MissingExtra as missing:
        raise InvalidSchema(str(missing)) from missing
    return cast(Reader, getattr(home, name)(definition, others))
