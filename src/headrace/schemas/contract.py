"""Interface of compiled schemas, for all three languages: validate values, and compare with another version.

A schema is compiled once, when it is registered or loaded. Values are then checked in columns.
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
    """Compatibility of a new version with older ones."""

    NONE = "none"
    BACKWARD = "backward"
    """Readers of the new version can read values of the last one."""
    FORWARD = "forward"
    """Readers of the last version can read values of the new one."""
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
        """Maximum cost of a byte of a value, in steps of about 5 ns."""

    def accepts(self, values: Sequence[bytes | None]) -> bool:
        """Return whether every value is valid. A tombstone (None) is valid. This is the hot path."""

    def faults(self, value: bytes) -> list[str]:
        """Return the first faults of a value with their positions: at most `SCHEMA_FAULTS_MAX`, each of bounded length."""

    def conflicts(self, written: Schema) -> list[str]:
        """Return why a reader with this schema may fail on values of `written`, which has the same type. Unproven is a conflict."""


def present(values: Sequence[bytes | None]) -> Sequence[bytes]:
    """Return the values without tombstones; the same list if there are none, which is the usual case."""
    if None in values:
        return [value for value in values if value is not None]
    return cast(Sequence[bytes], values)
