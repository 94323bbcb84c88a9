"""User topics: name checks, hidden internal topics, one change per name at a time.

Names that users choose: topics, groups, producers, transactions.

A name is never used as a path, so nearly everything is allowed. A topic name must not contain what people cannot distinguish or type:
text that is not in Unicode normal form C, control characters, white space. The other names are mostly chosen by programs; only control
characters are rejected.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Final

from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Engine, Topic, TopicConfig
from headrace.errors import InvalidRequest, InvalidTopicName, TopicExists, UnknownPartition, UnknownTopic
from headrace.limits import GROUP_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

INTERNAL_PREFIX: Final = "__"
"""Prefix of internal topics, which hold the broker's tables."""
LISTED_A_TURN: Final = 200
"""Partitions listed in one turn of the event loop: about a millisecond."""
_CONTROLS: Final = frozenset(("Cc", "Cs"))
_SPACES: Final = frozenset(("Zs", "Zl", "Zp"))


def check_topic_name(name: str) -> None:
    """Raises `InvalidTopicName`."""
    fault = _fault(name, TOPIC_NAME_BYTES_MAX)
    if fault is None and not _SPACES.isdisjoint(map(unicodedata.category, name)):
        fault = "contains white space"
    if fault is None and not unicodedata.is_normalized("NFC", name):
        fault = "is not in Unicode normal form C"
    if fault is None and name in (".", ".."):
        fault = "is reserved"
    if fault is None and name.startswith(INTERNAL_PREFIX):
        fault = f"starts with {INTERNAL_PREFIX!r}, which is reserved for internal topics"
    if fault is not None:
        raise InvalidTopicName(f"topic name {name[:80]!r} {fault}")


def check_name(kind: str, name: str) -> None:
    """Check the name of a group, producer or transaction. Raises `InvalidRequest`."""
    fault = _fault(name, GROUP_NAME_BYTES_MAX)
    if fault is not None:
        raise InvalidRequest(f"{kind} name {name[:80]!r} {fault}")


def _fault(name: str, bytes_max: int) -> str | None:
    """Return the fault of a name as the end of a sentence: 'the name …'."""
    if not name:
        return "is empty"
    if not _CONTROLS.isdisjoint(map(unicodedata.category, name)):
        return "contains a control character or half a surrogate pair"
    if len(name.encode()) > bytes_max:
        return f"is longer than {bytes_max} bytes"
    return None


_NUMBER_MAX: Final = 1 << 53
"""Maximum of times and sizes: above any clock and disk, and exact in every JSON parser."""


class Topics:
    """`changed` is called after a topic is created or altered, `gone` after it is deleted, to remove other data under its name."""

    def __init__(
        self, engine: Engine, settings: BrokerSettings, *, changed: Callable[[str], None], gone: Callable[[str], Awaitable[None]]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._changed = changed
        self._gone = gone
        self._changes: dict[str, asyncio.Future[None]] = {}
        self._unpurged: set[str] = set()
        """Deleted topics for which removing the other data under the name failed."""

    def visible(self) -> list[Topic]:
        return sorted((topic for topic in self._engine.topics().values() if not topic.internal), key=attrgetter("name"))

    def slices(self) -> list[list[str]]:
        """Return the names of `visible` in slices of about `LISTED_A_TURN` partitions."""
        found: list[list[str]] = []
        room = 0
        for topic in self.visible():
            if room <= 0:
                found.append([])
                room = LISTED_A_TURN
            found[-1].append(topic.name)
            room -= topic.partitions
        return found

    def find(self, name: str) -> Topic:
        """Return a topic. Raises `UnknownTopic`, also for an internal topic."""
        topic = self._engine.topics().get(name)
        if topic is None or topic.internal:
            raise UnknownTopic(name)
        return topic

    def find_partition(self, name: str, partition: int) -> Topic:
        """Return the topic of a partition. Raises `UnknownTopic`, `UnknownPartition`."""
        topic = self.find(name)
        if not 0 <= partition < topic.partitions:
            raise UnknownPartition(name, partition)
        return topic

    async def create(self, name: str, partitions: int, config: TopicConfig | None) -> Topic:
        check_topic_name(name)
        if partitions < 1:
            raise InvalidRequest(f"a topic needs at least one partition, got {partitions}")
        _check_config(config)
        async with self._locked(name):
            return await self._create(name, partitions, config)

    @property
    def defaults(self) -> TopicConfig:
        return self._settings.topic_defaults

    async def ensure(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        """Return or create a topic. Of concurrent calls, one creates it."""
        check_topic_name(name)
        async with self._locked(name):
            if name in self._engine.topics():
                return self.find(name)
            try:
                return await self._create(name, partitions or self._settings.auto_create_partitions, config)
            except TopicExists:  # another broker on the same log was faster
                return self.find(name)

    async def alter(self, name: str, partitions: int | None, config: TopicConfig | None) -> Topic:
        _check_config(config)
        async with self._locked(name):
            topic = self.find(name)
            if partitions is not None and partitions < topic.partitions:
                raise InvalidRequest(f"topic {name!r} has {topic.partitions} partitions; partitions cannot be removed")
            topic = await self._engine.alter_topic(name, partitions=partitions, config=config)
            self._changed(name)
            return topic

    async def delete(self, name: str) -> None:
        """Delete a topic. Its name stays taken until all data under it is removed, so that a new topic inherits nothing."""
        async with self._locked(name):
            self.find(name)
            await self._engine.delete_topic(name)
            self._unpurged.add(name)
            await self._purge(name)

    async def purge(self, name: str) -> None:
        """Remove all data under the name of a topic that was deleted elsewhere."""
        async with self._locked(name):
            if name not in self._engine.topics():
                self._unpurged.add(name)
                await self._purge(name)

    async def _purge(self, name: str) -> None:
        await self._gone(name)
        self._unpurged.discard(name)

    async def _create(self, name: str, partitions: int, config: TopicConfig | None) -> Topic:
        if name in self._unpurged:
            await self._purge(name)
        topic = await self._engine.create_topic(name, partitions, self._settings.topic_defaults if config is None else config)
        self._changed(name)
        return topic

    @asynccontextmanager
    async def _locked(self, name: str) -> AsyncIterator[None]:
        while (change := self._changes.get(name)) is not None:
            await asyncio.wait([change])
        change = self._changes[name] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._changes[name]
            change.set_result(None)


def _check_config(config: TopicConfig | None) -> None:
    if config is None:
        return
    for name in ("retention_ms", "retention_bytes", "tombstone_retention_ms", "ttl_ms"):
        if not 0 <= getattr(config, name) <= _NUMBER_MAX:
            raise InvalidRequest(f"{name} cannot be {getattr(config, name)}")
    if not 0 < config.segment_bytes <= _NUMBER_MAX:
        raise InvalidRequest(f"segment_bytes cannot be {config.segment_bytes}")
