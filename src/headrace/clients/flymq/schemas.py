"""What a FlyMQ client can ask about schemas.

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
    """A base of `FlyMqClient`."""

    @abstractmethod
    async def _ask(self, request: m.Request, answer: type[_Answer]) -> _Answer: ...

    @abstractmethod
    async def call(self, verb: str, **arguments: object) -> Any: ...

    async def register_schema(self, name: str, type: str, definition: bytes, *, compatibility: str = "") -> int:
        """The version this definition has now. Raises `IncompatibleSchema`, and `Refused` with what is wrong with the definition."""
        request = s.RegisterSchema(name, s.SchemaWord(type), definition, compatibility)
        return (await self._ask(request, s.SchemaEntry)).version

    async def schema(self, name: str, version: int = 0) -> RegisteredSchema:
        """Version 0 is the latest. Raises `UnknownSchema`."""
        reply = await self._ask(s.GetSchema(name, version), s.SchemaReply)
        if not reply.entries:
            raise WireError("GET_SCHEMA was answered without a schema")
        entry = reply.entries[0]
        return RegisteredSchema(entry.name, entry.type, entry.version, reply.definition, reply.compatibility, reply.created)

    async def schemas(self, name: str = "") -> list[RegisteredSchema]:
        """Every version there is, of one schema or of all, without their definitions."""
        reply = await self._ask(s.ListSchemas(name), s.SchemaEntries)
        return [RegisteredSchema(entry.name.removesuffix(f"-v{entry.version}"), entry.type, entry.version) for entry in reply.schemas]

    async def validate(self, name: str, value: bytes) -> list[str]:
        """What is wrong with a value; empty if it fits. Raises `UnknownSchema`."""
        reply = await self._ask(s.ValidateSchema(name, value), s.Validated)
        return reply.errors or ([] if reply.valid else ["the value does not fit"])

    async def publish_with_schema(
        self, topic: str, value: bytes, *, schema: str, key: bytes | None = None, partition: int | None = None
    ) -> Receipt:
        """Publish if the value fits. Raises `InvalidRecord`, `UnknownSchema`."""
        request = s.ProduceWithSchema(topic, schema, value, key or b"", m.AUTO if partition is None else partition)
        placed = await self._ask(request, v.Placed)
        return Receipt(placed.topic, placed.partition, placed.offset, placed.timestamp)

    async def delete_schema(self, name: str, version: int = 0) -> None:
        """One version or (0) all. Raises `UnknownSchema`, and `Refused` while a topic requires it."""
        await self._ask(s.DeleteSchema(name, version), m.Done)

    async def require_schema(self, topic: str, name: str, *, version: int = 0, on_invalid: str = "reject") -> None:
        """Every record of the topic must fit from now on; what does not is refused, or kept among the dead letters (`dead_letter`)."""
        await self.call("schema.require", topic=topic, name=name, version=version, on_invalid=on_invalid)

    async def release_schema(self, topic: str) -> None:
        """The topic requires nothing any more."""
        await self.call("schema.release", topic=topic)
