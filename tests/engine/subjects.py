"""Engines under test, and helper functions of the behaviour suite."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from headrace.engine.contract import Ack, Appended, Engine, Topic, TopicConfig, Write
from headrace.engine.embedded import EmbeddedEngine
from headrace.engine.kafka.engine import KafkaEngine
from headrace.engine.kafka.settings import KafkaSettings
from headrace.engine.memory import MemoryEngine
from headrace.records import AnyBatch, Record, RecordBatch
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions
from tests.engine.remote import RemoteEngine


@dataclass
class Clock:
    """Manual clock in Unix ms."""

    now: int = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now

    def advance(self, ms: int) -> None:
        self.now += ms


Build: TypeAlias = Callable[[], Engine]
"""Called for each opening."""


def _memory(directory: Path, clock: Clock) -> Build:
    engine = MemoryEngine(clock=clock)
    return lambda: engine


def _remote(directory: Path, clock: Clock) -> Build:
    engine = RemoteEngine(MemoryEngine(clock=clock), seed=1)
    return lambda: engine


def _embedded(directory: Path, clock: Clock) -> Build:
    return lambda: EmbeddedEngine(DiskFiles(directory), StoreOptions(journal_bytes=1 << 20, headroom_bytes=0), clock=clock)


_PREFIXES = itertools.count()


def kafka_engine(bootstrap: str, clock: Clock) -> Build:
    """Return the Kafka engine under a prefix that no other test of this process uses."""
    settings = KafkaSettings(bootstrap, prefix=f"e{next(_PREFIXES)}-", deadline_ms=60_000, is_elected=False)
    return lambda: KafkaEngine(settings, clock=clock)


SUBJECTS: dict[str, Callable[[Path, Clock], Build]] = {"memory": _memory, "embedded": _embedded, "remote": _remote}


class Subject:
    """An engine under test."""

    def __init__(self, build: Build, clock: Clock) -> None:
        self._build = build
        self.clock = clock
        self.engine = build()

    async def reopen(self) -> None:
        await self.engine.close()
        self.engine = self._build()
        await self.engine.open()

    async def topic(self, name: str = "t", partitions: int = 1, **settings: object) -> Topic:
        return await self.engine.create_topic(name, partitions, TopicConfig(**settings))  # type: ignore[arg-type]  # named by the tests

    async def append(self, record_batch: AnyBatch, topic: str = "t", partition: int = 0, *, ack: Ack | None = None) -> Appended:
        (appended,) = await self.engine.append([Write(topic, partition, record_batch)], ack=ack)
        return appended

    async def put(self, *values: str, topic: str = "t", partition: int = 0) -> Appended:
        return await self.append(RecordBatch([value.encode() for value in values]), topic, partition)

    async def put_keyed(self, *pairs: tuple[str, str | None], topic: str = "t") -> Appended:
        keys = [key.encode() for key, _ in pairs]
        return await self.append(RecordBatch([None if value is None else value.encode() for _, value in pairs], keys), topic)

    async def records(self, topic: str = "t", partition: int = 0, offset: int | None = None) -> list[Record]:
        """Read everything from `offset` (by default the first one) to the end."""
        bounds = self.engine.bounds(topic, partition)
        position, found = bounds.first if offset is None else offset, list[Record]()
        while position < bounds.end:
            batches = await self.engine.read(topic, partition, position, bytes_max=1 << 20)
            if not batches:
                break
            for batch in batches:
                found += batch.records()
            assert batches[-1].next_offset > position, "a read must get on"
            position = batches[-1].next_offset
        return found

    async def values(self, topic: str = "t", partition: int = 0, offset: int | None = None) -> list[bytes | None]:
        return [record.value for record in await self.records(topic, partition, offset)]

    async def offsets(self, topic: str = "t", partition: int = 0) -> list[int]:
        return [record.offset for record in await self.records(topic, partition)]


async def within(seconds: float, awaited: Awaitable[object]) -> None:
    """Poll until a condition holds; fail after the deadline."""
    async with asyncio.timeout(seconds):
        await awaited


def texts(values: Sequence[bytes | None]) -> list[str | None]:
    return [None if value is None else value.decode() for value in values]
