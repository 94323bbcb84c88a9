"""A topic followed over FlyMQ: the protocol only answers questions, so the client keeps asking, less often while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal, Protocol, TypeAlias

from headrace.clients.errors import ClientClosed
from headrace.clients.messages import Message, MessageRun

Settlement: TypeAlias = Literal["explicit", "auto"]
"""Who commits a group's progress: the user, or the iteration itself when it asks for what follows."""


class Source(Protocol):
    """What a subscription needs of its client."""

    def read(
        self, topic: str, offset: int, *, partition: int, records_max: int | None, pattern: str | None
    ) -> Awaitable[tuple[MessageRun, int]]:
        """The records, and where to read on."""

    def commit(self, topic: str, offset: int, *, group: str, partition: int) -> Awaitable[None]: ...


class Subscription:
    """An asynchronous iterator over the messages of one or more partitions, taken in turns. Made by `FlyMqClient.subscribe`."""

    def __init__(
        self,
        source: Source,
        topic: str,
        positions: Mapping[int, int],
        *,
        group: str | None,
        settlement: Settlement,
        pattern: str | None,
        records_max: int,
        idle_seconds: Callable[[int], float],
    ) -> None:
        self.topic, self.group = topic, group
        self._source = source
        self._positions = dict(positions)
        """By partition: where to fetch on."""
        self._turns = list(positions)
        self._settlement = settlement
        self._pattern, self._records_max = pattern, records_max
        self._idle_seconds = idle_seconds
        self._current: MessageRun | None = None
        self._taken = 0
        self._handed_out: dict[int, int] = {}
        """By partition: behind the last message the user was given since the last commit."""
        self._closed = asyncio.Event()

    @property
    def positions(self) -> dict[int, int]:
        """By partition: the offset of the next message the user will be given."""
        positions = dict(self._positions)
        if self._current is not None and self._taken < len(self._current):
            positions[self._current.partition] = self._current.offsets[self._taken]
        return positions

    def seek(self, offset: int, *, partition: int = 0) -> None:
        """Go on from another offset; what was fetched from that partition and not taken is dropped."""
        if partition not in self._positions:
            raise ValueError(f"this subscription does not follow partition {partition}")
        if self._current is not None and self._current.partition == partition:
            self._current = None
        self._positions[partition] = offset
        self._handed_out.pop(partition, None)

    async def commit(self) -> None:
        """The group has dealt with everything it was given: it will go on behind that. Raises `ValueError` without a group."""
        if self.group is None:
            raise ValueError("a subscription without a group has nothing to commit to")
        while self._handed_out:
            partition, offset = self._handed_out.popitem()
            await self._source.commit(self.topic, offset, group=self.group, partition=partition)

    async def runs(self) -> AsyncIterator[MessageRun]:
        """Messages in runs, as they are fetched: the fast way. Do not mix with iterating over single messages."""
        while (run := await self._next_run()) is not None:
            self._handed_out[run.partition] = run.offsets[-1] + 1
            yield run

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        while self._current is None or self._taken == len(self._current):
            self._current, self._taken = await self._next_run(), 0
            if self._current is None:
                raise StopAsyncIteration
        run, index = self._current, self._taken
        self._taken += 1
        self._handed_out[run.partition] = run.offsets[index] + 1
        return Message(run.topic, run.partition, run.offsets[index], run.values[index], None if run.keys is None else run.keys[index])

    async def close(self) -> None:
        """End the iteration. With automatic settlement, everything the user was given is committed, the last message too."""
        if not self._closed.is_set():
            self._closed.set()
            self._current = None
            if self._settlement == "auto":
                await self.commit()

    async def _next_run(self) -> MessageRun | None:
        try:
            if self._settlement == "auto" and not self._closed.is_set():
                await self.commit()
            return await self._search()
        except ClientClosed:
            self._closed.set()
            return None

    async def _search(self) -> MessageRun | None:
        """Ask the partitions in turn; rest after a round without a message."""
        fruitless = rounds = 0
        while not self._closed.is_set():
            partition = self._turns[0]
            self._turns = self._turns[1:] + [partition]
            asked = self._positions[partition]
            run, following = await self._source.read(
                self.topic, asked, partition=partition, records_max=self._records_max, pattern=self._pattern
            )
            if self._positions[partition] != asked:
                continue  # somebody sought another place meanwhile
            self._positions[partition] = max(following, asked)
            if run.values:
                return run
            fruitless += 1
            if fruitless % len(self._turns) == 0:
                await self._rest(self._idle_seconds(rounds))
                rounds += 1
        return None

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass
