"""Avro reader: values as plain objects.

Like the walk in `avro.py`, but it creates objects. Each length is checked before it is used, and bytes after the datum make the value
unreadable. Logical types are applied; one that does not match its underlying type is ignored, as the specification requires.

| Avro | shape |
|---|---|
| boolean, int, long, float, double, bytes, string | boolean, int32, int64, float32, float64, binary, string |
| enum · fixed · array · map · record | string · binary · list · map · record |
| null alone, a record without fields | string, always null |
| union of null and one type | that type |
| union of int and long · of float and double | int64 · float64 |
| any other union | record of `member0`, `member1` …, of which one is not null |
| `decimal` up to 38 digits · `date` | decimal · date |
| `timestamp-millis`, `timestamp-micros` · `local-timestamp-…` | timestamp · timestamp without zone |
| `uuid` | string |
| other logical types | their underlying type |
"""

from __future__ import annotations

import decimal
import io
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import fastavro
import msgspec
from fastavro.schema import SchemaParseException, UnknownType, parse_schema

from headrace.errors import InvalidSchema
from headrace.schemas.avro import AvroSchema, kind_of
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape

Read: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
"""(value, position) → the object and the position after it. Raises `ValueError`, `IndexError` or `struct.error`."""

_DECIMAL_DIGITS_MAX: Final = 38
_READ_ERRORS: Final = (ValueError, IndexError, struct.error, OverflowError)
_RESOLVE_ERRORS: Final = (*_READ_ERRORS, EOFError, KeyError, TypeError, AttributeError, fastavro.read.SchemaResolutionError)
_PLAIN: Final = decimal.Context(prec=_DECIMAL_DIGITS_MAX)


class _Part(NamedTuple):
    shape: Shape
    read: Read


class AvroReader:
    """Reader of Avro values. The constructor raises `InvalidSchema`, also for a recursive schema, which has no column type."""

    def __init__(self, definition: bytes, others: Sequence[bytes] = ()) -> None:
        schema = AvroSchema(definition)
        self._root = schema.root
        self._others = [AvroSchema(one) for one in others]
        part = _Parts().of(_with_logical_types(definition, schema))
        self.shape, self._read = part

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        read = self._read
        faults: dict[int, str] = {}
        rows: list[Any] = []
        add = rows.append
        for value in values:
            if value is None:
                add(None)
                continue
            try:
                row, end = read(value, 0)
            except _READ_ERRORS as error:
                add(self._read_other(value, _words(error), len(rows), faults))
                continue
            add(row if end == len(value) else self._read_other(value, f"{len(value) - end} bytes behind the datum", len(rows), faults))
        return rows, faults

    def _read_other(self, value: bytes, fault: str, index: int, faults: dict[int, str]) -> Any:
        """Decode a value of another version and encode it in the wanted version, by the rules of schema resolution."""
        for old in self._others:
            if not old.accepts([value]):
                continue
            try:
                plain = fastavro.schemaless_reader(io.BytesIO(value), old.root, self._root)
                again = io.BytesIO()
                fastavro.schemaless_writer(again, self._root, plain)
                return self._read(again.getvalue(), 0)[0]
            except _RESOLVE_ERRORS as error:
                fault = f"written with another version that does not resolve: {_words(error)}"
        faults[index] = fault
        return None


def _words(error: Exception) -> str:
    return "the value ends too early" if isinstance(error, IndexError | struct.error) else str(error)[:300]


def _with_logical_types(definition: bytes, schema: AvroSchema) -> Any:
    try:
        plain = msgspec.json.decode(definition)
        return parse_schema(plain, _write_hint=False)
    except (msgspec.DecodeError, SchemaParseException, UnknownType, KeyError, TypeError, ValueError, AttributeError):
        return schema.root  # a type name, or a logical type that does not match


# Primitive types


def _varint(value: bytes, at: int) -> tuple[int, int]:
    byte = value[at]
    if byte < 0x80:
        return byte >> 1 ^ -(byte & 1), at + 1
    number, shift = byte & 0x7F, 7
    for index in range(at + 1, at + 10):
        byte = value[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> 64:
                break
            return number >> 1 ^ -(number & 1), index + 1
        shift += 7
    raise ValueError(f"byte {at}: a number of more than 64 bits")


def _int(value: bytes, at: int) -> tuple[int, int]:
    number, end = _varint(value, at)
    if not -(1 << 31) <= number < 1 << 31:
        raise ValueError(f"byte {at}: {number} is no int")
    return number, end


def _boolean(value: bytes, at: int) -> tuple[bool, int]:
    byte = value[at]
    if byte > 1:
        raise ValueError(f"byte {at}: no boolean")
    return byte == 1, at + 1


def _bytes(value: bytes, at: int) -> tuple[bytes, int]:
    size, begin = _varint(value, at)
    end = begin + size
    if not begin <= end <= len(value):
        raise ValueError(f"byte {at}: {size} bytes announced, {len(value) - begin} left")
    return value[begin:end], end


def _string(value: bytes, at: int) -> tuple[str, int]:
    size, begin = _varint(value, at)
    end = begin + size
    if not begin <= end <= len(value):
        raise ValueError(f"byte {at}: {size} bytes announced, {len(value) - begin} left")
    return value[begin:end].decode(), end


def _null(value: bytes, at: int) -> tuple[None, int]:
    return None, at


def _floating(word: str) -> Read:
    layout = struct.Struct(word)
    unpack, size = layout.unpack_from, layout.size
    return lambda value, at: (unpack(value, at)[0], at + size)


_PRIMITIVES: Final[Mapping[str, _Part]] = {
    "null": _Part(Kind.STRING, _null),
    "boolean": _Part(Kind.BOOLEAN, _boolean),
    "int": _Part(Kind.INT32, _int),
    "long": _Part(Kind.INT64, _varint),
    "float": _Part(Kind.FLOAT32, _floating("<f")),
    "double": _Part(Kind.FLOAT64, _floating("<d")),
    "bytes": _Part(Kind.BINARY, _bytes),
    "string": _Part(Kind.STRING, _string),
}
_WIDENED: Final = {frozenset({Kind.INT32, Kind.INT64}): Kind.INT64, frozenset({Kind.FLOAT32, Kind.FLOAT64}): Kind.FLOAT64}


# Complex types


class _Parts:
    """Shapes and functions of a schema, with its named types."""

    def __init__(self) -> None:
        self._named: dict[str, _Part | None] = {}
        """None while the type is being converted."""

    def of(self, schema: Any) -> _Part:
        kind = kind_of(schema)
        if isinstance(schema, dict) and "logicalType" in schema:
            bare = self._bare(kind, schema)
            return _logical(schema, bare)
        return self._bare(kind, schema)

    def _bare(self, kind: str, schema: Any) -> _Part:
        match kind:
            case "union":
                return self._union([self.of(branch) for branch in schema], schema)
            case "record" | "error" | "enum" | "fixed":
                return self._define(kind, schema)
            case "array":
                item = self.of(schema["items"])
                return _Part(ListOf(item.shape), _blocks(item.read))
            case "map":
                values = self.of(schema["values"])
                return _Part(MapOf(values.shape), _blocks(_entry(values.read)))
        if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
        known = self._named.get(kind)
        if known is None:
            raise InvalidSchema(f"{kind} contains itself: a column of Spark or Arrow cannot")
        return known

    def _define(self, kind: str, schema: dict[str, Any]) -> _Part:
        name = schema["name"]
        self._named[name] = None
        match kind:
            case "enum":
                part = _Part(Kind.STRING, _enum(schema["symbols"]))
            case "fixed":
                part = _Part(Kind.BINARY, _fixed(int(schema["size"])))
                if "logicalType" in schema:
                    part = _logical(schema, part)
            case _:
                part = self._record(schema)
        self._named[name] = part
        return part

    def _record(self, schema: dict[str, Any]) -> _Part:
        parts = [(field["name"], self.of(field["type"])) for field in schema["fields"]]
        if not parts:
            return _Part(Kind.STRING, _null)
        fields = [(name, part.read) for name, part in parts]

        def read(value: bytes, at: int) -> tuple[dict[str, Any], int]:
            row = {}
            for name, field in fields:
                row[name], at = field(value, at)
            return row, at

        return _Part(Record(tuple(Field(name, part.shape) for name, part in parts)), read)

    def _union(self, parts: list[_Part], schema: list[Any]) -> _Part:
        count = len(parts)
        solid = [index for index, branch in enumerate(schema) if kind_of(branch) != "null"]
        reads = [part.read for part in parts]
        shapes = {parts[index].shape for index in solid}
        widened = _WIDENED.get(frozenset(shape for shape in shapes if isinstance(shape, Kind)))
        if len(solid) <= 1 or (widened is not None and len(shapes) == 2):
            shape: Shape = widened or (parts[solid[0]].shape if solid else Kind.STRING)
        else:
            members = {index: f"member{place}" for place, index in enumerate(solid)}
            reads = [_member(members[index], read) if index in members else read for index, read in enumerate(reads)]
            shape = Record(tuple(Field(members[index], parts[index].shape) for index in solid))

        def read(value: bytes, at: int) -> tuple[Any, int]:
            index, begin = _varint(value, at)
            if not 0 <= index < count:
                raise ValueError(f"byte {at}: branch {index} of a union of {count}")
            return reads[index](value, begin)

        return _Part(shape, read)


def _member(name: str, read: Read) -> Read:
    def member(value: bytes, at: int) -> tuple[dict[str, Any], int]:
        found, at = read(value, at)
        return {name: found}, at

    return member


def _entry(read: Read) -> Read:
    def entry(value: bytes, at: int) -> tuple[tuple[str, Any], int]:
        key, at = _string(value, at)
        found, at = read(value, at)
        return (key, found), at

    return entry


def _blocks(read: Read) -> Read:
    def blocks(value: bytes, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while True:
            begin = at
            count, at = _varint(value, at)
            if not count:
                return found, at
            announced = None
            if count < 0:
                count = -count
                size, at = _varint(value, at)
                announced = at + size
            if count > len(value) - at:
                raise ValueError(f"byte {begin}: {count} items announced, {len(value) - at} bytes left")
            for _ in range(count):
                item, at = read(value, at)
                found.append(item)
            if announced is not None and announced != at:
                raise ValueError(f"byte {begin}: a block does not end where it says")

    return blocks


def _enum(symbols: list[str]) -> Read:
    def read(value: bytes, at: int) -> tuple[str, int]:
        index, end = _varint(value, at)
        if not 0 <= index < len(symbols):
            raise ValueError(f"byte {at}: symbol {index} of an enumeration of {len(symbols)}")
        return symbols[index], end

    return read


def _fixed(size: int) -> Read:
    def read(value: bytes, at: int) -> tuple[bytes, int]:
        if at + size > len(value):
            raise ValueError(f"byte {at}: {size} bytes expected, {len(value) - at} left")
        return value[at : at + size], at + size

    return read


# Logical types


def _logical(schema: dict[str, Any], bare: _Part) -> _Part:
    match (schema["logicalType"], bare.shape):
        case ("date", Kind.INT32):
            return _Part(Kind.DATE, bare.read)
        case ("timestamp-micros", Kind.INT64):
            return _Part(Kind.TIMESTAMP, bare.read)
        case ("timestamp-millis", Kind.INT64):
            return _Part(Kind.TIMESTAMP, _then(bare.read, _micros))
        case ("local-timestamp-micros", Kind.INT64):
            return _Part(Kind.TIMESTAMP_NTZ, bare.read)
        case ("local-timestamp-millis", Kind.INT64):
            return _Part(Kind.TIMESTAMP_NTZ, _then(bare.read, _micros))
        case ("uuid", Kind.BINARY) if schema.get("size") == 16:
            return _Part(Kind.STRING, _then(bare.read, _uuid))
        case ("decimal", Kind.BINARY):
            return _decimal(schema, bare)
    return bare


def _then(read: Read, change: Callable[[Any], Any]) -> Read:
    def changed(value: bytes, at: int) -> tuple[Any, int]:
        found, at = read(value, at)
        return change(found), at

    return changed


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _micros(millis: int) -> int:
    if abs(millis) > (1 << 63) // 1000 - 1:
        raise ValueError(f"{millis} ms is out of the range of a timestamp")
    return millis * 1000


def _decimal(schema: dict[str, Any], bare: _Part) -> _Part:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision <= _DECIMAL_DIGITS_MAX or not precision:
        return bare
    bound = 10**precision

    def number(raw: bytes) -> decimal.Decimal:
        unscaled = int.from_bytes(raw, "big", signed=True)
        if not -bound < unscaled < bound:
            raise ValueError(f"a decimal of more than {precision} digits")
        return decimal.Decimal(unscaled).scaleb(-scale, _PLAIN)

    return _Part(Decimal(precision, scale), _then(bare.read, number))
