"""Marks of replayed dead letters: the table `__dead_letters`.

| key | value |
|---|---|
| topic, partition, offset | Unix ms of its replay |
| topic, partition, −1 | the floor: every dead letter below this offset has been replayed |

Replays mostly happen in offset order. The floor then rises and the single marks below it are deleted, so the table stays small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from headrace.broker.tables import TableLog
from headrace.engine.contract import Bounds, Engine

_Key: TypeAlias = tuple[str, int, int]
_MarkChanges: TypeAlias = list[tuple[_Key, int | None]]
_FLOOR: Final = -1
_LONG_AGO: Final = 0
"""Replay time reported when only the floor is known."""


@dataclass(slots=True)
class _Done:
    """Replayed dead letters of one partition."""

    floor: int = 0
    times: dict[int, int] = field(default_factory=dict)


class Marks(TableLog[_Key, int]):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "__dead_letters", _Key, int)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._done: dict[tuple[str, int], _Done] = {}

    def show(self, key: _Key, value: int | None) -> None:
        topic, partition, offset = key
        done = self._done.setdefault((topic, partition), _Done())
        if offset == _FLOOR:
            done.floor = value or 0
        elif value is None:
            done.times.pop(offset, None)
        else:
            done.times[offset] = value
        if not done.floor and not done.times:
            del self._done[topic, partition]

    async def open(self) -> None:
        """Load the table. Remove rows left by a crash during a deletion."""
        await self.load()
        gone = {topic for topic, _ in self._done if topic not in self._engine.topics()}
        await self.put([change for topic in gone for change in self._tombstones(topic)])

    def floor(self, topic: str, partition: int) -> int:
        """Return the offset below which everything has been replayed."""
        return self._at(topic, partition).floor

    def mark(self, topic: str, partition: int, offset: int) -> int | None:
        """Return the Unix ms of the replay, or None."""
        done = self._at(topic, partition)
        return done.times.get(offset, _LONG_AGO if offset < done.floor else None)

    def waiting(self, topic: str, partition: int, bounds: Bounds) -> int:
        done = self._at(topic, partition)
        first = max(bounds.first, min(done.floor, bounds.end))
        return bounds.end - first - sum(first <= offset < bounds.end for offset in done.times)

    def marking(self, topic: str, places: Iterable[tuple[int, int]], now: int) -> _MarkChanges:
        """Return the changes that mark these (partition, offset) as replayed."""
        by_partition: dict[int, list[int]] = {}
        for partition, offset in places:
            by_partition.setdefault(partition, []).append(offset)
        return [change for partition, offsets in by_partition.items() for change in self._raised(topic, partition, offsets, now)]

    def _raised(self, topic: str, partition: int, offsets: list[int], now: int) -> _MarkChanges:
        done = self._at(topic, partition)
        first = self._engine.bounds(topic, partition).first
        floor, marked = max(done.floor, first), {*done.times, *offsets}
        while floor in marked:
            floor += 1
        changes: _MarkChanges = [((topic, partition, offset), now) for offset in offsets if offset >= floor]
        if floor > done.floor:
            changes.append(((topic, partition, _FLOOR), floor))
            changes += (((topic, partition, offset), None) for offset in done.times if offset < floor)
        return changes

    async def topic_gone(self, topic: str) -> None:
        await self.settled()
        await self.put(self._tombstones(topic))

    def _tombstones(self, topic: str) -> _MarkChanges:
        return [
            ((topic, partition, offset), None)
            for (known, partition), done in self._done.items()
            if known == topic
            for offset in (_FLOOR, *done.times)
        ]

    def _at(self, topic: str, partition: int) -> _Done:
        return self._done.get((topic, partition)) or _Done()
