"""Avro schemas: fastavro parses definitions, this module walks values.

A value is the binary encoding of exactly one datum. It is walked, not decoded: no objects are created, each length is checked before it is
used, and nesting is bounded. (A C decoder crashes the process on a hostile value of some thousand levels.) Logical types are annotations:
a date is an int.

Avro schema resolution: conflicts between a writer's and a reader's schema, by the rules of the Avro specification.

Numbers may be promoted (int → long → float → double), strings and bytes are interchangeable, a field missing in the writer needs a default,
names and aliases must agree, and a symbol unknown to the reader needs an enumeration with a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from fastavro.schema import SchemaParseException, UnknownType, parse_schema

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_COMPARISONS_MAX, SCHEMA_DEPTH_MAX, SCHEMA_PARTS_MAX, SCHEMA_VALUE_DEPTH_MAX
from headrace.schemas.contract import Schema, SchemaType

_PROMOTIONS: Final[Mapping[str, frozenset[str]]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
_CONFLICTS_MAX: Final = 8


class _TooLarge(Exception):
    """The comparison exceeds `SCHEMA_COMPARISONS_MAX`."""


class Resolution:
    """Resolution between a writer's and a reader's named types."""

    def __init__(self, written: Mapping[str, dict[str, Any]], read: Mapping[str, dict[str, Any]]) -> None:
        self._written, self._read = written, read
        self._assumed: set[tuple[int, int]] = set()
        self._comparisons = 0

    def conflicts(self, writer: Any, reader: Any) -> list[str]:
        try:
            return list(self._gaps(writer, reader, ""))[:_CONFLICTS_MAX]
        except (_TooLarge, RecursionError):
            return [f"/: proving the two compatible takes more than {SCHEMA_COMPARISONS_MAX} comparisons"]

    def _gaps(self, writer: Any, reader: Any, path: str) -> Iterator[str]:
        self._comparisons += 1
        if self._comparisons > SCHEMA_COMPARISONS_MAX:
            raise _TooLarge
        writer, reader = self._resolved(writer, self._written), self._resolved(reader, self._read)
        if isinstance(writer, list):
            for branch in writer:
                yield from self._gaps(branch, reader, path)
        elif isinstance(reader, list):
            if not any(self._fits(writer, branch, path) for branch in reader):
                yield f"{path or '/'}: the writer may write {_named(writer)}, no branch of the reader's union takes it"
        else:
            yield from self._single(writer, reader, path)

    def _resolved(self, schema: Any, named: Mapping[str, dict[str, Any]]) -> Any:
        return named.get(schema, schema) if isinstance(schema, str) else schema

    def _fits(self, writer: Any, reader: Any, path: str) -> bool:
        assumed = set(self._assumed)
        if any(True for _ in self._gaps(writer, reader, path)):
            self._assumed = assumed  # discard what was proven under this assumption
            return False
        return True

    def _single(self, writer: Any, reader: Any, path: str) -> Iterator[str]:
        write, read = _kind(writer), _kind(reader)
        if write != read:
            if read not in _PROMOTIONS.get(write, ()):
                yield f"{path or '/'}: the writer writes {_named(writer)}, the reader takes {_named(reader)}"
            return
        match write:
            case "array":
                yield from self._gaps(writer["items"], reader["items"], f"{path}/items")
            case "map":
                yield from self._gaps(writer["values"], reader["values"], f"{path}/values")
            case "record" | "error" | "enum" | "fixed":
                yield from self._named_types(write, writer, reader, path)

    def _named_types(self, kind: str, writer: dict[str, Any], reader: dict[str, Any], path: str) -> Iterator[str]:
        pair = (id(writer), id(reader))
        if pair in self._assumed:
            return
        self._assumed.add(pair)
        if _last(writer["name"]) not in {_last(reader["name"]), *map(_last, reader.get("aliases", ()))}:
            yield f"{path or '/'}: the writer's {writer['name']} is not the reader's {reader['name']}, by name or alias"
        if kind == "fixed":
            if writer["size"] != reader["size"]:
                yield f"{path or '/'}: {writer['size']} bytes are written, {reader['size']} are read"
        elif kind == "enum":
            missing = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
            if missing and "default" not in reader:
                yield f"{path or '/'}: the reader does not know the symbol {missing[0]} and has no default"
        else:
            yield from self._fields(writer, reader, path)

    def _fields(self, writer: dict[str, Any], reader: dict[str, Any], path: str) -> Iterator[str]:
        written = {field["name"]: field for field in writer["fields"]}
        for field in reader["fields"]:
            names = [field["name"], *field.get("aliases", ())]
            match = next((written[name] for name in names if name in written), None)
            if match is not None:
                yield from self._gaps(match["type"], field["type"], f"{path}/{field['name']}")
            elif "default" not in field:
                yield f"{path}/{field['name']}: the writer does not write it, and the reader has no default"


def _kind(schema: Any) -> str:
    return str(schema["type"]) if isinstance(schema, dict) else str(schema)


def _named(schema: Any) -> str:
    return f"{schema['type']} {schema['name']}" if isinstance(schema, dict) and "name" in schema else _kind(schema)


def _last(name: str) -> str:
    """Return a name without its namespace, for comparison as the specification allows."""
    return name.rpartition(".")[2]


Walk: TypeAlias = Callable[[bytes, int, int], int]
"""(value, position, depth left) → the position after the datum. Raises `_Fault`."""

PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_VARINT_BYTES_MAX: Final = 10
_WALK_STEPS: Final = 10
"""Cost of a byte in steps of about 5 ns: less for a byte of text, more for a byte that is a datum."""


class _Fault(Exception):
    """Position and reason of a mismatch between value and schema."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(f"byte {position}: {text}")


class AvroSchema:
    """Compiled Avro schema. The constructor raises `InvalidSchema`."""

    type = SchemaType.AVRO

    def __init__(self, definition: bytes) -> None:
        self.definition = definition
        self.root = _parsed(definition)
        self.named: dict[str, dict[str, Any]] = {}
        parts = [0, 0]
        _collect(self.root, self.named, 0, parts)
        self.steps_per_byte = _WALK_STEPS * (1 + parts[1])
        self._walk = _Walks(self.named).of(self.root)

    def accepts(self, values: Sequence[bytes | None]) -> bool:
        walk = self._walk
        try:
            for value in values:
                if value is not None and walk(value, 0, SCHEMA_VALUE_DEPTH_MAX) != len(value):
                    return False
        except _Fault:
            return False
        return True

    def faults(self, value: bytes) -> list[str]:
        try:
            end = self._walk(value, 0, SCHEMA_VALUE_DEPTH_MAX)
        except _Fault as fault:
            return [str(fault)]
        return [] if end == len(value) else [f"byte {end}: {len(value) - end} bytes behind the datum"]

    def conflicts(self, written: Schema) -> list[str]:
        assert isinstance(written, AvroSchema)
        return Resolution(written.named, self.named).conflicts(written.root, self.root)


def _parsed(definition: bytes) -> Any:
    try:
        plain = msgspec.json.decode(definition)
    except RecursionError as error:
        raise InvalidSchema("the schema is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        word = definition.decode(errors="replace").strip()
        if word not in PRIMITIVES:
            raise InvalidSchema(f"the schema is not JSON: {error}") from error
        plain = word
    _check_depth(plain, SCHEMA_DEPTH_MAX)
    try:
        return parse_schema(_without_logical_types(plain), _write_hint=False)
    except (SchemaParseException, UnknownType, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidSchema(f"not an Avro schema: {type(error).__name__}: {str(error)[:200]}") from error


def _check_depth(plain: Any, left: int) -> None:
    if not left:
        raise InvalidSchema(f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep")
    for part in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        _check_depth(part, left - 1)


def _without_logical_types(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_without_logical_types(part) for part in plain]
    if isinstance(plain, dict):
        return {key: part if key == "default" else _without_logical_types(part) for key, part in plain.items() if key != "logicalType"}
    return plain


def kind_of(schema: Any) -> str:
    """Return `union`, the name of a primitive or complex type, or the full name of a named type."""
    if isinstance(schema, list):
        return "union"
    return str(schema["type"]) if isinstance(schema, dict) else str(schema)


def _collect(schema: Any, named: dict[str, dict[str, Any]], depth: int, count: list[int]) -> None:
    """Collect the named types by full name, which fastavro has written into the schema. `count` holds the number of all parts and of those
    that may take no bytes."""
    count[0] += 1
    count[1] += kind_of(schema) in ("null", "fixed", "record", "error")  # may take no bytes, so one byte of a value may cost all of them
    if count[0] > SCHEMA_PARTS_MAX or depth > SCHEMA_DEPTH_MAX:
        raise InvalidSchema(f"the schema has more than {SCHEMA_PARTS_MAX} parts or {SCHEMA_DEPTH_MAX} levels")
    match kind_of(schema):
        case "union":
            for branch in schema:
                _collect(branch, named, depth + 1, count)
        case "record" | "error":
            named[schema["name"]] = schema
            for field in schema["fields"]:
                _collect(field["type"], named, depth + 1, count)
        case "enum" | "fixed":
            named[schema["name"]] = schema
        case "array":
            _collect(schema["items"], named, depth + 1, count)
        case "map":
            _collect(schema["values"], named, depth + 1, count)


def _varint(value: bytes, at: int) -> tuple[int, int]:
    """Decode a zig-zag number; return it and the position after it."""
    number, shift = 0, 0
    for index in range(at, min(at + _VARINT_BYTES_MAX, len(value))):
        byte = value[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >> 64:
                raise _Fault(at, "a number of more than 64 bits")
            return number >> 1 ^ -(number & 1), index + 1
        shift += 7
    raise _Fault(at, "a number without an end")


def _int(value: bytes, at: int, depth: int) -> int:
    number, end = _varint(value, at)
    if not -(1 << 31) <= number < 1 << 31:
        raise _Fault(at, f"{number} is no int")
    return end


def _long(value: bytes, at: int, depth: int) -> int:
    if at < len(value) and value[at] < 0x80:
        return at + 1
    return _varint(value, at)[1]


def _boolean(value: bytes, at: int, depth: int) -> int:
    if at >= len(value) or value[at] > 1:
        raise _Fault(at, "no boolean")
    return at + 1


def _fixed(size: int) -> Walk:
    def walk(value: bytes, at: int, depth: int) -> int:
        if at + size > len(value):
            raise _Fault(at, f"{size} bytes expected, {len(value) - at} left")
        return at + size

    return walk


def _bytes(value: bytes, at: int, depth: int) -> int:
    size, begin = _varint(value, at)
    if not 0 <= size <= len(value) - begin:
        raise _Fault(at, f"{size} bytes announced, {len(value) - begin} left")
    return begin + size


def _string(value: bytes, at: int, depth: int) -> int:
    size, begin = _varint(value, at)
    end = begin + size
    if not begin <= end <= len(value):
        raise _Fault(at, f"{size} bytes announced, {len(value) - begin} left")
    try:
        value[begin:end].decode()
    except UnicodeDecodeError:
        raise _Fault(begin, "text is not UTF-8") from None
    return end


def _null(value: bytes, at: int, depth: int) -> int:
    return at


_PRIMITIVE_WALKS: Final[Mapping[str, Walk]] = {
    "null": _null,
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "float": _fixed(4),
    "double": _fixed(8),
    "bytes": _bytes,
    "string": _string,
}


class _Walks:
    """Functions that walk the values of a schema."""

    def __init__(self, named: Mapping[str, dict[str, Any]]) -> None:
        self._named = named
        self._by_name: dict[str, Walk] = {}

    def of(self, schema: Any) -> Walk:
        kind = kind_of(schema)
        match kind:
            case "union":
                return self._union([self.of(branch) for branch in schema])
            case "record" | "error":
                return self._record(schema)
            case "enum":
                return _enum(len(schema["symbols"]))
            case "fixed":
                return _fixed(int(schema["size"]))
            case "array":
                return self._blocks(self._item(schema["items"]))
            case "map":
                return self._blocks(_entry(self.of(schema["values"])))
        if kind in _PRIMITIVE_WALKS:
            return _PRIMITIVE_WALKS[kind]
        if kind in self._by_name:
            return self._by_name[kind]
        if kind in self._named and kind_of(self._named[kind]) in ("enum", "fixed"):
            return self.of(self._named[kind])
        return lambda value, at, depth: self._by_name[kind](value, at, depth)

    def _record(self, schema: dict[str, Any]) -> Walk:
        walks: list[Walk] = []

        def walk(value: bytes, at: int, depth: int) -> int:
            if not depth:
                raise _Fault(at, f"nested more than {SCHEMA_VALUE_DEPTH_MAX} levels deep")
            depth -= 1
            for field in walks:
                at = field(value, at, depth)
            return at

        self._by_name[schema["name"]] = walk
        walks += [self.of(field["type"]) for field in schema["fields"]]
        return walk

    def _item(self, schema: Any) -> Walk:
        if not _takes_bytes(schema, self._named, frozenset()):
            # A few bytes could announce any number of items, and the walk would not end.
            raise InvalidSchema("an array of items without any bytes is not supported")
        return self.of(schema)

    def _union(self, branches: list[Walk]) -> Walk:
        count = len(branches)

        def walk(value: bytes, at: int, depth: int) -> int:
            index, begin = _varint(value, at)
            if not 0 <= index < count:
                raise _Fault(at, f"branch {index} of a union of {count}")
            if not depth:
                raise _Fault(at, f"nested more than {SCHEMA_VALUE_DEPTH_MAX} levels deep")
            return branches[index](value, begin, depth - 1)

        return walk

    def _blocks(self, item: Walk) -> Walk:
        def walk(value: bytes, at: int, depth: int) -> int:
            if not depth:
                raise _Fault(at, f"nested more than {SCHEMA_VALUE_DEPTH_MAX} levels deep")
            depth -= 1
            while True:
                begin = at
                count, at = _varint(value, at)
                if not count:
                    return at
                announced = None
                if count < 0:
                    count = -count
                    size, at = _varint(value, at)
                    announced = at + size
                if count > len(value) - at:
                    raise _Fault(begin, f"{count} items announced, {len(value) - at} bytes left")
                for _ in range(count):
                    at = item(value, at, depth)
                if announced is not None and announced != at:
                    raise _Fault(begin, "a block does not end where it says")

        return walk


def _entry(walk_value: Walk) -> Walk:
    def walk(value: bytes, at: int, depth: int) -> int:
        return walk_value(value, _string(value, at, depth), depth)

    return walk


def _enum(count: int) -> Walk:
    def walk(value: bytes, at: int, depth: int) -> int:
        index, end = _varint(value, at)
        if not 0 <= index < count:
            raise _Fault(at, f"symbol {index} of an enumeration of {count}")
        return end

    return walk


def _takes_bytes(schema: Any, named: Mapping[str, dict[str, Any]], inside: frozenset[str]) -> bool:
    """Return whether every datum has at least one byte."""
    kind = kind_of(schema)
    match kind:
        case "null":
            return False
        case "fixed":
            return int(schema["size"]) > 0
        case "record" | "error":
            # A record that directly contains itself has no finite datum, so the result does not matter.
            return any(_takes_bytes(field["type"], named, inside | {schema["name"]}) for field in schema["fields"])
    if kind in named:
        return kind in inside or _takes_bytes(named[kind], named, inside)
    return True
