"""Values become plain objects: what a schema is to those who want to work with the values and not only judge them.

Values carry no number of the version they were written with. A reader therefore knows the version that is wanted, and others: a value
is read with the wanted one, and where that fails with the others one after the other, and is then brought into the wanted shape.
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
    """Reads the values of one schema."""

    @property
    def shape(self) -> Shape: ...

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        """A plain object of the shape for each value, None for a tombstone, and None for each value that cannot be read: what is
        wrong with those stands in the dictionary, by index. This is the hot path."""


def reader_of(type: SchemaType, definition: bytes, others: Sequence[bytes] = ()) -> Reader:
    """`others`: the definitions of other versions, in the order in which they are to be tried. Raises `InvalidSchema`."""
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
