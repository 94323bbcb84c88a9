"""Messages about schemas. `table.py` has the layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class SchemaWord:
    """Name of a type, with a u8 length in the original and a u16 length in other clients. `narrow`: the peer sent u8."""

    word: str
    narrow: bool = True


@dataclass(frozen=True, slots=True)
class RegisterSchema:
    name: str
    type: SchemaWord
    definition: bytes
    compatibility: str = ""
    """Only in Headrace: compatibility of this and later versions. Empty: unchanged."""


@dataclass(frozen=True, slots=True)
class GetSchema:
    name: str
    version: int = 0
    """0: the latest."""


@dataclass(frozen=True, slots=True)
class ListSchemas:
    name: str = ""
    """Empty: all."""


@dataclass(frozen=True, slots=True)
class ValidateSchema:
    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ProduceWithSchema:
    topic: str
    schema: str
    value: bytes
    key: bytes = b""
    partition: int = -1
    other: ProduceWithSchema | None = field(default=None, compare=False)
    """The request in the other order of fields, if the bytes fit both. The one whose schema exists is used."""


@dataclass(frozen=True, slots=True)
class DeleteSchema:
    name: str
    version: int = 0
    """0: all."""


@dataclass(frozen=True, slots=True)
class SchemaEntry:
    name: str
    """In the reply to LIST_SCHEMAS: the id, NAME-vVERSION."""
    type: str
    version: int


@dataclass(frozen=True, slots=True)
class SchemaEntries:
    schemas: list[SchemaEntry]


@dataclass(frozen=True, slots=True)
class SchemaReply:
    """One entry, as a list, followed by the fields that the original's clients ignore."""

    entries: list[SchemaEntry]
    id: str = ""
    definition: bytes = b""
    compatibility: str = ""
    created: int = 0
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Validated:
    valid: bool
    errors: list[str]


SchemaRequest: TypeAlias = RegisterSchema | GetSchema | ListSchemas | ValidateSchema | ProduceWithSchema | DeleteSchema
SchemaReplies: TypeAlias = SchemaEntry | SchemaEntries | SchemaReply | Validated
