"""JSON reader: values of a shape, decoded by msgspec in about half a microsecond per hundred bytes.

The reader checks types and required fields; `json_schema.py` checks ranges, patterns and enumerations. A rejected value is decoded a second
time, where `1.0` is an integer, as in JSON Schema, and where the shapes of other versions apply.

Shape of the values of a JSON Schema.

| schema | shape |
|---|---|
| `integer` · `number` · `boolean` | int64 · float64 · boolean |
| `string` | string; with `format` `date-time` a timestamp, with `date` a date |
| `object` with `properties` | record; other properties are omitted |
| `object` with `additionalProperties` alone | map |
| `array` with `items` | list |
| `enum`, `const` | the type that all the values have |
| null beside one of these (`type`, `anyOf`, `oneOf`, `enum`) | the same, null allowed |
| `$ref` | the shape of its target |
| `allOf` of objects | one record of all their properties |
| anything else | JSON text |

JSON text is used for values without a single type: alternatives, tuples, objects without keywords, and recursive schemas.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, NotRequired, Required, TypeAlias, TypedDict

import msgspec

from headrace.errors import InvalidSchema
from headrace.schemas.json_document import Document, Node
from headrace.schemas.shapes import INT_BITS, Decimal, Field, Kind, ListOf, MapOf, Record, Shape

_SCALARS: Final = {"integer": Kind.INT64, "number": Kind.FLOAT64, "boolean": Kind.BOOLEAN, "string": Kind.STRING}
_FORMATS: Final = {"date-time": Kind.TIMESTAMP, "date": Kind.DATE}


class Found(NamedTuple):
    """Shape of one location, and whether null is allowed."""

    shape: Shape
    is_nullable: bool


_ANYTHING: Final = Found(Kind.JSON, True)


def shape_of(document: Document) -> Found:
    return _Shapes(document).of(document.root, ())


class _Shapes:
    def __init__(self, document: Document) -> None:
        self._document = document

    def of(self, node: Node, inside: tuple[int, ...]) -> Found:
        """Return the shape of a part. `inside` holds the enclosing parts, to detect recursion."""
        if not isinstance(node, dict) or id(node) in inside:
            return _ANYTHING
        inside = (*inside, id(node))
        if isinstance(node.get("$ref"), str):
            return self.of(self._document.resolve(node["$ref"]), inside)
        for word in ("anyOf", "oneOf"):
            if word in node and "properties" not in node:
                return self._alternatives(node[word], inside)
        if "allOf" in node:
            return self._together([*node["allOf"], {key: part for key, part in node.items() if key != "allOf"}], inside)
        if "type" not in node and ("enum" in node or "const" in node):
            return _enumerated(node["enum"] if "enum" in node else [node["const"]])
        return self._typed(node, inside)

    def _typed(self, node: dict[str, Any], inside: tuple[int, ...]) -> Found:
        words = node.get("type")
        if words is None:
            words = "object" if "properties" in node else "array" if "items" in node else []
        types = [words] if isinstance(words, str) else list(words)
        is_nullable = "null" in types
        types = [word for word in types if word != "null"]
        if set(types) == {"integer", "number"}:
            types = ["number"]
        if len(types) != 1:
            return _ANYTHING
        return Found(self._single(types[0], node, inside), is_nullable)

    def _single(self, word: str, node: dict[str, Any], inside: tuple[int, ...]) -> Shape:
        match word:
            case "string":
                return _FORMATS.get(node.get("format", ""), Kind.STRING)
            case "object":
                return self._object(node, inside)
            case "array":
                return Kind.JSON if "prefixItems" in node else ListOf(self.of(node.get("items", True), inside).shape)
        return _SCALARS[word]

    def _object(self, node: dict[str, Any], inside: tuple[int, ...]) -> Shape:
        properties = node.get("properties", {})
        if properties:
            required = frozenset(node.get("required", ()))
            return Record(tuple(self._field(name, part, name in required, inside) for name, part in properties.items()))
        others = node.get("additionalProperties")
        if isinstance(others, dict) and "patternProperties" not in node:
            return MapOf(self.of(others, inside).shape)
        return Kind.JSON

    def _field(self, name: str, part: Node, is_required: bool, inside: tuple[int, ...]) -> Field:
        found = self.of(part, inside)
        return Field(name, found.shape, is_required, found.is_nullable)

    def _alternatives(self, parts: Sequence[Node], inside: tuple[int, ...]) -> Found:
        found = [self.of(part, inside) for part in parts if not _is_null(part)]
        is_nullable = len(found) < len(parts) or any(one.is_nullable for one in found)
        shapes = {one.shape for one in found}
        return Found(shapes.pop(), is_nullable) if len(shapes) == 1 else _ANYTHING

    def _together(self, parts: Iterable[Node], inside: tuple[int, ...]) -> Found:
        """Return the shape of parts that all hold. Several parts with a shape must be records, whose fields are merged."""
        found = [self.of(part, inside) for part in parts if isinstance(part, dict) and _says_type(part)]
        if len(found) == 1:
            return found[0]
        fields: dict[str, Field] = {}
        for one in found:
            if not isinstance(one.shape, Record):
                return _ANYTHING
            for field in one.shape.fields:
                known = fields.get(field.name)
                if known is not None and known.shape != field.shape:
                    return _ANYTHING
                fields[field.name] = field if known is None or field.is_required else known
        return Found(Record(tuple(fields.values())), all(one.is_nullable for one in found)) if fields else _ANYTHING


def _is_null(part: Node) -> bool:
    return isinstance(part, dict) and (part.get("type") == "null" or part.get("const", 0) is None or part.get("enum") == [None])


def _says_type(part: dict[str, Any]) -> bool:
    return not part.keys().isdisjoint(("type", "properties", "$ref", "enum", "const", "anyOf", "oneOf", "allOf", "items"))


def _enumerated(members: Sequence[Any]) -> Found:
    kinds = {type(one) for one in members if one is not None}
    is_nullable = None in members
    if kinds == {int, float}:
        return Found(Kind.FLOAT64, is_nullable)
    if len(kinds) != 1:
        return _ANYTHING
    known = {bool: Kind.BOOLEAN, int: Kind.INT64, float: Kind.FLOAT64, str: Kind.STRING}
    return Found(known.get(kinds.pop(), Kind.JSON), is_nullable)


Mend: TypeAlias = Callable[[Any], Any]
"""Conversion of a decoded object. Raises `ValueError`."""

_DECODE_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)
_FAULT_CHARACTERS_MAX: Final = 300


def reader(definition: bytes, others: Sequence[bytes] = ()) -> JsonReader:
    """Return the reader of a definition. Raises `InvalidSchema`."""
    wanted = _shape(definition)
    shapes = [_shape(one).shape for one in others]
    return JsonReader(wanted.shape, [shape for shape in shapes if shape != wanted.shape], is_nullable=wanted.is_nullable)


def _shape(definition: bytes) -> Found:
    try:
        plain = msgspec.json.decode(definition)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSchema(f"the schema is not JSON: {error}") from error
    return shape_of(Document(plain))


class JsonReader:
    """Reader of JSON values. `others` are the shapes of other versions; `is_nullable` allows the JSON text `null`."""

    def __init__(self, shape: Shape, others: Sequence[Shape] = (), *, is_nullable: bool = True) -> None:
        self.shape = shape
        self._decode = _decoder(shape, is_nullable, is_wide=False, checks_required=True)
        self._mend = _mend(shape, is_wide=False)
        self._wide = _Wide(shape, is_nullable, checks_required=True)
        self._fitting = _Wide(shape, is_nullable, checks_required=False)
        self._others = [_Wide(one, is_nullable, checks_required=True) for one in others]

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        decode, mend = self._decode, self._mend
        faults: dict[int, str] = {}
        rows: list[Any] = []
        add = rows.append
        for value in values:
            try:
                row = None if value is None else decode(value)
                add(row if mend is None or row is None else mend(row))
            except _DECODE_ERRORS as error:
                assert value is not None
                add(self._second_look(value, error, len(rows), faults))
        return rows, faults

    def _second_look(self, value: bytes, error: Exception, index: int, faults: dict[int, str]) -> Any:
        if isinstance(error, msgspec.ValidationError):
            try:
                return self._wide.read(value)
            except _DECODE_ERRORS:
                pass
            if any(old.accepts(value) for old in self._others):
                try:
                    return self._fitting.read(value)
                except _DECODE_ERRORS as misfit:
                    error = misfit
        faults[index] = _words(error)
        return None


class _Wide:
    """Return the shape with integers that may have a decimal point."""

    def __init__(self, shape: Shape, is_nullable: bool, *, checks_required: bool) -> None:
        self._decode = _decoder(shape, is_nullable, is_wide=True, checks_required=checks_required)
        self._mend = _mend(shape, is_wide=True)

    def read(self, value: bytes) -> Any:
        row = self._decode(value)
        return row if self._mend is None or row is None else self._mend(row)

    def accepts(self, value: bytes) -> bool:
        try:
            self.read(value)
        except _DECODE_ERRORS:
            return False
        return True


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "not JSON: nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        return str(error)[:_FAULT_CHARACTERS_MAX]
    return f"not JSON: {error}"[:_FAULT_CHARACTERS_MAX]


# From a shape to msgspec's types


def _decoder(shape: Shape, is_nullable: bool, *, is_wide: bool, checks_required: bool) -> Callable[[bytes], Any]:
    kind = _type(shape, is_wide, checks_required)
    return msgspec.json.Decoder(_or_null(kind) if is_nullable else kind).decode


def _int_type(bits: int, is_wide: bool) -> Any:
    bound = 1 << bits - 1
    kind = Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
    return kind | float if is_wide else kind


_SCALAR_TYPES: Final[dict[Kind, Any]] = {
    Kind.BOOLEAN: bool,
    Kind.FLOAT32: float,
    Kind.FLOAT64: float,
    Kind.STRING: str,
    Kind.BINARY: bytes,
    Kind.DATE: datetime.date,
    Kind.TIMESTAMP: datetime.datetime,
    Kind.TIMESTAMP_NTZ: datetime.datetime,
    Kind.JSON: msgspec.Raw,
}


def _type(shape: Shape, is_wide: bool, checks_required: bool) -> Any:
    of = partial(_type, is_wide=is_wide, checks_required=checks_required)
    match shape:
        case Kind():
            return _int_type(INT_BITS[shape], is_wide) if shape in INT_BITS else _SCALAR_TYPES[shape]
        case Decimal():
            return decimal.Decimal
        case ListOf():
            return list[_or_null(of(shape.item))]  # type: ignore[misc]  # built at run time
        case MapOf():
            return dict[str, _or_null(of(shape.value))]  # type: ignore[misc]  # built at run time
        case Record():
            members: dict[str, Any] = {}
            for field in shape.fields:
                # msgspec finds a non-ASCII name only if the interpreter caches its UTF-8 form, which encoding it does.
                msgspec.json.encode(field.name)
                kind = of(field.shape)
                is_required = checks_required and field.is_required
                if field.is_nullable or not is_required:
                    kind = _or_null(kind)
                members[field.name] = Required[kind] if is_required else NotRequired[kind]
            return TypedDict("Value", members)  # type: ignore[operator]  # built at run time


def _or_null(kind: Any) -> Any:
    """Add null to a type, except to JSON text, which includes null."""
    return kind if kind is msgspec.Raw else kind | None


# Conversions after msgspec


def _mend(shape: Shape, is_wide: bool) -> Mend | None:
    """Return the conversion of a shape; None if none is needed, which is the usual case."""
    match shape:
        case Kind.JSON:
            return _text
        case Kind():
            return partial(_integer, bits=INT_BITS[shape]) if is_wide and shape in INT_BITS else None
        case Decimal():
            return None
        case ListOf():
            return _mend_list(_mend(shape.item, is_wide))
        case MapOf():
            return _mend_map(_mend(shape.value, is_wide))
        case Record():
            named = [(field.name, _mend(field.shape, is_wide)) for field in shape.fields]
            return _mend_record([(name, mend) for name, mend in named if mend is not None])


def _text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode()
    return None if text == "null" else text


def _integer(number: float, bits: int) -> int:
    whole = int(number)
    if whole != number or not -(1 << bits - 1) <= whole < 1 << bits - 1:
        raise msgspec.ValidationError(f"Expected an integer of {bits} bits, got {number}")
    return whole


def _mend_list(item: Mend | None) -> Mend | None:
    if item is None:
        return None
    return lambda row: [None if one is None else item(one) for one in row]


def _mend_map(value: Mend | None) -> Mend | None:
    if value is None:
        return None
    return lambda row: {key: None if one is None else value(one) for key, one in row.items()}


def _mend_record(fields: list[tuple[str, Mend]]) -> Mend | None:
    if not fields:
        return None

    def mend(row: dict[str, Any]) -> dict[str, Any]:
        for name, change in fields:
            known = row.get(name)
            if known is not None:
                row[name] = change(known)
        return row

    return mend
