"""Readers: decode values to plain objects.

Values do not carry the version of their schema. So a reader has the wanted version and others. It decodes a value with the wanted version
first, then with the others in turn, and converts the result to the wanted shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Protocol, cast

from headrace.errors import InvalidSchema
from headrace.extras import MissingExtra, needs
from headrace.limits import SCHEMA_BYTES_MAX
from headrace.schemas.contract import SchemaType
from headrace.schemas.shapes import Shape

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
