"""Schemas without a broker: definitions are compiled, values judged, versions compared.

Read `contract` first; then `compile_schema` below is all that the broker uses. Those who want the values themselves go on with `reading`.
Each language has its own modules, imported when a schema of that language is met: their libraries are the extra `schemas`.
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
    """Raises `InvalidSchema`."""
    try:
        return SchemaType("protobuf" if word.lower() == "proto" else word.lower())
    except ValueError:
        raise InvalidSchema(f"unsupported schema type: {word[:40]}") from None


def check_size(definition: bytes) -> None:
    """Raises `InvalidSchema`."""
    if len(definition) > SCHEMA_BYTES_MAX:
        raise InvalidSchema(f"a schema of {len(definition)} bytes exceeds the limit of {SCHEMA_BYTES_MAX} bytes")


def compile_schema(type: SchemaType, definition: bytes) -> Schema:
    """Raises `InvalidSchema`, also where the library for the language is not installed."""
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
    """Why `new` must not follow `old` in this mode; empty if it may."""
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
