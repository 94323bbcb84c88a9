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
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias


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
