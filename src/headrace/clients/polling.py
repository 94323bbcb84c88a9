"""Subscription over a request-reply protocol: the client polls, less often while there are no new records.

A group's progress is the next offset to read, per partition. Acknowledging a message commits the offset after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import ClassVar, Protocol

from headrace.clients.errors import ClientClosed, InvalidArgument, NothingToSettle, NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement
from headrace.errors import OffsetOutOfRange


class Source(Protocol):
    """The methods of a client that a subscription uses."""

    protocol: ClassVar[str]

    def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> Awaitable[None]: ...

    def first_offset(self, topic: str, *, partition: int = 0) -> Awaitable[int]:
        """Return the offset of the oldest record."""


Read = Callable[[int, int], Awaitable[tuple[MessageBatch, int]]]
"""Read at (partition, offset). Returns the records and the next offset."""


class PollingSubscription:
    """Asynchronous iterator over the messages of one or more partitions, read in turn. Created by a client's `subscribe`."""

    def __init__(
        self,
        source: Source,
        read: Read,
        topic: str,
        positions: Mapping[int, int],
        *,
        group: str | None,
        settlement: Settlement,
        idle_seconds: Callable[[int], float],
    ) -> None:
        self.topic, self.group = topic, group
        self.gaps: list[Gap] = []
        self._source, self._read = source, read
        self._positions = dict(positions)
        """Next offset to fetch, by partition."""
        self._turns = list(positions)
        self._settlement = settlement
        self._idle_seconds = idle_seconds
        self._current: MessageBatch | None = None
        self._taken = 0
        self._handed_out: dict[int, int] = {}
        """Offset after the last message delivered since the last commit, by partition."""
        self._acknowledged: dict[int, int] = {}
        """Offset after the last acknowledged message, by partition."""
        self._closed = asyncio.Event()

    @property
    def positions(self) -> dict[int, int]:
        """Offset of the next message to deliver, by partition."""
        positions = dict(self._positions)
        batch = self._current
        if batch is not None and batch.partition is not None and self._taken < len(batch):
            positions[batch.partition] = batch.offsets[self._taken]
        return positions

    def seek(self, offset: int, *, partition: int = 0) -> None:
        """Continue at another offset and drop fetched, undelivered records of the partition. The group does not move."""
        if partition not in self._positions:
            raise InvalidArgument(f"this subscription does not follow partition {partition}")
        if self._current is not None and self._current.partition == partition:
            self._current = None
        self._positions[partition] = offset
        self._handed_out.pop(partition, None)
        self._acknowledged.pop(partition, None)

    # Settlement.

    async def commit(self) -> None:
        """Commit the offset after the last delivered message of each partition. Raises `NothingToSettle` without a group."""
        if self.group is None:
            raise NothingToSettle(self.topic)
        for partition, offset in list(self._handed_out.items()):
            await self._commit_to(partition, offset, self.group)

    async def ack(self, message: Message) -> bool:
        """Commit the offset after this message, unless a later one is acknowledged. Durable on return."""
        if self.group is None:
            raise NothingToSettle(self.topic)
        partition, offset = message.partition, message.offset
        assert partition is not None and offset is not None, "a message of this subscription has partition and offset"
        if self._acknowledged.get(partition, -1) <= offset:
            await self._commit_to(partition, offset + 1, self.group)
        return True

    async def nack(self, message: Message) -> bool:
        raise NotSupported(self._source.protocol, "nack", "the next subscription of the group reads uncommitted records again")

    async def _commit_to(self, partition: int, offset: int, group: str) -> None:
        """Record the offset before the reply, so that acknowledging an earlier message meanwhile does not move the group back."""
        before = self._acknowledged.get(partition, -1)
        self._acknowledged[partition] = offset
        try:
            await self._source.commit(self.topic, offset, group=group, partition=partition)
        except BaseException:
            if self._acknowledged.get(partition) == offset:
                self._acknowledged[partition] = before
            raise
        if self._handed_out.get(partition) == offset:
            del self._handed_out[partition]

    # Reading.

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Iterate over the batches as fetched, which is faster. Do not mix with iterating over single messages."""
        while (batch := await self._next_batch()) is not None:
            self._hand_out(batch, len(batch) - 1)
            yield batch

    def __aiter__(self) -> PollingSubscription:
        return self

    async def __anext__(self) -> Message:
        while self._current is None or self._taken == len(self._current):
            self._current, self._taken = await self._next_batch(), 0
            if self._current is None:
                raise StopAsyncIteration
        batch, index = self._current, self._taken
        self._taken += 1
        self._hand_out(batch, index)
        return batch.message(index, None if self.group is None else self)

    async def close(self) -> None:
        """End the iteration. Automatic settlement commits every delivered message, including the last."""
        if not self._closed.is_set():
            self._closed.set()
            self._current = None
            if self._settlement == "auto":
                await self.commit()

    def _hand_out(self, batch: MessageBatch, index: int) -> None:
        assert batch.partition is not None, "a fetched batch has a partition"
        self._handed_out[batch.partition] = batch.offsets[index] + 1

    async def _next_batch(self) -> MessageBatch | None:
        try:
            if self._settlement == "auto" and not self._closed.is_set():
                await self.commit()
            return await self._search()
        except ClientClosed:
            self._closed.set()
            return None

    async def _search(self) -> MessageBatch | None:
        """Read the partitions in turn. Pause after a round without a message."""
        empty_reads = rounds = 0
        while not self._closed.is_set():
            partition = self._turns[0]
            self._turns = self._turns[1:] + [partition]
            batch = await self._read_on(partition)
            if batch is not None:
                return batch
            empty_reads += 1
            if empty_reads % len(self._turns) == 0:
                await pause(self._idle_seconds(rounds), self._closed)
                rounds += 1
        return None

    async def _read_on(self, partition: int) -> MessageBatch | None:
        """Read at the current position; None if there are no records yet."""
        while not self._closed.is_set():
            requested = self._positions[partition]
            try:
                batch, following = await self._read(partition, requested)
            except OffsetOutOfRange as error:
                first = error.first or await self._source.first_offset(self.topic, partition=partition)
                if first <= requested:
                    raise
                self.gaps.append(Gap(requested, first, partition))
                self._positions[partition] = first
                continue
            if self._positions[partition] != requested:
                continue  # `seek` was called meanwhile
            # Never move back: an empty reply may carry the end of the log, which may be below a requested future offset.
            self._positions[partition] = max(following, requested)
            return batch if batch.values else None
        return None


async def pause(seconds: float, closed: asyncio.Event) -> None:
    """Wait until `closed` is set, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await closed.wait()
    except TimeoutError:
        pass
