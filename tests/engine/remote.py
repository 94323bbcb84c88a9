"""A remote log, simulated: the memory engine behind a network that is slow, reorders answers, loses them and goes away.

Everything follows from one seed. Appends to one partition are written in call order, as every engine must; the answers of different
partitions overtake each other. An append without an answer fails with `AppendUnknown`, and its outcome turns out later: the records were
written, or they were not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from headrace.engine.checks import check_batch
from headrace.engine.contract import (
    Ack,
    Appended,
    AppendedEach,
    Batch,
    Bounds,
    Capabilities,
    Health,
    Located,
    OffsetStore,
    Ownership,
    Topic,
    TopicConfig,
    Write,
)
from headrace.engine.each import append_by_future, append_by_partition
from headrace.engine.memory import MemoryEngine
from headrace.errors import AppendUnknown, Unavailable
from headrace.records import ColumnBatch, RecordBatch


@dataclass
class Faults:
    """Probabilities of faults. They may change while the engine runs."""

    latency_turns_max: int = 3
    """Turns of the event loop that an answer takes, at most."""
    unknown: float = 0.0
    """An append has no answer in time."""
    unwritten: float = 0.5
    """An append without an answer is not written."""
    is_away: bool = False
    """The connection is lost: reads and appends fail, nothing is written."""


class RemoteEngine:
    """Wraps a memory engine. `health` and the topics are its own."""

    def __init__(self, inner: MemoryEngine, seed: int, faults: Faults | None = None) -> None:
        self.inner = inner
        self.faults = faults or Faults()
        self._random = Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.outcomes_unknown = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, cheap_atomic_append=False)

    @property
    def health(self) -> Health:
        return self.inner.health

    @health.setter
    def health(self, health: Health) -> None:
        self.inner.health = health

    @property
    def topic_changed(self) -> Callable[[str], None]:
        return self.inner.topic_changed

    @topic_changed.setter
    def topic_changed(self, changed: Callable[[str], None]) -> None:
        self.inner.topic_changed = changed

    @property
    def ownership(self) -> Ownership:
        return self.inner.ownership

    @ownership.setter
    def ownership(self, ownership: Ownership) -> None:
        self.inner.ownership = ownership

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    @property
    def offset_store(self) -> OffsetStore | None:
        return self.inner.offset_store

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.settle()
        await self.inner.close()

    async def settle(self) -> None:
        """Wait until every append has its outcome."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        await self._travel()
        return await self.inner.create_topic(name, partitions, config, internal=internal)

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        await self._travel()
        return await self.inner.alter_topic(name, partitions=partitions, config=config)

    async def delete_topic(self, name: str) -> None:
        await self._travel()
        await self.inner.delete_topic(name)

    def topics(self) -> Mapping[str, Topic]:
        return self.inner.topics()

    async def look_for_topic(self, name: str) -> bool:
        return await self.inner.look_for_topic(name)

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        for write in writes:
            self.inner.bounds(write.topic, write.partition)  # raises for a place that does not exist
            if isinstance(write.batch, (RecordBatch, ColumnBatch)):
                check_batch(write.batch)
        answer: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        places = {(write.topic, write.partition) for write in writes}
        before = {self._last[place] for place in places if place in self._last}
        is_unknown = self._random.random() < self.faults.unknown
        is_written = not is_unknown or self._random.random() >= self.faults.unwritten
        work = self._append(list(writes), ack, answer, before, is_unknown=is_unknown, is_written=is_written)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for place in places:
            self._last[place] = task
        return answer

    async def _append(
        self,
        writes: list[Write],
        ack: Ack | None,
        answer: asyncio.Future[list[Appended]],
        before: set[asyncio.Task[None]],
        *,
        is_unknown: bool,
        is_written: bool,
    ) -> None:
        if before:
            await asyncio.wait(before)
        await self._turns()
        if self.faults.is_away:
            _fail(answer, Unavailable("the connection is lost; nothing was written"))
            return
        if is_unknown:
            self.outcomes_unknown += 1
            outcome: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
            outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
            _fail(answer, AppendUnknown("no answer", outcome))
            answer = outcome
            for _ in range(10):
                await self._turns()
        if not is_written:
            _fail(answer, Unavailable("nothing was written"))
            return
        try:
            appended = await self.inner.append(writes, ack=ack)
        except Exception as failure:
            _fail(answer, failure)
            return
        if not answer.done():
            answer.set_result(appended)

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        await self._travel()
        return await self.inner.read(topic, partition, offset, bytes_max=bytes_max, records_max=records_max)

    def append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        append_by_future(self.append, write, done)

    def append_each(
        self, places: Sequence[tuple[str, int]], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[AppendedEach]:
        for topic, partition in set(places):
            self.inner.bounds(topic, partition)
        return append_by_partition(self.append, places, values, keys)

    def read_now(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch] | None:
        found = self.inner.read_now(topic, partition, offset, bytes_max=bytes_max, records_max=records_max)  # cached on this side
        return None if found is None else list(found)

    @property
    def local_file(self) -> str:
        return self.inner.local_file

    async def locate(self, topic: str, partition: int, offset: int, stop: int) -> Located:
        await self._travel()
        return await self.inner.locate(topic, partition, offset, stop)

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self.inner.bounds(topic, partition)

    def size_bytes(self, topic: str, partition: int) -> int:
        return self.inner.size_bytes(topic, partition)

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        await self._travel()
        return await self.inner.offset_for_time(topic, partition, timestamp)

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        return self.inner.watch(topic, partition, wake)

    async def maintain(self) -> None:
        await self.inner.maintain()

    async def _travel(self) -> None:
        await self._turns()
        if self.faults.is_away:
            raise Unavailable("the connection is lost")

    async def _turns(self) -> None:
        for _ in range(self._random.randint(0, self.faults.latency_turns_max)):
            await asyncio.sleep(0)


def _fail(future: asyncio.Future[list[Appended]], failure: Exception) -> None:
    if not future.done():
        future.set_exception(failure)
