"""Schema requests of FlyMQ: the six opcodes of the original, and operations of BROKER for the rest.

| operation of BROKER | arguments | result |
|---|---|---|
| schema.list | | [{name, version, type, compatibility, created}], the latest version of each |
| schema.describe | name, version | {name, version, versions, type, compatibility, created, definition, topics} |
| schema.check | name, type, definition, compatibility | {conflicts: [text]} |
| schema.compatibility | name, compatibility | {} |
| schema.require | topic, name, version, on_invalid | {topic, schema, version, on_invalid} |
| schema.release | topic | {} |
| schema.requirement | topic | {topic, schema, version, on_invalid} or null |

A definition is text. A binary one (a serialized FileDescriptorSet) is passed in base64, as `binary`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from headrace.broker import (
    Broker,
    Compatibility,
    OnInvalid,
    Principal,
    Requirement,
    SchemaType,
    SchemaVersion,
    settled,
    type_named,
)
from headrace.errors import InvalidRequest, RecordTooLarge, UnknownSchema
from headrace.records import RecordBatch
from headrace.sessions.flymq.staging import RECORD_BYTES_MAX
from headrace.wire.flymq.advanced_messages import Placed
from headrace.wire.flymq.messages import AUTO, Done, Reply
from headrace.wire.flymq.schema_messages import (
    DeleteSchema,
    GetSchema,
    ListSchemas,
    ProduceWithSchema,
    RegisterSchema,
    SchemaEntries,
    SchemaEntry,
    SchemaReply,
    Validated,
    ValidateSchema,
)

_VERSION_MAX: Final = (1 << 32) - 1


def _mode(word: str) -> Compatibility | None:
    try:
        return Compatibility(word) if word else None
    except ValueError:
        raise InvalidRequest(f"unknown compatibility: {word[:40]}") from None


class SchemaHandlers:
    """Handlers of schema requests. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker = broker
        self._schemas = broker.schemas
        self._who = who

    async def register(self, request: RegisterSchema) -> Reply:
        made = await self._schemas.register(
            self._who(), request.name, type_named(request.type.word), request.definition, compatibility=_mode(request.compatibility)
        )
        return SchemaEntry(made.name, made.type, made.version)

    async def get(self, request: GetSchema) -> Reply:
        found = self._schemas.find(self._who(), request.name, request.version)
        entry = SchemaEntry(found.name, found.type, found.version)
        return SchemaReply([entry], found.id, found.definition, found.compatibility, found.created // 1000)

    async def list(self, request: ListSchemas) -> Reply:
        found = self._schemas.versions(self._who(), request.name or None)
        return SchemaEntries([SchemaEntry(one.id, one.type, one.version) for one in found])

    async def validate(self, request: ValidateSchema) -> Reply:
        faults = await settled(lambda: self._schemas.faults(self._who(), request.name, request.value))
        return Validated(not faults, faults)

    async def produce(self, request: ProduceWithSchema) -> Reply:
        who = self._who()
        request = self._meant(request)
        if len(request.key) + len(request.value) > RECORD_BYTES_MAX:
            raise RecordTooLarge(size_bytes=len(request.key) + len(request.value), bytes_max=RECORD_BYTES_MAX)
        await settled(lambda: self._schemas.check(who, request.schema, request.value))
        await self._broker.prepare(who, request.topic, [request.value])
        batch = RecordBatch([request.value], [request.key] if request.key else None)
        partition = None if request.partition == AUTO else request.partition
        at = await self._broker.publish(who, request.topic, batch, partition=partition)
        return Placed(request.topic, at.partition, at.base_offset, at.timestamp, len(request.key) or AUTO, len(request.value))

    def _meant(self, request: ProduceWithSchema) -> ProduceWithSchema:
        if request.other is None:
            return request
        try:
            self._schemas.find(self._who(), request.schema)
        except UnknownSchema:
            return request.other
        return request

    async def delete(self, request: DeleteSchema) -> Reply:
        count = await self._schemas.delete(self._who(), request.name, request.version)
        return Done(True, "schema deleted" if count == 1 else f"{count} versions deleted")


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Nothing(_Arguments):
    pass


class _Named(_Arguments):
    name: str
    version: int = 0


class _Defined(_Arguments):
    name: str
    type: str
    definition: str = ""
    binary: bytes = b""
    compatibility: str = ""


class _Moded(_Arguments):
    name: str
    compatibility: str


class _Required(_Arguments):
    topic: str
    name: str
    version: int = 0
    on_invalid: OnInvalid = OnInvalid.REJECT


class _OfTopic(_Arguments):
    topic: str


class SchemaCalls:
    """Return the operations of BROKER."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._schemas = broker.schemas
        self._who = who
        self.operations: dict[str, tuple[type[Any], Callable[[Any], Awaitable[object]]]] = {
            "schema.list": (_Nothing, self._list),
            "schema.describe": (_Named, self._describe),
            "schema.check": (_Defined, self._check),
            "schema.compatibility": (_Moded, self._set_compatibility),
            "schema.require": (_Required, self._require),
            "schema.release": (_OfTopic, self._release),
            "schema.requirement": (_OfTopic, self._requirement),
        }

    async def _list(self, arguments: _Nothing) -> object:
        latest = {one.name: one for one in self._schemas.versions(self._who())}
        return [_shown(one) for one in latest.values()]

    async def _describe(self, arguments: _Named) -> object:
        found = self._schemas.find(self._who(), arguments.name, arguments.version)
        try:
            definition = {"definition": found.definition.decode()}
        except UnicodeDecodeError:
            definition = {"binary": msgspec.to_builtins(found.definition)}
        return {
            **_shown(found),
            "versions": [one.version for one in self._schemas.versions(self._who(), found.name)],
            "topics": [wanted.topic for wanted in self._schemas.requirements(self._who()) if wanted.schema == found.name],
            **definition,
        }

    async def _check(self, arguments: _Defined) -> object:
        definition = arguments.binary or arguments.definition.encode()
        mode = _mode(arguments.compatibility)
        type: SchemaType = type_named(arguments.type)
        return {
            "conflicts": await settled(lambda: self._schemas.conflicts(self._who(), arguments.name, type, definition, compatibility=mode))
        }

    async def _set_compatibility(self, arguments: _Moded) -> object:
        mode = _mode(arguments.compatibility)
        if mode is None:
            raise InvalidRequest("the compatibility is missing")
        await self._schemas.set_compatibility(self._who(), arguments.name, mode)
        return {}

    async def _require(self, arguments: _Required) -> object:
        if not 0 <= arguments.version <= _VERSION_MAX:
            raise UnknownSchema(arguments.name, arguments.version)
        made = await self._schemas.require(
            self._who(), arguments.topic, arguments.name, version=arguments.version, on_invalid=arguments.on_invalid
        )
        return _required(made)

    async def _release(self, arguments: _OfTopic) -> object:
        await self._schemas.release(self._who(), arguments.topic)
        return {}

    async def _requirement(self, arguments: _OfTopic) -> object:
        found = self._schemas.requirement(self._who(), arguments.topic)
        return None if found is None else _required(found)


def _shown(found: SchemaVersion) -> dict[str, object]:
    return {
        "name": found.name,
        "version": found.version,
        "type": found.type,
        "compatibility": found.compatibility,
        "created": found.created,
    }


def _required(wanted: Requirement) -> dict[str, object]:
    return {"topic": wanted.topic, "schema": wanted.schema, "version": wanted.version, "on_invalid": wanted.on_invalid}
