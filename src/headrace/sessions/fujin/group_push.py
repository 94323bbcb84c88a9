"""Push with auto commit: columnar delivery to the readers of one group and topic.

With auto commit no message is acknowledged on its own, so no state per message is needed. The readers take turns at chunks of the log. A
chunk counts as read when the reader's transport has acknowledged it. If its reader is lost, the chunk goes to the next reader. The
committed offset of the group is the start of the first unconfirmed chunk.

    cursor of each partition ──▶ waiting chunks ──▶ next reader with room ──▶ outstanding ──▶ confirmed

A group whose messages are acknowledged one by one uses `broker.queue`. A group cannot use both. When a reader of the other kind connects,
the group push *retires*: it commits its progress, and its readers continue with a queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from headrace.broker import Batch
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.reading.cursor import Cursor
from headrace.errors import BrokerError, OffsetOutOfRange
from headrace.limits import KIB
from headrace.sessions.fujin.settings import ReaderConnector

CHUNK_BYTES: Final = 128 * KIB
CREDIT_BYTES: Final = 512 * KIB
"""Bytes read ahead for each partition."""
_TEND_SECONDS: Final = 0.2
"""Interval for committing progress and looking for new partitions."""


@dataclass(slots=True, eq=False)
class Chunk:
    """Adjacent records of a partition."""

    partition: int
    batch: Batch
    first: int
    end: int


class ChunkReader(Protocol):
    """A reader that receives chunks."""

    @property
    def has_room(self) -> bool: ...

    def take_chunk(self, group_push: GroupPush, chunk: Chunk) -> None:
        """Send the chunk, and call `group_push.confirm` when the peer has received it."""

    def group_push_failed(self, reason: str) -> None: ...

    def group_push_retired(self) -> None:
        """Continue with a queue."""


@dataclass(slots=True)
class _PartitionProgress:
    cursor: Cursor
    end: int
    """Offset after the last chunk that was read."""
    committed: int
    unsettled: dict[int, None] = field(default_factory=dict)
    """First offsets of the chunks that wait or are outstanding. The log is read in order, so the first one is the lowest."""

    @property
    def floor(self) -> int:
        return next(iter(self.unsettled), self.end)


class GroupPush:
    """Delivery to the readers of one group and topic. `over` is called when the last reader has left."""

    def __init__(self, broker: Broker, who: Principal, topic: str, connector: ReaderConnector, over: Callable[[], None]) -> None:
        self.who = who
        self._broker, self._topic, self._connector, self._over = broker, topic, connector, over
        self._partitions: dict[int, _PartitionProgress] = {}
        self._waiting: deque[Chunk] = deque()
        self._readers: deque[ChunkReader] = deque()
        self._outstanding: dict[Chunk, ChunkReader] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.is_over = False

    async def open(self) -> None:
        """Open the cursors. Raises `BrokerError`, also if the principal may not read the topic or commit for the group."""
        await self._add_partitions("first" if self._connector.start == "earliest" else "end")
        self._tend_later()

    def join(self, reader: ChunkReader) -> None:
        self._readers.append(reader)
        self._pump()

    def leave(self, reader: ChunkReader) -> asyncio.Task[None] | None:
        """Give its unconfirmed chunks to the other readers. If it is the last one, progress is committed when the task is done."""
        if reader not in self._readers:
            return None
        self._readers.remove(reader)
        returned = [chunk for chunk, holder in self._outstanding.items() if holder is reader]
        for chunk in returned:
            del self._outstanding[chunk]
        self._waiting.extendleft(sorted(returned, key=lambda chunk: chunk.first, reverse=True))
        if self._readers:
            self._pump()
            return None
        self._closing = asyncio.get_running_loop().create_task(self._close())
        return self._closing

    def confirm(self, chunk: Chunk) -> None:
        if self._outstanding.pop(chunk, None) is not None:
            self._partitions[chunk.partition].unsettled.pop(chunk.first)

    def room(self) -> None:
        """Continue: a reader has room again."""
        self._pump()

    async def retire(self) -> None:
        """Stop. Confirmed progress is committed when this returns; the rest is delivered again."""
        readers, self._readers = list(self._readers), deque()
        await self._close()
        for reader in readers:
            reader.group_push_retired()

    # Chunks.

    def _arrived(self, partition: int, batches: list[Batch]) -> None:
        progress = self._partitions[partition]
        for batch in batches:
            while len(batch):
                count = max(1, batch.fitting(CHUNK_BYTES))
                part, batch = batch.window(0, count), batch.window(count, len(batch))
                self._waiting.append(Chunk(partition, part, part.first_offset, part.next_offset))
                progress.unsettled[part.first_offset] = None
            progress.end = batch.next_offset
        self._pump()

    def _pump(self) -> None:
        """Give waiting chunks to readers with room, in turns."""
        without_room = 0
        while self._waiting and without_room < len(self._readers):
            reader = self._readers[0]
            self._readers.rotate(-1)
            if not reader.has_room:
                without_room += 1
                continue
            without_room = 0
            chunk = self._waiting.popleft()
            self._outstanding[chunk] = reader
            self._partitions[chunk.partition].cursor.grant(chunk.batch.size_bytes)
            reader.take_chunk(self, chunk)

    def _failed(self, error: BrokerError) -> None:
        self._stop()
        for reader in list(self._readers):
            reader.group_push_failed(f"{error.code}: {error}")

    # Partitions and progress.

    async def _add_partitions(self, begin: str) -> None:
        """Open missing partitions. Commits their positions, so that a reader that fails before its first message resumes there."""
        who, topic, group = self.who, self._topic, self._connector.group
        missing = range(len(self._partitions), self._broker.topic(who, topic).partitions)
        positions: dict[int, int] = {}
        for partition in missing:
            bounds = self._broker.bounds(who, topic, partition)
            committed = self._broker.committed(who, group, topic, partition)
            positions[partition] = getattr(bounds, begin) if committed is None else min(max(committed, bounds.first), bounds.end)
        await self._broker.commit(who, group, {(topic, partition): position for partition, position in positions.items()})
        for partition, position in positions.items():
            if not self.is_over:
                self._partitions[partition] = _PartitionProgress(self._cursor(partition, position), position, position)

    def _cursor(self, partition: int, position: int) -> Cursor:
        def deliver(batches: list[Batch]) -> None:
            if not self.is_over:
                self._arrived(partition, batches)

        def start(position: int) -> Cursor:
            return self._broker.cursor(self.who, self._topic, partition, position, deliver, credit_bytes=CREDIT_BYTES, failed=self._failed)

        try:
            return start(position)
        except OffsetOutOfRange as error:
            return start(error.first)  # retention removed the records

    def _tend_later(self) -> None:
        if not self.is_over:
            self._timer = asyncio.get_running_loop().call_later(_TEND_SECONDS, self._tend)

    def _tend(self) -> None:
        self._tending = asyncio.get_running_loop().create_task(self._tend_now())

    async def _tend_now(self) -> None:
        try:
            await self._commit()
            if self._broker.topic(self.who, self._topic).partitions > len(self._partitions):
                await self._add_partitions("first")
        except BrokerError:
            pass  # a full disk, or a topic that is being deleted: retried in the next round
        self._tend_later()

    async def _commit(self) -> None:
        floors = {partition: progress.floor for partition, progress in self._partitions.items() if progress.floor != progress.committed}
        if floors:
            offsets = {(self._topic, partition): floor for partition, floor in floors.items()}
            await self._broker.commit(self.who, self._connector.group, offsets)
            for partition, floor in floors.items():
                self._partitions[partition].committed = floor

    async def _close(self) -> None:
        self._stop()
        if self._tending is not None:
            await asyncio.wait([self._tending])
        try:
            await self._commit()
        except BrokerError:
            pass  # uncommitted records are delivered again
        self._over()

    def _stop(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for progress in self._partitions.values():
            progress.cursor.close()


class GroupPushes:
    """All group pushes, and the number of readers with a queue for each group and topic."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._group_pushes: dict[tuple[str, str], GroupPush] = {}
        self._queues: dict[tuple[str, str], int] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def join(self, who: Principal, topic: str, connector: ReaderConnector) -> GroupPush | None:
        """Return the group push to join, or None if the reader must use a queue. In that case it is counted as such."""
        key = (connector.group, topic)
        async with self._lock(key):
            group_push = self._group_pushes.get(key)
            if self._queues.get(key) or (group_push is not None and group_push.who != who):
                await self._enter_queue(key)
                return None
            if group_push is None:
                group_push = GroupPush(self._broker, who, topic, connector, lambda: self._forget(key, group_push))
                await group_push.open()
                self._group_pushes[key] = group_push
            return group_push

    async def enter_queue(self, group: str, topic: str) -> None:
        """Count a reader that uses a queue, and retire the group push."""
        async with self._lock((group, topic)):
            await self._enter_queue((group, topic))

    async def _enter_queue(self, key: tuple[str, str]) -> None:
        self._queues[key] = self._queues.get(key, 0) + 1
        group_push = self._group_pushes.get(key)
        if group_push is not None:
            await group_push.retire()

    def leave_queue(self, group: str, topic: str) -> None:
        left = self._queues[group, topic] - 1
        if left:
            self._queues[group, topic] = left
        else:
            del self._queues[group, topic]

    def _forget(self, key: tuple[str, str], group_push: GroupPush | None) -> None:
        if self._group_pushes.get(key) is group_push:
            del self._group_pushes[key]

    def _lock(self, key: tuple[str, str]) -> asyncio.Lock:
        """Return the lock of the group and topic. Unused locks are dropped when there are many."""
        if len(self._locks) > 1_000:
            self._locks = {known: lock for known, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(key, asyncio.Lock())
