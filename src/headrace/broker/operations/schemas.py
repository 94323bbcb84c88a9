"""Schema operations (`broker.schemas`): each method checks the permission, then calls the registry.

A schema is a resource of kind "schema". DESCRIBE allows reading it and checking values, CREATE registering, ALTER changing its
compatibility, DELETE deleting. The requirement of a topic belongs to the topic: ALTER on the topic.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.broker.authorizer import Action, Authorizer, Principal
from headrace.broker.dead_letters.dead_letters import SUFFIX, DeadLetters
from headrace.broker.publishing.requirements import OnInvalid
from headrace.broker.schemas.registry import Requirement, SchemaRegistry, SchemaVersion
from headrace.broker.topics import Topics
from headrace.errors import InvalidRecord, InvalidRequest
from headrace.schemas import Compatibility, SchemaType

KIND = "schema"


class Schemas:
    """Call all methods on the event loop."""

    def __init__(
        self,
        registry: SchemaRegistry,
        authorizer: Authorizer,
        topics: Topics,
        dead_letters: DeadLetters,
        check_coordinator: Callable[[], None],
    ) -> None:
        """`check_coordinator` raises `NotCoordinator` if this broker may not change the registry."""
        self.check_coordinator = check_coordinator
        self._registry = registry
        self._authorizer = authorizer
        self._topics = topics
        self._dead_letters = dead_letters

    async def register(
        self, who: Principal, name: str, type: SchemaType, definition: bytes, *, compatibility: Compatibility | None = None
    ) -> SchemaVersion:
        """Register a definition and return its version: a new one, or the existing one with this definition. Durable when it returns.

        `compatibility` applies to this and later versions; None keeps the current one, initially backward. Raises `InvalidSchema`,
        `IncompatibleSchema`, `LimitExceeded`.
        """
        self.check_coordinator()
        self._authorizer.check(who, Action.CREATE, KIND, name)
        return await self._registry.register(name, type, definition, compatibility)

    def conflicts(
        self, who: Principal, name: str, type: SchemaType, definition: bytes, *, compatibility: Compatibility | None = None
    ) -> list[str]:
        """Return why the definition cannot be the next version, each reason with its location; empty if it can. Raises
        `InvalidSchema`, `SchemaCheckPending` for a large one."""
        self._authorizer.check(who, Action.DESCRIBE, KIND, name)
        return self._registry.conflicts(name, type, definition, compatibility)

    def find(self, who: Principal, name: str, version: int = 0) -> SchemaVersion:
        """Return a version; 0 is the latest. Raises `UnknownSchema`."""
        self._authorizer.check(who, Action.DESCRIBE, KIND, name)
        return self._registry.find(name, version)

    def versions(self, who: Principal, name: str | None = None) -> list[SchemaVersion]:
        """Return the versions of one schema or (None) of all that this principal may see, by name and number. Empty if there are none."""
        names = self._registry.names() if name is None else [name]
        seen = [one for one in names if self._authorizer.allows(who, Action.DESCRIBE, KIND, one)]
        return [version for one in seen for version in self._registry.versions(one)]

    def faults(self, who: Principal, name: str, value: bytes, version: int = 0) -> list[str]:
        """Return the faults of a value; empty if it is valid. Raises `UnknownSchema`, `SchemaCheckPending` for a large value."""
        self._authorizer.check(who, Action.DESCRIBE, KIND, name)
        schema, checks = self._registry.schema(name, version), self._registry.checks
        if checks.are_small(schema, [value]):
            return schema.faults(value)
        (found,) = checks.faults(schema, [value])
        checks.used(schema, [value])
        return found

    def check(self, who: Principal, name: str, value: bytes, version: int = 0) -> None:
        """Raises `InvalidRecord`, `UnknownSchema`, `SchemaCheckPending`."""
        faults = self.faults(who, name, value, version)
        if faults:
            raise InvalidRecord(index=0, faults=tuple(faults), schema=self._registry.find(name, version).id)

    async def set_compatibility(self, who: Principal, name: str, compatibility: Compatibility) -> None:
        """Set the compatibility of later versions. Raises `UnknownSchema`."""
        self.check_coordinator()
        self._authorizer.check(who, Action.ALTER, KIND, name)
        await self._registry.set_compatibility(name, compatibility)

    async def delete(self, who: Principal, name: str, version: int = 0) -> int:
        """Delete one version or (0) all; return how many. Their numbers are not reused. Raises `UnknownSchema`, and `InvalidRequest`
        while a topic requires one of them."""
        self.check_coordinator()
        self._authorizer.check(who, Action.DELETE, KIND, name)
        return await self._registry.delete(name, version, lambda topic: self._authorizer.allows_topic(who, topic))

    # Topics

    async def require(
        self, who: Principal, topic: str, name: str, *, version: int = 0, on_invalid: OnInvalid = OnInvalid.REJECT
    ) -> Requirement:
        """Require that every new record of the topic, through any protocol, satisfies the schema (version 0: its latest). Raises
        `UnknownTopic`, `UnknownSchema`, and `InvalidRequest` for a dead-letter topic, which must accept every record."""
        self.check_coordinator()
        self._authorizer.check(who, Action.ALTER, "topic", topic)
        self._authorizer.check(who, Action.DESCRIBE, KIND, name)
        self._topics.find(topic)
        if topic.endswith(SUFFIX):
            raise InvalidRequest(f"{topic!r} holds dead letters and cannot require a schema")
        if on_invalid is OnInvalid.DEAD_LETTER:
            await self._dead_letters.ensure(topic)
        wanted = Requirement(topic, name, version, on_invalid)
        await self._registry.require(wanted)
        return wanted

    async def release(self, who: Principal, topic: str) -> None:
        """Remove the topic's requirement."""
        self.check_coordinator()
        self._authorizer.check(who, Action.ALTER, "topic", topic)
        self._topics.find(topic)
        await self._registry.release(topic)

    def requirement(self, who: Principal, topic: str) -> Requirement | None:
        """Return the topic's requirement, if there is one."""
        self._authorizer.check(who, Action.DESCRIBE, "topic", topic)
        return self._registry.requirement(topic)

    def requirements(self, who: Principal) -> list[Requirement]:
        """Return the requirements of all topics that this principal may see, by topic."""
        return [one for one in self._registry.requirements() if self._authorizer.allows(who, Action.DESCRIBE, "topic", one.topic)]
