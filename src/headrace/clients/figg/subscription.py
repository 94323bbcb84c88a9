"""A topic followed over Figg: runs arrive from the connection, the user takes them out at leisure.

When the user takes too long, the connection is no longer read; the server then stops sending. Nothing is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from headrace.clients.errors import NothingToSettle, NotSupported
from headrace.clients.messages import Gap, Message, MessageBatch
from headrace.wire.figg import DataBatch

PARTITION: Final = 0


class Subscription:
    """An asynchronous iterator of messages. Made by `FiggClient.subscribe`."""

    def __init__(
        self, topic: str, offset: int | None, *, queue_bytes_max: int, full: Callable[[bool], None], end: Callable[[], Awaitable[None]]
    ):
        self.topic = topic
        self.gaps: list[Gap] = []
        self.resume_offset = offset
        """The offset to attach from: past the last message received; None: from the end of the log, as long as nothing was attached."""
        self._queue_bytes_max = queue_bytes_max
        self._full, self._end = full, end
        self._runs: deque[MessageBatch] = deque()
        self._queued_bytes = 0
        self._is_full = False
        self._current: MessageBatch | None = None
        self._taken = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The offset of the first message to come, once the server has said so."""

    # What the client tells us.

    def attached(self, offset: int) -> None:
        asked, self.resume_offset = self.resume_offset, offset
        if not self.started.done():
            self.started.set_result(offset)
        if asked is not None and asked != offset:
            self.gaps.append(Gap(asked, offset))

    def arrived(self, batch: DataBatch) -> None:
        """A Figg offset points past its message, so the record offset is one less."""
        self.resume_offset = batch.offsets[-1]
        self._runs.append(MessageBatch(self.topic, PARTITION, [offset - 1 for offset in batch.offsets], batch.values))
        self._queued_bytes += _size_bytes(batch.values)
        if self._queued_bytes > self._queue_bytes_max and not self._is_full:
            self._is_full = True
            self._full(True)
        self._changed.set()

    def stop(self) -> None:
        """Nothing more will come, and nothing that waits is given out."""
        self._is_closed = True
        self._runs.clear()
        self._current = None
        self._queued_bytes = 0
        self._room_again()
        if not self.started.done():
            self.started.cancel()
        self._changed.set()

    # What the user does.

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Messages as they arrive, in runs: the fast way. Do not mix with iterating over single messages."""
        while (batch := await self._next_batch()) is not None:
            yield batch

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        while self._current is None or self._taken == len(self._current):
            self._current, self._taken = await self._next_batch(), 0
            if self._current is None:
                raise StopAsyncIteration
        batch, index = self._current, self._taken
        self._taken += 1
        return batch.message(index)

    async def commit(self) -> None:
        raise NothingToSettle(self.topic)

    def seek(self, offset: int, *, partition: int = 0) -> None:
        raise NotSupported("Figg", "moving a subscription", "close it and subscribe from the offset")

    async def close(self) -> None:
        """Stop following the topic; returns when the server has said so. The iteration ends."""
        if not self._is_closed:
            await self._end()

    async def _next_batch(self) -> MessageBatch | None:
        while not self._runs and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            return None
        batch = self._runs.popleft()
        self._queued_bytes -= _size_bytes(batch.values)
        if self._queued_bytes <= self._queue_bytes_max // 2:
            self._room_again()
        return batch

    def _room_again(self) -> None:
        if self._is_full:
            self._is_full = False
            self._full(False)


def _size_bytes(values: list[bytes]) -> int:
    return sum(map(len, values)) + 64 * len(values)
