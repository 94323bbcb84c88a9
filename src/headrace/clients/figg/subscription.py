"""Figg subscription: a queue of batches between the connection and the user.

While the queue is full, the client does not read the connection and the server stops sending. Nothing is dropped.
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
    """Asynchronous iterator of messages, created by `FiggClient.subscribe`."""

    def __init__(
        self, topic: str, offset: int | None, *, queue_bytes_max: int, full: Callable[[bool], None], end: Callable[[], Awaitable[None]]
    ):
        self.topic = topic
        self.gaps: list[Gap] = []
        self.resume_offset = offset
        """Offset to attach from, after the last message received. None: from the end of the log, before the first attach."""
        self._queue_bytes_max = queue_bytes_max
        self._full, self._end = full, end
        self._batches: deque[MessageBatch] = deque()
        self._queued_bytes = 0
        self._is_full = False
        self._current: MessageBatch | None = None
        self._taken = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self._failure: Exception | None = None
        self.started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Offset of the first message, once the server has reported it."""

    # Called by the client.

    def attached(self, offset: int) -> None:
        expected, self.resume_offset = self.resume_offset, offset
        if not self.started.done():
            self.started.set_result(offset)
        if expected is not None and expected != offset:
            self.gaps.append(Gap(expected, offset))

    def arrived(self, batch: DataBatch) -> None:
        """Queue received records. A Figg offset points past its message: the record offset is one less."""
        self.resume_offset = batch.offsets[-1]
        self._batches.append(MessageBatch(self.topic, PARTITION, [offset - 1 for offset in batch.offsets], batch.values))
        self._queued_bytes += _size_bytes(batch.values)
        if self._queued_bytes > self._queue_bytes_max and not self._is_full:
            self._is_full = True
            self._full(True)
        self._changed.set()

    def stop(self, failure: Exception | None = None) -> None:
        """End the iteration, with `failure` if given, and drop queued messages."""
        self._is_closed, self._failure = True, failure
        self._batches.clear()
        self._current = None
        self._queued_bytes = 0
        self._release_queue()
        if not self.started.done():
            self.started.cancel()
        self._changed.set()

    # Called by the user.

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Iterate over batches as received, which is faster. Do not mix with iterating over single messages."""
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
        """Stop following the topic and wait for the server's confirmation. Ends the iteration."""
        if not self._is_closed:
            await self._end()

    async def _next_batch(self) -> MessageBatch | None:
        while not self._batches and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            return None
        batch = self._batches.popleft()
        self._queued_bytes -= _size_bytes(batch.values)
        if self._queued_bytes <= self._queue_bytes_max // 2:
            self._release_queue()
        return batch

    def _release_queue(self) -> None:
        if self._is_full:
            self._is_full = False
            self._full(False)


def _size_bytes(values: list[bytes]) -> int:
    return sum(map(len, values)) + 64 * len(values)
