"""Protobuf reader: messages as plain objects.

| Protobuf | shape |
|---|---|
| bool · string · bytes · float · double | boolean · string · binary · float32 · float64 |
| int32, sint32, sfixed32 · int64, sint64, sfixed64 | int32 · int64 |
| uint32, fixed32 · uint64, fixed64 | int64 · decimal of 20 digits |
| enum | string: the name, or the number if the schema has no name for it |
| message · repeated · map | record · list · map |
| `google.protobuf.Timestamp` | timestamp, cut to microseconds |
| message without fields | string, always null |

A field with presence is null if not set; a field without presence has its default. Other versions need no conversion: fields are identified
by number, and fields unknown to the wanted version are dropped.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError

from headrace.errors import InvalidSchema
from headrace.schemas.protobuf import ProtobufSchema, missing_fields
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape

_F = FieldDescriptor
Change: TypeAlias = Callable[[Any], Any]

_KINDS: Final = {
    _F.TYPE_BOOL: Kind.BOOLEAN,
    _F.TYPE_STRING: Kind.STRING,
    _F.TYPE_BYTES: Kind.BINARY,
    _F.TYPE_FLOAT: Kind.FLOAT32,
    _F.TYPE_DOUBLE: Kind.FLOAT64,
    _F.TYPE_INT32: Kind.INT32,
    _F.TYPE_SINT32: Kind.INT32,
    _F.TYPE_SFIXED32: Kind.INT32,
    _F.TYPE_INT64: Kind.INT64,
    _F.TYPE_SINT64: Kind.INT64,
    _F.TYPE_SFIXED64: Kind.INT64,
    _F.TYPE_UINT32: Kind.INT64,
    _F.TYPE_FIXED32: Kind.INT64,
}
_UNSIGNED_64: Final = (_F.TYPE_UINT64, _F.TYPE_FIXED64)
_TIMESTAMP: Final = "google.protobuf.Timestamp"


class _Part(NamedTuple):
    shape: Shape
    change: Change | None
    """Conversion of a runtime value to a plain object; None if they are the same."""


class ProtobufReader:
    """Reader of Protobuf values. The constructor raises `InvalidSchema`, also for a recursive message, which has no column type."""

    def __init__(self, definition: bytes, others: Sequence[bytes] = ()) -> None:
        schema = ProtobufSchema(definition)
        self._others = [ProtobufSchema(one) for one in others]
        self._parse = schema.message_class.FromString
        part = _message(schema.message, frozenset())
        self.shape = part.shape
        self._change = part.change or (lambda message: None)

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        parse, change = self._parse, self._change
        faults: dict[int, str] = {}
        rows: list[Any] = []
        add = rows.append
        for value in values:
            if value is None:
                add(None)
                continue
            try:
                message = parse(value)
                row = change(message)
            except (DecodeError, EncodeError, ValueError) as error:
                faults[len(rows)] = str(error)[:300]
                add(None)
                continue
            if not message.IsInitialized() and not any(old.accepts([value]) for old in self._others):
                faults[len(rows)] = f"{next(missing_fields(message))}: missing"[:300]
                row = None
            add(row)
        return rows, faults


def _message(message: Descriptor, inside: frozenset[str]) -> _Part:
    if message.full_name == _TIMESTAMP:
        return _Part(Kind.TIMESTAMP, _micros)
    if message.full_name in inside:
        raise InvalidSchema(f"{message.full_name} contains itself: a column of Spark or Arrow cannot")
    inside |= {message.full_name}
    found = [(field, _field(field, inside)) for field in message.fields]
    if not found:
        return _Part(Kind.STRING, lambda message: None)
    reads = [_read_of(field, part.change) for field, part in found]
    shape = Record(tuple(Field(field.name, part.shape) for field, part in found))
    return _Part(shape, partial(_row, [field.name for field, _ in found], reads))


def _row(names: list[str], reads: list[Change], message: Any) -> dict[str, Any]:
    return {name: read(message) for name, read in zip(names, reads, strict=True)}


def _field(field: FieldDescriptor, inside: frozenset[str]) -> _Part:
    """Return the part of the whole field, including repetition."""
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = _key(message.fields_by_name["key"]), _single(message.fields_by_name["value"], inside)
        return _Part(MapOf(value.shape, key), partial(_map, value.change))
    single = _single(field, inside)
    if field.is_repeated:
        return _Part(ListOf(single.shape), list if single.change is None else partial(_list, single.change))
    return single


def _single(field: FieldDescriptor, inside: frozenset[str]) -> _Part:
    if field.message_type is not None:
        return _message(field.message_type, inside)
    if field.enum_type is not None:
        names = {value.number: value.name for value in reversed(field.enum_type.values)}
        return _Part(Kind.STRING, lambda number: names.get(number) or str(number))
    if field.type in _UNSIGNED_64:
        return _Part(Decimal(20, 0), decimal.Decimal)
    return _Part(_KINDS[field.type], None)


def _key(field: FieldDescriptor) -> Kind:
    if field.type in _UNSIGNED_64:
        raise InvalidSchema(f"{field.containing_type.full_name}: a map with keys of 64 bits without a sign is not supported")
    return _KINDS[field.type]


def _read_of(field: FieldDescriptor, change: Change | None) -> Change:
    name = field.name
    if field.has_presence:

        def read(message: Any) -> Any:
            if not message.HasField(name):
                return None
            return getattr(message, name) if change is None else change(getattr(message, name))

        return read
    if change is None:
        return lambda message: getattr(message, name)
    return lambda message: change(getattr(message, name))


def _list(change: Change, items: Any) -> list[Any]:
    return [change(item) for item in items]


def _map(change: Change | None, entries: Any) -> list[tuple[Any, Any]]:
    return [(key, entries[key] if change is None else change(entries[key])) for key in entries]


def _micros(moment: Any) -> int:
    micros = int(moment.seconds) * 1_000_000 + int(moment.nanos) // 1000
    if not -(1 << 63) <= micros < 1 << 63:
        raise ValueError(f"{moment.seconds} s is out of the range of a timestamp")
    return micros
