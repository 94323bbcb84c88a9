"""The registry: schemas by name, each with its versions, and the topics that require one.

There are two tables. `__schemas` holds a row for each version. Its version 0 holds what applies to the name as a whole: the
compatibility mode, and the highest version number, so that a number is never reused. `__schema_rules` holds each topic's requirement. A
definition is compiled once, on first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from headrace.broker.publishing.requirements import CreateDeadLetterTopic, Letters, OnInvalid, Rule
from headrace.broker.schema_checks import SchemaChecks, settled
from headrace.broker.settings import Clock
from headrace.broker.tables import Table, TableFollower
from headrace.broker.topics import check_name
from headrace.engine.contract import Engine
from headrace.errors import IncompatibleSchema, InvalidRequest, InvalidSchema, LimitExceeded, UnknownSchema
from headrace.limits import SCHEMA_VERSIONS_MAX, SCHEMAS_MAX
from headrace.schemas import Compatibility, Schema, SchemaType, check_size, compile_schema, conflicts


class _Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version, or (version 0) what applies to all versions."""

    type: str = ""
    text: str = ""
    """The definition, if it is text."""
    binary: bytes = b""
    """The definition, if it is not text."""
    created: int = 0
    compatibility: str = ""
    highest: int = 0


class _RuleRow(msgspec.Struct, frozen=True, omit_defaults=True):
    schema: str
    version: int = 0
    on_invalid: str = "reject"


class SchemaVersion(msgspec.Struct, frozen=True):
    """One registered version of a schema."""

    name: str
    version: int
    type: SchemaType
    definition: bytes
    compatibility: Compatibility
    """Compatibility that the next version must keep."""
    created: int
    """Unix ms."""

    @property
    def id(self) -> str:
        return f"{self.name}-v{self.version}"


class Requirement(msgspec.Struct, frozen=True):
    """Schema that a topic requires. Version 0: always the latest."""

    topic: str
    schema: str
    version: int = 0
    on_invalid: OnInvalid = OnInvalid.REJECT


class SchemaRegistry:
    """`changed` is called with the name of each topic whose rule has changed."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        changed: Callable[[str], None],
        letters: Letters,
        create_dead_letter_topic: CreateDeadLetterTopic,
    ) -> None:
        self._engine = engine
        self._versions = Table(engine, "__schemas", tuple[str, int], _Row)
        self._rules = Table(engine, "__schema_rules", tuple[str], _RuleRow)
        self._clock = clock
        self._changed = changed
        self._letters, self._create_dead_letter_topic = letters, create_dead_letter_topic
        self.checks = SchemaChecks()
        self._compiled: dict[tuple[str, int], Schema] = {}
        self._by_name: dict[str, list[int]] = {}
        """The existing versions, in order."""
        self._ruled: set[str] = set()
        """Topics with a requirement, when the tables were read last."""
        self._lock = asyncio.Lock()
        """Serializes changes: a version is compared with its predecessor and must directly follow it."""

    async def open(self) -> None:
        """Load the tables, or what is new in them."""
        await self._versions.load()
        await self._rules.load()
        self._changed_elsewhere()

    def follower(self) -> TableFollower:
        """Return what keeps the registry current while another process writes it."""
        return TableFollower(self._engine, [self._versions, self._rules], self._changed_elsewhere)

    def _changed_elsewhere(self) -> None:
        before, self._ruled = self._ruled, {topic for (topic,) in self._rules.rows}
        self._index()
        for topic in before | self._ruled:
            self._changed(topic)

    def _index(self) -> None:
        self._compiled = {key: schema for key, schema in self._compiled.items() if key in self._versions.rows}
        self._by_name = {}
        for name, version in sorted(self._versions.rows):
            if version:
                self._by_name.setdefault(name, []).append(version)

    # Lookup

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def versions(self, name: str) -> list[SchemaVersion]:
        return [self.find(name, version) for version in self._by_name.get(name, ())]

    def find(self, name: str, version: int = 0) -> SchemaVersion:
        """Return a version; 0 is the latest. Raises `UnknownSchema`."""
        number = self._number(name, version)
        row = self._versions.rows[name, number]
        definition = row.binary or row.text.encode()
        return SchemaVersion(name, number, SchemaType(row.type), definition, self.compatibility(name), row.created)

    def compatibility(self, name: str) -> Compatibility:
        row = self._versions.rows.get((name, 0))
        return Compatibility(row.compatibility) if row is not None and row.compatibility else Compatibility.BACKWARD

    def schema(self, name: str, version: int = 0) -> Schema:
        """Return the compiled schema. Raises `UnknownSchema`, and `InvalidSchema` if the library for its type is missing."""
        key = (name, self._number(name, version))
        known = self._compiled.get(key)
        if known is None:
            found = self.find(*key)
            known = self._compiled[key] = compile_schema(found.type, found.definition)
        return known

    def _number(self, name: str, version: int) -> int:
        known = self._by_name.get(name)
        if not known or (version and version not in known):
            raise UnknownSchema(name, version)
        return version or known[-1]

    def conflicts(self, name: str, type: SchemaType, definition: bytes, mode: Compatibility | None = None) -> list[str]:
        """Return why this cannot be the next version; empty if it can. Raises `InvalidSchema`, `SchemaCheckPending`."""
        old = self.schema(name) if name in self._by_name else None
        mode = mode or self.compatibility(name)
        check_size(definition)
        found = self.checks.conflicts(old, type, definition, mode)
        if found is not None:
            return found
        new = compile_schema(type, definition)
        return [] if old is None else conflicts(old, new, mode)

    # Changes

    async def register(self, name: str, type: SchemaType, definition: bytes, mode: Compatibility | None) -> SchemaVersion:
        """Return the version with this definition: a new one, or the existing one. `mode` applies to this and later versions; None keeps
        the current one. Raises `InvalidSchema`, `IncompatibleSchema`, `LimitExceeded`."""
        check_name("schema", name)
        async with self._lock:
            kept = mode or self.compatibility(name)
            found = await self._large_conflicts(name, type, definition, kept)
            new = compile_schema(type, definition)
            known = next((one for one in reversed(self.versions(name)) if (one.type, one.definition) == (type, definition)), None)
            if known is not None:
                if kept is not self.compatibility(name):
                    await self._put_head(name, kept)
                return self.find(name, known.version)
            self._check_follows(name, new, kept, found)
            return await self._add(name, new, definition, kept)

    async def _large_conflicts(self, name: str, type: SchemaType, definition: bytes, mode: Compatibility) -> list[str] | None:
        """Check a large definition in the worker process; None if it is not large. Raises `InvalidSchema`, `Unavailable`."""
        check_size(definition)
        old = self.schema(name) if name in self._by_name else None
        return await settled(lambda: self.checks.conflicts(old, type, definition, mode))

    def _check_follows(self, name: str, new: Schema, mode: Compatibility, found: list[str] | None) -> None:
        versions = self._by_name.get(name, [])
        if len(versions) >= SCHEMA_VERSIONS_MAX:
            raise LimitExceeded(f"schema {name!r} has {SCHEMA_VERSIONS_MAX} versions already")
        if sum(map(len, self._by_name.values())) >= SCHEMAS_MAX:
            raise LimitExceeded(f"there are {SCHEMAS_MAX} versions of schemas already")
        if versions:
            found = conflicts(self.schema(name), new, mode) if found is None else found
            if found:
                raise IncompatibleSchema(name, versions[-1], tuple(found))

    async def _add(self, name: str, new: Schema, definition: bytes, mode: Compatibility) -> SchemaVersion:
        head = self._versions.rows.get((name, 0), _Row())
        version = head.highest + 1
        try:
            row = _Row(new.type, definition.decode(), created=self._clock())
        except UnicodeDecodeError:
            row = _Row(new.type, binary=definition, created=self._clock())
        await self._versions.put([((name, version), row), ((name, 0), _Row(compatibility=mode, highest=version))])
        self._compiled[name, version] = new
        self._by_name.setdefault(name, []).append(version)
        self._tell(name)
        return self.find(name, version)

    async def _put_head(self, name: str, mode: Compatibility) -> None:
        head = self._versions.rows.get((name, 0), _Row())
        await self._versions.put([((name, 0), _Row(compatibility=mode, highest=head.highest))])

    async def set_compatibility(self, name: str, mode: Compatibility) -> None:
        """Raises `UnknownSchema`."""
        async with self._lock:
            self._number(name, 0)
            await self._put_head(name, mode)

    async def delete(self, name: str, version: int, may_name: Callable[[str], bool] = lambda topic: True) -> int:
        """Delete one version or (0) all; return how many. Raises `UnknownSchema`, and `InvalidRequest` while a topic requires it.
        The error names the topic if `may_name` allows it."""
        async with self._lock:
            self._number(name, version)
            doomed = [version] if version else list(self._by_name[name])
            left = [one for one in self._by_name[name] if one not in doomed]
            for (topic,), rule in self._rules.rows.items():
                if rule.schema == name and (rule.version in doomed or not left):
                    what = f"topic {topic!r}" if may_name(topic) else "a topic"
                    raise InvalidRequest(f"{what} requires schema {name!r}" + (f" v{rule.version}" if rule.version else ""))
            await self._versions.put([((name, one), None) for one in doomed])
            for one in doomed:
                self._compiled.pop((name, one), None)
            self._by_name[name] = left
            if not left:
                del self._by_name[name]
            self._tell(name)
            return len(doomed)

    def _tell(self, name: str) -> None:
        for (topic,), rule in self._rules.rows.items():
            if rule.schema == name:
                self._changed(topic)

    # Topics

    def requirement(self, topic: str) -> Requirement | None:
        row = self._rules.rows.get((topic,))
        return None if row is None else Requirement(topic, row.schema, row.version, OnInvalid(row.on_invalid))

    def requirements(self) -> list[Requirement]:
        return [wanted for (topic,) in sorted(self._rules.rows) if (wanted := self.requirement(topic)) is not None]

    async def require(self, wanted: Requirement) -> None:
        """Raises `UnknownSchema`, `InvalidSchema`."""
        async with self._lock:
            self.schema(wanted.schema, wanted.version)
            await self._rules.put([((wanted.topic,), _RuleRow(wanted.schema, wanted.version, wanted.on_invalid))])
            self._changed(wanted.topic)

    async def release(self, topic: str) -> None:
        """Remove the topic's requirement."""
        async with self._lock:
            if (topic,) in self._rules.rows:
                await self._rules.put([((topic,), None)])
                self._changed(topic)

    def rule(self, topic: str) -> Rule | None:
        """Return the rule for the publisher, if the topic has a requirement."""
        wanted = self.requirement(topic)
        if wanted is None:
            return None
        schema: Schema | str
        try:
            schema = self.schema(wanted.schema, wanted.version)
            label = f"{wanted.schema}-v{self._number(wanted.schema, wanted.version)}"
        except (InvalidSchema, UnknownSchema) as error:
            schema, label = str(error), wanted.schema
        return Rule(topic, schema, label, wanted.on_invalid, self._letters, self._create_dead_letter_topic, self.checks)
