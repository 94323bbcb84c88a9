"""FlyMQ calls for schemas.

await client.register_schema("order", "json", b'{"type": "object"}')
await client.require_schema("orders", "order", on_invalid="dead_letter")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.clients.messages import Receipt
from headrace.errors import WireError
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq import schema_messages as s

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """One version of a schema. `created` is in Unix seconds."""

    name: str
    type: str
    version: int
    definition: bytes = b""
    compatibility: str = ""
    created: int = 0


class SchemaCalls(ABC):
    """Schema calls of `FlyMqClient`."""

    @abstractmethod
    async def _request(self, request: m.Request, answer: type[_Answer]) -> _Answer: ...

    @abstractmethod
    async def call(self, operation: str, **arguments: object) -> Any: ...

    async def register_schema(self, name: str, type: str, definition: bytes, *, compatibility: str = "") -> int:
        """Register a definition and return its version. Raises `IncompatibleSchema`, and `Refused` if the definition is invalid."""
        request = s.RegisterSchema(name, s.SchemaWord(type), definition, compatibility)
        return (await self._request(request, s.SchemaEntry)).version

    async def schema(self, name: str, version: int = 0) -> RegisteredSchema:
        """Return a version of a schema; 0 is the latest. Raises `UnknownSchema`."""
        reply = await self._request(s.GetSchema(name, version), s.SchemaReply)
        if not reply.entries:
            raise WireError("the reply to GET_SCHEMA contains no schema")
        entry = reply.entries[0]
        return RegisteredSchema(entry.name, entry.type, entry.version, reply.definition, reply.compatibility, reply.created)

    async def schemas(self, name: str = "") -> list[RegisteredSchema]:
        """Return all versions of one schema or of all, without definitions."""
        reply = await self._request(s.ListSchemas(name), s.SchemaEntries)
        return [RegisteredSchema(entry.name.removesuffix(f"-v{entry.version}"), entry.type, entry.version) for entry in reply.schemas]

    async def validate(self, name: str, value: bytes) -> list[str]:
        """Return the faults of a value; empty if it is valid. Raises `UnknownSchema`."""
        reply = await self._request(s.ValidateSchema(name, value), s.Validated)
        return reply.errors or ([] if reply.valid else ["the value is invalid"])

    async def publish_with_schema(
        self, topic: str, value: bytes, *, schema: str, key: bytes | None = None, partition: int | None = None
    ) -> Receipt:
        """Publish a value if it is valid. Raises `InvalidRecord`, `UnknownSchema`."""
        request = s.ProduceWithSchema(topic, schema, value, key or b"", m.AUTO if partition is None else partition)
        placed = await self._request(request, v.Placed)
        return Receipt(placed.topic, placed.partition, placed.offset, placed.timestamp)

    async def delete_schema(self, name: str, version: int = 0) -> None:
        """Delete one version, or all with 0. Raises `UnknownSchema`, and `Refused` while a topic requires it."""
        await self._request(s.DeleteSchema(name, version), m.Done)

    async def require_schema(self, topic: str, name: str, *, version: int = 0, on_invalid: str = "reject") -> None:
        """Validate every new record of the topic. Invalid records are rejected, or dead-lettered with `on_invalid="dead_letter"`."""
        await self.call("schema.require", topic=topic, name=name, version=version, on_invalid=on_invalid)

    async def release_schema(self, topic: str) -> None:
        """Remove the schema requirement of the topic."""
        await self.call("schema.release", topic=topic)
