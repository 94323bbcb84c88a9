"""What FlyMQ peers say about schemas; `schemas.py` gives the layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class SchemaWord:
    """The name of a type, whose length the original gives as u8 and others as u16. `narrow` is what the peer wrote."""

    word: str
    narrow: bool = True


@dataclass(frozen=True, slots=True)
class RegisterSchema:
    name: str
    type: SchemaWord
    definition: bytes
    compatibility: str = ""
    """Headrace's own: what this and later versions must keep to. Empty: as it was."""


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
    """What the same bytes mean in the other order of fields, where they fit both: the one whose schema exists is meant."""


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
    """One entry, as a list; then, behind what the original's clients read, all the rest."""

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
