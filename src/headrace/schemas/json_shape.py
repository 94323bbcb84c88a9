"""Shape of the values of a JSON Schema.

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

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from headrace.schemas.json_document import Document, Node
from headrace.schemas.shapes import Field, Kind, ListOf, MapOf, Record, Shape

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
