"""Committed offsets of groups, in the table `__offsets`.

A committed offset is the next offset to read. It is the same number through every protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.broker.settings import Clock
from headrace.broker.tables import Changes, TableLog
from headrace.broker.topics import check_name
from headrace.engine.contract import Appended, Commits, Engine, Write
from headrace.errors import InvalidRequest, LimitExceeded

_Key: TypeAlias = tuple[str, str, int]
"""Group, topic, partition."""
_Row: TypeAlias = tuple[int, int]
"""The offset, and the Unix ms of the commit."""
Place: TypeAlias = tuple[str, int]
"""Topic, partition."""

_OFFSET_MAX = (1 << 63) - 1
ROWS_A_TURN: Final = 500
"""Offsets of a deleted topic that are removed, or groups that are searched for them, in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Lag of a group in one partition."""

    topic: str
    partition: int
    committed: int | None
    """None: the group has not committed here, and the lag counts from the first offset."""
    end: int
    lag: int
    moved_at: int | None = None
    """Unix ms of the last commit."""


class Groups(TableLog[_Key, _Row]):
    """The committed offsets, by group."""

    def __init__(self, engine: Engine, *, clock: Clock, groups_max: int) -> None:
        super().__init__(engine, "__offsets", _Key, _Row)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._clock = clock
        self._groups_max = groups_max
        self._offsets: dict[str, dict[Place, _Row]] = {}
        self.changed: Callable[[str, str, int, int | None], None] = lambda group, topic, partition, offset: None
        """Called with each new offset; None: deleted."""

    def show(self, key: _Key, value: _Row | None) -> None:
        group, topic, partition = key
        if value is not None:
            self._offsets.setdefault(group, {})[topic, partition] = value
            self.changed(group, topic, partition, value[0])
            return
        self.changed(group, topic, partition, None)
        offsets = self._offsets.get(group, {})
        offsets.pop((topic, partition), None)
        if not offsets:
            self._offsets.pop(group, None)

    async def load(self) -> None:
        """Read the committed offsets, from the table or from the log's own store."""
        store = self._engine.offset_store
        if store is None:
            await super().load()
            return
        store.changed = self._changed_elsewhere
        self._changed_elsewhere(await store.load())

    def write(self, changes: Changes[_Key, _Row] | Callable[[Sequence[Appended]], Changes[_Key, _Row]]) -> Write:
        store = self._engine.offset_store
        if store is None:
            return super().write(changes)
        assert not callable(changes), "commits do not depend on positions"
        return store.write(list(changes))

    def _changed_elsewhere(self, commits: Commits) -> None:
        for key, row in commits:
            self.show(key, row)

    async def open(self, exists: Callable[[str], bool]) -> None:
        """Load the table. Remove offsets of topics that no longer exist, left by a crash during a deletion."""
        await self.load()
        await self.put(self._tombstones(lambda place: not exists(place[0])))

    def names(self) -> list[str]:
        return sorted(self._offsets)

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        row = self._offsets.get(group, {}).get((topic, partition))
        return None if row is None else row[0]

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

    def lag(self, group: str, topics: Iterable[str] = ()) -> list[GroupLag]:
        """Return the lag in every partition of the topics that the group has read, and of the given ones."""
        rows, known = self._offsets.get(group, {}), self._engine.topics()
        found = []
        # A topic that is missing was deleted a moment ago: its offsets are about to be removed.
        for topic in sorted({*topics, *(topic for topic, _ in rows)} & known.keys()):
            for partition in range(known[topic].partitions):
                bounds = self._engine.bounds(topic, partition)
                committed, moved_at = rows.get((topic, partition), (None, None))
                lag = max(0, bounds.end - (bounds.first if committed is None else committed))
                found.append(GroupLag(topic, partition, committed, bounds.end, lag, moved_at))
        return found

    async def delete(self, group: str, topic: str | None = None) -> None:
        await self.settled()
        await self.put([((group, *place), None) for place in self._offsets.get(group, {}) if topic in (None, place[0])])

    async def topic_gone(self, topic: str) -> None:
        """Forget the offsets of all groups in the topic, including commits in flight."""
        await self.settled()
        doomed: Commits = []
        for number, group in enumerate(list(self._offsets)):
            doomed += [((group, *place), None) for place in self._offsets.get(group, ()) if place[0] == topic]
            if len(doomed) >= ROWS_A_TURN:
                await self.put(doomed)
                doomed = []
            elif number % ROWS_A_TURN == ROWS_A_TURN - 1:
                await asyncio.sleep(0)
        await self.put(doomed)

    def _tombstones(self, doomed: Callable[[Place], bool]) -> Commits:
        return [((group, *place), None) for group, offsets in self._offsets.items() for place in offsets if doomed(place)]
