"""What a schema is to the rest of Headrace: something that says what is wrong with a value, and whether it can take another's place.

Three languages, one contract. A schema is compiled once, when it is registered or loaded; values are then checked by the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, cast


class SchemaType(StrEnum):
    """The language of a definition."""

    JSON = "json"
    """JSON Schema, draft 2020-12."""
    AVRO = "avro"
    PROTOBUF = "protobuf"


class Compatibility(StrEnum):
    """What a new version must promise to the older ones."""

    NONE = "none"
    BACKWARD = "backward"
    """Readers of the new version can read what was written with the last one."""
    FORWARD = "forward"
    """Readers of the last version can read what is written with the new one."""
    FULL = "full"
    """Both."""


class Schema(Protocol):
    """A compiled definition."""

    @property
    def type(self) -> SchemaType: ...

    @property
    def definition(self) -> bytes: ...

    @property
    def steps_per_byte(self) -> int:
        """What a byte of a value costs at most, in steps of about 5 ns."""

    def accepts(self, values: Sequence[bytes | None]) -> bool:
        """Whether every value fits; a tombstone (None) has nothing that could be wrong. This is the hot path."""

    def faults(self, value: bytes) -> list[str]:
        """What is wrong with a value, each fault with its place; empty if it fits. At most `SCHEMA_FAULTS_MAX` of them, each of bounded
        length; no more than those are looked for."""

    def conflicts(self, written: Schema) -> list[str]:
        """Why a reader with this schema might not understand a value that `written` accepts; empty if it surely does.

        Conservative: what cannot be proven is a conflict. `written` is of the same type.
        """


def present(values: Sequence[bytes | None]) -> Sequence[bytes]:
    """The values without tombstones; the same list where there are none, which is nearly always."""
    if None in values:
        return [value for value in values if value is not None]
    return cast(Sequence[bytes], values)
