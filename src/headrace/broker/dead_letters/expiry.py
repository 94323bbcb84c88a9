"""Expired records of topics that keep them as dead letters (`dead_letter_expired`).

A sweep walks each partition of such a topic in order and moves expired records. The dead letters and the new position (table
`__expiry`) are one append, so no record is moved twice or missed. The sweep stops at the first record that has not expired. With one
time to live per topic this delays nothing; otherwise a short-lived record waits for longer-lived records before it.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

from headrace.broker.dead_letters.dead_letters import SUFFIX, DeadLetter, DeadLetters
from headrace.broker.groups.progress import Row, rows_of
from headrace.broker.health import supervise
from headrace.broker.publishing.publish import Publisher
from headrace.broker.settings import Clock, Later, Timer
from headrace.broker.tables import Table
from headrace.engine.contract import Ack, Engine, Topic, known
from headrace.errors import BrokerError, OffsetOutOfRange
from headrace.limits import MIB
from headrace.records import NEVER

_Key: TypeAlias = tuple[str, int]
_READ_BYTES: Final = 1 * MIB


class Sweep:
    """Runs every `every_ms` while a topic needs it."""

    def __init__(
        self, engine: Engine, publisher: Publisher, dead_letters: DeadLetters, *, clock: Clock, later: Later, every_ms: int
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._clock = clock
        self._later = later
        self._every_ms = every_ms
        self._moved: Table[_Key, int] = Table(engine, "__expiry", _Key, int)  # type: ignore[arg-type]  # see `Groups`
        self._positions: dict[_Key, int] = {}
        """Position of the sweep in each partition; ahead of the table by records that never expire."""
        self._timer: Timer | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def open(self) -> None:
        await self._moved.load()
        await self._moved.put([(key, None) for key in self._moved.rows if key[0] not in self._engine.topics()])
        self.consider()

    def consider(self, name: str | None = None) -> None:
        """Start sweeping if a topic needs it: the named one, which was created or altered, or (None) any."""
        if self._timer is not None or self._sweeping is not None or self._is_stopped:
            return
        topic = None if name is None else self._engine.topics().get(name)
        if self._topics() if topic is None else _is_swept(topic):
            self._timer = self._later(self._every_ms / 1000, self._start)

    async def topic_gone(self, topic: str) -> None:
        await self._moved.settled()
        await self._moved.put([(key, None) for key in self._moved.rows if key[0] == topic])
        for key in [key for key in self._positions if key[0] == topic]:
            del self._positions[key]

    async def drain(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])

    def _topics(self) -> list[Topic]:
        return [topic for topic in self._engine.topics().values() if _is_swept(topic)]

    def _start(self) -> None:
        self._timer = None
        self._sweeping = asyncio.get_running_loop().create_task(self._run())
        supervise(self._engine.health, "dead letters of expired records", self._sweeping)

    async def _run(self) -> None:
        try:
            await self.now()
        except BrokerError:
            pass  # a full disk, or a topic deleted just now; the next sweep continues
        finally:
            self._sweeping = None
            self.consider()

    async def now(self) -> None:
        """Sweep all partitions once."""
        for topic in self._topics():
            for partition in range(topic.partitions):
                while not self._is_stopped and await self._step(topic.name, partition):
                    pass

    async def _step(self, topic: str, partition: int) -> bool:
        """Move some records. Return False when nothing is left to move now."""
        key = topic, partition
        bounds = self._engine.bounds(topic, partition)
        position = max(self._positions.get(key, 0), self._moved.rows.get(key, 0), bounds.first)
        if position >= bounds.end:
            return False
        try:
            batches = await self._engine.read(topic, partition, position, bytes_max=_READ_BYTES)
        except OffsetOutOfRange:
            return True
        now, expired, read_on = self._clock(), list[Row](), batches[-1].next_offset if batches else bounds.end
        for row in (row for batch in batches for row in rows_of(batch)):
            if row.expiry != NEVER and not row.is_expired(now):
                read_on = row.offset
                break
            if row.expiry != NEVER:
                expired.append(row)
        if expired:
            await self._move(topic, partition, expired, read_on)
        self._positions[key] = read_on
        return read_on > position

    async def _move(self, topic: str, partition: int, expired: list[Row], read_on: int) -> None:
        await self._dead_letters.ensure(topic)
        letters = [DeadLetter(row, partition, 0, "expired", row.expiry, row.expiry) for row in expired]
        changes: list[tuple[_Key, int | None]] = [((topic, partition), read_on)]
        staged = self._publisher.append([*self._dead_letters.writes(topic, letters), self._moved.write(changes)], Ack.DURABLE)
        self._moved.follow(staged, changes)
        await known(staged)


def _is_swept(topic: Topic) -> bool:
    return topic.config.dead_letter_expired and not topic.name.endswith(SUFFIX)
