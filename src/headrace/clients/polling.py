"""A topic followed over a protocol that only answers questions: the client keeps asking, less often while nothing comes.

A group's progress is one offset for each partition, the next to read. Acknowledging a message commits the offset behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import ClassVar, Protocol

from headrace.clients.errors import ClientClosed, NothingToSettle, NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch, Settlement
from headrace.errors import OffsetOutOfRange


class Source(Protocol):
    """What a subscription needs of its client."""

    protocol: ClassVar[str]

    def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> Awaitable[None]: ...

    def first_offset(self, topic: str, *, partition: int = 0) -> Awaitable[int]:
        """The oldest there is."""


Read = Callable[[int, int], Awaitable[tuple[MessageBatch, int]]]
"""From (partition, offset): the records, and where to read on."""


class PollingSubscription:
    """An asynchronous iterator over the messages of one or more partitions, taken in turns. Made by a client's `subscribe`."""

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
        """By partition: where to fetch on."""
        self._turns = list(positions)
        self._settlement = settlement
        self._idle_seconds = idle_seconds
        self._current: MessageBatch | None = None
        self._taken = 0
        self._handed_out: dict[int, int] = {}
        """By partition: behind the last message the user was given since the last commit."""
        self._acknowledged: dict[int, int] = {}
        """By partition: behind the last message that was acknowledged."""
        self._closed = asyncio.Event()

    @property
    def positions(self) -> dict[int, int]:
        """By partition: the offset of the next message the user will be given."""
        positions = dict(self._positions)
        batch = self._current
        if batch is not None and batch.partition is not None and self._taken < len(batch):
            positions[batch.partition] = batch.offsets[self._taken]
        return positions

    def seek(self, offset: int, *, partition: int = 0) -> None:
        """Go on from another offset; what was fetched from that partition and not taken is dropped. The group stays where it is."""
        if partition not in self._positions:
            raise ValueError(f"this subscription does not follow partition {partition}")
        if self._current is not None and self._current.partition == partition:
            self._current = None
        self._positions[partition] = offset
        self._handed_out.pop(partition, None)
        self._acknowledged.pop(partition, None)

    # Settlement.

    async def commit(self) -> None:
        """The group has dealt with everything it was given: it will go on behind that. Raises `NothingToSettle` without a group."""
        if self.group is None:
            raise NothingToSettle(self.topic)
        for partition, offset in list(self._handed_out.items()):
            await self._commit_to(partition, offset, self.group)

    async def ack(self, message: Message) -> bool:
        """The group will go on behind this message, unless a later one was acknowledged before. Durable when it returns."""
        if self.group is None:
            raise NothingToSettle(self.topic)
        partition, offset = message.partition, message.offset
        assert partition is not None and offset is not None, "a message of this subscription has its place"
        if self._acknowledged.get(partition, -1) <= offset:
            await self._commit_to(partition, offset + 1, self.group)
        return True

    async def nack(self, message: Message) -> bool:
        raise NotSupported(self._source.protocol, "nack", "what is not committed is read again by the next subscription of the group")

    async def _commit_to(self, partition: int, offset: int, group: str) -> None:
        """Noted before it is answered, so that an earlier message acknowledged meanwhile does not move the group back."""
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
        """Messages in runs, as they are fetched: the fast way. Do not mix with iterating over single messages."""
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
        """End the iteration. With automatic settlement, everything the user was given is committed, the last message too."""
        if not self._closed.is_set():
            self._closed.set()
            self._current = None
            if self._settlement == "auto":
                await self.commit()

    def _hand_out(self, batch: MessageBatch, index: int) -> None:
        assert batch.partition is not None, "a fetched run has its place"
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
        """Ask the partitions in turn; rest after a round without a message."""
        fruitless = rounds = 0
        while not self._closed.is_set():
            partition = self._turns[0]
            self._turns = self._turns[1:] + [partition]
            batch = await self._read_on(partition)
            if batch is not None:
                return batch
            fruitless += 1
            if fruitless % len(self._turns) == 0:
                await self._rest(self._idle_seconds(rounds))
                rounds += 1
        return None

    async def _read_on(self, partition: int) -> MessageBatch | None:
        """What there is at the position; None if there is nothing yet."""
        while not self._closed.is_set():
            asked = self._positions[partition]
            try:
                batch, following = await self._read(partition, asked)
            except OffsetOutOfRange as error:
                first = error.first or await self._source.first_offset(self.topic, partition=partition)
                if first <= asked:
                    raise
                self.gaps.append(Gap(asked, first, partition))
                self._positions[partition] = first
                continue
            if self._positions[partition] != asked:
                continue  # somebody sought another place meanwhile
            # Never back: an empty reply may name the end of the log, which may lie before an offset that is yet to come.
            self._positions[partition] = max(following, asked)
            return batch if batch.values else None
        return None

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass
