"""Avro schema resolution: conflicts between a writer's and a reader's schema, by the rules of the Avro specification.

Numbers may be promoted (int → long → float → double), strings and bytes are interchangeable, a field missing in the writer needs a default,
names and aliases must agree, and a symbol unknown to the reader needs an enumeration with a default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace.limits import SCHEMA_COMPARISONS_MAX

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
