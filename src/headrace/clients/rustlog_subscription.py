"""A partition followed over RustLog: the protocol only answers questions, so the client keeps asking, less often while nothing comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from headrace.clients.errors import ClientClosed
from headrace.clients.messages import Message, MessageRun
from headrace.errors import OffsetOutOfRange

Settlement: TypeAlias = Literal["explicit", "auto"]
"""Who commits a group's progress: the user, or the iteration itself when it asks for what follows."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Retention overtook the reader: it asked for `asked` and went on at `got`."""

    asked: int
    got: int


class Source(Protocol):
    """What a subscription needs of its client."""

    def read(self, topic: str, partition: int, offset: int, max_bytes: int) -> Awaitable[tuple[MessageRun, int]]:
        """The records, and where to read on."""

    def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> Awaitable[None]: ...


class Subscription:
    """An asynchronous iterator of messages. Made by `RustLogClient.subscribe`."""

    def __init__(
        self,
        source: Source,
        topic: str,
        partition: int,
        position: int,
        *,
        group: str | None,
        settlement: Settlement,
        max_bytes: int,
        idle_seconds: Callable[[int], float],
    ) -> None:
        self.topic, self.partition, self.group = topic, partition, group
        self.gaps: list[Gap] = []
        self._source = source
        self._position = position
        self._settlement = settlement
        self._max_bytes = max_bytes
        self._idle_seconds = idle_seconds
        self._current: MessageRun | None = None
        self._taken = 0
        self._handed_out: int | None = None
        """One more than the offset of the last message the user was given; None: nothing since the last commit."""
        self._closed = asyncio.Event()

    @property
    def position(self) -> int:
        """The offset of the next message the user will be given."""
        if self._current is not None and self._taken < len(self._current):
            return self._current.offsets[self._taken]
        return self._position

    def seek(self, offset: int) -> None:
        """Go on from another offset; what was fetched and not taken is dropped."""
        self._current, self._taken, self._position = None, 0, offset

    async def commit(self) -> None:
        """The group has dealt with everything it was given: it will go on behind that. Raises `ValueError` without a group."""
        if self.group is None:
            raise ValueError("a subscription without a group has nothing to commit to")
        if self._handed_out is not None:
            offset, self._handed_out = self._handed_out, None
            await self._source.commit(self.topic, offset, group=self.group, partition=self.partition)

    async def runs(self) -> AsyncIterator[MessageRun]:
        """Messages in runs, as they are fetched: the fast way. Do not mix with iterating over single messages."""
        while (run := await self._next_run()) is not None:
            self._handed_out = run.offsets[-1] + 1
            yield run

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        while self._current is None or self._taken == len(self._current):
            run = await self._next_run()
            if run is None:
                raise StopAsyncIteration
            self._current, self._taken = run, 0
        run, index = self._current, self._taken
        self._taken += 1
        self._handed_out = run.offsets[index] + 1
        return Message(run.topic, run.partition, run.offsets[index], run.values[index])

    async def close(self) -> None:
        """End the iteration. With automatic settlement everything the user was given is committed first."""
        if not self._closed.is_set():
            self._closed.set()
            if self._settlement == "auto":
                await self.commit()

    async def _next_run(self) -> MessageRun | None:
        try:
            if self._settlement == "auto":
                await self.commit()
            attempt = 0
            while not self._closed.is_set():
                run = await self._read()
                if run is not None:
                    return run
                await self._rest(self._idle_seconds(attempt))
                attempt += 1
        except ClientClosed:
            self._closed.set()
        return None

    async def _read(self) -> MessageRun | None:
        """What there is at the position; None if there is nothing yet."""
        while True:
            asked = self._position
            try:
                run, following = await self._source.read(self.topic, self.partition, asked, self._max_bytes)
            except OffsetOutOfRange as error:
                if error.first <= asked:
                    raise
                self.gaps.append(Gap(asked, error.first))
                self._position = error.first
                continue
            if self._position != asked:
                continue  # somebody sought another place meanwhile
            # Never back: an empty reply names the end of the log, which may lie before an offset that is yet to come.
            self._position = max(asked, following)
            return run if run.values else None

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass
