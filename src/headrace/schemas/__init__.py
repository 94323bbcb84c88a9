"""Schemas: compile definitions, validate values, compare versions.

Read `contract` first. The broker uses `compile_schema`; `reading` decodes values. Each language has its own modules, imported on first use,
because their libraries are in the extra `schemas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast

from headrace.errors import InvalidSchema
from headrace.extras import MissingExtra, needs
from headrace.limits import SCHEMA_BYTES_MAX
from headrace.schemas.contract import Compatibility, Schema, SchemaType

__all__ = ["Compatibility", "Schema", "SchemaType", "check_size", "compile_schema", "conflicts", "type_named"]

_HOMES: Final[Mapping[SchemaType, tuple[str, str]]] = {
    SchemaType.JSON: ("headrace.schemas.json_schema", "JsonSchema"),
    SchemaType.AVRO: ("headrace.schemas.avro", "AvroSchema"),
    SchemaType.PROTOBUF: ("headrace.schemas.protobuf", "ProtobufSchema"),
}


def type_named(word: str) -> SchemaType:
    """Return the schema type of a name. Raises `InvalidSchema`."""
    try:
        return SchemaType("protobuf" if word.lower() == "proto" else word.lower())
    except ValueError:
        raise InvalidSchema(f"unsupported schema type: {word[:40]}") from None


def check_size(definition: bytes) -> None:
    """Check the size of a definition. Raises `InvalidSchema`."""
    if len(definition) > SCHEMA_BYTES_MAX:
        raise InvalidSchema(f"a schema of {len(definition)} bytes exceeds the limit of {SCHEMA_BYTES_MAX} bytes")


def compile_schema(type: SchemaType, definition: bytes) -> Schema:
    """Compile a definition. Raises `InvalidSchema`, also if the library of the language is not installed."""
    check_size(definition)
    if not definition.strip():
        raise InvalidSchema("the schema is empty")
    module, name = _HOMES[type]
    try:
        with needs(f"schema type {type}"):
            home = import_module(module)
    except MissingExtra as missing:
        raise InvalidSchema(str(missing)) from missing
    return cast(Schema, getattr(home, name)(definition))


def conflicts(old: Schema, new: Schema, mode: Compatibility) -> list[str]:
    """Return the conflicts that prevent `new` from following `old` in this mode."""
    if mode is Compatibility.NONE:
        return []
    if old.type is not new.type:
        return [f"/: the type changes from {old.type} to {new.type}"]
    found: list[str] = []
    if mode in (Compatibility.BACKWARD, Compatibility.FULL):
        found += new.conflicts(old)
    if mode in (Compatibility.FORWARD, Compatibility.FULL):
        found += [f"{text} (forward)" if mode is Compatibility.FULL else text for text in old.conflicts(new)]
    return found
