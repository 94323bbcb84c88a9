"""Committed offsets of groups, in the table `__offsets`.

A committed offset is the next offset to read. It is the same number through every protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.broker.settings import Clock
from headrace.broker.tables import TableLog
from headrace.broker.topics import check_name
from headrace.engine.contract import Engine
from headrace.errors import InvalidRequest, LimitExceeded

_Key: TypeAlias = tuple[str, str, int]
"""Group, topic, partition."""
_Row: TypeAlias = tuple[int, int]
"""The offset, and the Unix ms of the commit."""
Place: TypeAlias = tuple[str, int]
"""Topic, partition."""
Commits: TypeAlias = list[tuple[_Key, _Row | None]]

_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Lag of a group in one partition."""

    topic: str
    partition: int
    committed: int
    end: int
    lag: int


class Groups(TableLog[_Key, _Row]):
    """The committed offsets, by group."""

    def __init__(self, engine: Engine, *, clock: Clock, groups_max: int) -> None:
        super().__init__(engine, "__offsets", _Key, _Row)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._clock = clock
        self._groups_max = groups_max
        self._offsets: dict[str, dict[Place, int]] = {}

    def show(self, key: _Key, value: _Row | None) -> None:
        group, topic, partition = key
        if value is not None:
            self._offsets.setdefault(group, {})[topic, partition] = value[0]
            return
        offsets = self._offsets.get(group, {})
        offsets.pop((topic, partition), None)
        if not offsets:
            self._offsets.pop(group, None)

    async def open(self, exists: Callable[[str], bool]) -> None:
        """Load the table. Remove offsets of topics that no longer exist, left by a crash during a deletion."""
        await self.load()
        await self.put(self._tombstones(lambda place: not exists(place[0])))

    def names(self) -> list[str]:
        return sorted(self._offsets)

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        return self._offsets.get(group, {}).get((topic, partition))

    def has_read(self, group: str, topic: str) -> bool:
        """Return whether the group has committed an offset in the topic."""
        return any(known == topic for known, _ in self._offsets.get(group, {}))

    def commits(self, group: str, offsets: Mapping[Place, int]) -> Commits:
        """Check a commit and return its rows. Raises `InvalidRequest`, `LimitExceeded`."""
        check_name("group", group)
        for offset in offsets.values():
            if not 0 <= offset <= _OFFSET_MAX:
                raise InvalidRequest(f"offset {offset} cannot be committed")
        if group not in self._offsets and len(self._offsets) >= self._groups_max:
            raise LimitExceeded(f"there are {self._groups_max} groups already")
        now = self._clock()
        return [((group, topic, partition), (offset, now)) for (topic, partition), offset in offsets.items()]

    def lag(self, group: str) -> list[GroupLag]:
        found = []
        for (topic, partition), committed in sorted(self._offsets.get(group, {}).items()):
            if topic not in self._engine.topics():
                continue  # deleted a moment ago: its offsets are about to be removed
            end = self._engine.bounds(topic, partition).end
            found.append(GroupLag(topic, partition, committed, end, max(0, end - committed)))
        return found

    async def delete(self, group: str, topic: str | None = None) -> None:
        await self.settled()
        await self.put([((group, *place), None) for place in self._offsets.get(group, {}) if topic in (None, place[0])])

    async def topic_gone(self, topic: str) -> None:
        """Forget the offsets of all groups in the topic, including commits in flight."""
        await self.settled()
        await self.put(self._tombstones(lambda place: place[0] == topic))

    def _tombstones(self, doomed: Callable[[Place], bool]) -> Commits:
        return [((group, *place), None) for group, offsets in self._offsets.items() for place in offsets if doomed(place)]
