"""Moves of many records to the dead letters, without duplicates.

A caller may report the same unreadable record again: a task is retried, a batch is replayed after a crash. A record that is already a
dead letter for the same reason is therefore skipped. The dead-letter topic is the only source of this knowledge. It is read once, then
only its new records. For each dead letter, memory holds a fingerprint of its origin, reason, key and value. Key and value are included
because a topic that is deleted and created again counts its offsets from zero.

Purged dead letters are forgotten here too; the same records may then be moved again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from headrace.broker.dead_letters.dead_letters import DeadLetter, DeadLetters, dead_letter_topic, entry_of
from headrace.broker.groups.progress import Row, rows_of
from headrace.broker.publishing.publish import Publisher
from headrace.broker.settings import Clock
from headrace.engine.contract import Ack, Appended, Engine
from headrace.errors import OffsetOutOfRange, UnknownTopic
from headrace.limits import DEAD_LETTERS_REMEMBERED_MAX, MIB

_READ_BYTES: Final = 1 * MIB
_APPEND_BYTES: Final = 16 * MIB
"""Bytes that are held in memory, and written, at once."""
_PURGES_MET_MAX: Final = 3


@dataclass(slots=True)
class _Known:
    """Fingerprints of one dead-letter topic, as far as it has been read."""

    positions: dict[int, int] = field(default_factory=dict)
    prints: set[bytes] = field(default_factory=set)


class Moves:
    """Runs one move at a time: each must see what the previous one added."""

    def __init__(self, engine: Engine, publisher: Publisher, letters: DeadLetters, clock: Clock) -> None:
        self._engine = engine
        self._publisher = publisher
        self._letters = letters
        self._clock = clock
        self._known: dict[str, _Known] = {}
        """By dead-letter topic, the most recently used last."""
        self._lock = asyncio.Lock()
        self._staged: asyncio.Future[list[Appended]] | None = None

    def topic_gone(self, name: str) -> None:
        self._known.pop(name, None)

    async def move(self, topic: str, wanted: Mapping[int, Mapping[int, str]], reason: str) -> int:
        """Move `wanted` (partition → offset → error) and return how many are new dead letters. Durable when it returns. Records that the
        log no longer holds are skipped."""
        async with self._lock:
            if self._staged is not None:
                await asyncio.wait([self._staged])  # its caller was cancelled
            now = self._clock()
            moved, held, held_bytes = 0, list[DeadLetter](), 0
            for partition in sorted(wanted):
                async for row in self._rows(topic, partition, wanted[partition]):
                    held.append(DeadLetter(row, partition, 0, reason, now, now, wanted[partition][row.offset]))
                    held_bytes += row.size_bytes
                    if held_bytes >= _APPEND_BYTES:
                        moved += await self._keep(topic, held)
                        held, held_bytes = [], 0
            return moved + await self._keep(topic, held)

    async def _rows(self, topic: str, partition: int, wanted: Mapping[int, str]) -> AsyncIterator[Row]:
        offsets = sorted(wanted)
        index = 0
        while index < len(offsets):
            try:
                batches = await self._engine.read(topic, partition, offsets[index], bytes_max=_READ_BYTES)
            except OffsetOutOfRange as error:
                if offsets[index] >= error.first:
                    return
                index = bisect_left(offsets, error.first)
                continue
            if not batches:
                return
            for batch in batches:
                for row in rows_of(batch):
                    if row.offset in wanted:
                        yield row
                await asyncio.sleep(0)  # reads from the page cache do not wait, and other tasks need the loop
            index = bisect_left(offsets, batches[-1].next_offset)

    async def _keep(self, topic: str, found: Sequence[DeadLetter]) -> int:
        for purges_left in reversed(range(_PURGES_MET_MAX)):
            known = await self._catch_up(topic)
            new = {_print(one.reason, one.partition, one.row.offset, one.row.key, one.row.value): one for one in found}
            for mark in new.keys() & known.prints:
                del new[mark]
            if not new:
                return 0
            await self._letters.ensure(topic)
            try:
                self._staged = self._publisher.append(self._letters.writes(topic, list(new.values())), Ack.DURABLE)
                await asyncio.shield(self._staged)
            except UnknownTopic:
                if not purges_left:
                    raise
            else:
                return len(new)
        raise AssertionError("the loop returns or raises")

    async def _catch_up(self, topic: str) -> _Known:
        """Read the dead letters that were added since the last read."""
        name = dead_letter_topic(topic)
        known = self._known.pop(name, None) or _Known()
        self._known[name] = known
        held = self._engine.topics().get(name)
        for partition in range(held.partitions if held else 0):
            await self._read_on(topic, partition, known)
        self._evict(name)
        return known

    async def _read_on(self, topic: str, partition: int, known: _Known) -> None:
        name = dead_letter_topic(topic)
        try:
            bounds = self._engine.bounds(name, partition)
            position = max(known.positions.get(partition, 0), bounds.first)
            while position < bounds.end:
                batches = await self._engine.read(name, partition, position, bytes_max=_READ_BYTES)
                for batch in batches:
                    for row in rows_of(batch):
                        entry = entry_of(topic, partition, row, None)
                        if entry.source_partition is not None and entry.source_offset is not None:
                            mark = _print(entry.reason, entry.source_partition, entry.source_offset, entry.key, entry.value)
                            known.prints.add(mark)
                    await asyncio.sleep(0)
                position = batches[-1].next_offset if batches else bounds.end
                known.positions[partition] = position
        except (OffsetOutOfRange, UnknownTopic):
            pass  # retention or a purge removed records that were not read yet; they need no fingerprint

    def _evict(self, name: str) -> None:
        """Drop the least recently used fingerprints. They are read again when needed."""
        total = sum(len(known.prints) for known in self._known.values())
        for other in [one for one in self._known if one != name]:
            if total <= DEAD_LETTERS_REMEMBERED_MAX:
                return
            total -= len(self._known.pop(other).prints)


def _print(reason: str, partition: int, offset: int, key: bytes | None, value: bytes | None) -> bytes:
    found = blake2b(f"{reason}\0{partition}\0{offset}\0{-1 if key is None else len(key)}\0{value is None}\0".encode(), digest_size=16)
    found.update(key or b"")
    found.update(value or b"")
    return found.digest()
