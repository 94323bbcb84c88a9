"""Clients that ask and are answered in order: requests are pipelined, a subscription polls.

There is one watch over a connection: an idle one is tried now and then, one that owes a reply for too long is given up.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sized
from datetime import datetime
from typing import Protocol

from headrace.clients.backoff import Backoff
from headrace.clients.messages import OnState, Start
from headrace.clients.reconnecting import Outstanding, StreamClient


class Unanswered(Outstanding, Sized, Protocol):
    """Requests without a reply."""


class RequestReplyClient(StreamClient):
    """`idle_seconds` is how often an idle connection is tried, `reply_seconds` how long the oldest request may wait."""

    def __init__(
        self, host: str, port: int, calls: Unanswered, *, idle_seconds: float, reply_seconds: float, backoff: Backoff, on_state: OnState
    ) -> None:
        super().__init__(host, port, calls, backoff=backoff, on_state=on_state)
        self._unanswered = calls
        self._idle_seconds, self._reply_seconds = idle_seconds, reply_seconds
        self._heard_at = 0.0
        self._trying: asyncio.Task[None] | None = None

    @abstractmethod
    async def ping(self) -> None: ...

    @abstractmethod
    async def first_offset(self, topic: str, *, partition: int = 0) -> int: ...

    @abstractmethod
    async def end_offset(self, topic: str, *, partition: int = 0) -> int: ...

    def _heard(self) -> None:
        self._heard_at = self._loop.time()

    def _begin_watch(self) -> None:
        """A first question goes out at once: a server that shares its port learns by it which protocol this is."""
        self._heard()
        self._try()
        self._watch()

    def _try(self) -> None:
        if len(self._unanswered) == 0 and self._trying is None:
            self._trying = self._loop.create_task(self.ping())
            self._trying.add_done_callback(self._tried)

    def _tried(self, task: asyncio.Task[None]) -> None:
        self._trying = None
        if not task.cancelled():
            task.exception()  # an error is an answer too, and a lost connection is told elsewhere

    def _watch(self) -> None:
        stream = self._stream
        assert stream is not None, "the watch stops with its connection"
        silent_seconds = self._loop.time() - self._heard_at
        if len(self._unanswered) and silent_seconds >= self._reply_seconds:
            stream.drop(f"no reply for {silent_seconds:.0f} s")
            return
        if silent_seconds >= self._idle_seconds:
            self._try()
        self._look_again(min(self._idle_seconds, self._reply_seconds) / 2, self._watch)

    async def _place(self, topic: str, partition: int, start: Start) -> int:
        """The offset that `start` means."""
        if isinstance(start, int):
            return start
        if isinstance(start, datetime):
            return await self.offset_for_time(topic, int(start.timestamp() * 1000), partition=partition)
        if start == "start":
            return await self.first_offset(topic, partition=partition)
        return await self.end_offset(topic, partition=partition)

    async def _next_to_read(self, topic: str, partition: int, offset: Start, group: str | None) -> int:
        """Where a fetch begins: at the group's committed offset where that lies behind the offset asked for."""
        known = None if group is None else await self.committed(topic, group=group, partition=partition)
        if known is not None and not isinstance(offset, int):
            return known
        return max(await self._place(topic, partition, offset), known or 0)


def check_settlement(settlement: str, group: str | None) -> None:
    if settlement == "auto" and group is None:
        raise ValueError("automatic settlement needs a group")


def check_seek(offset: int | None, timestamp: int | None) -> None:
    if (offset is None) == (timestamp is None):
        raise ValueError("seek to an offset or to a timestamp")


def poll_pause(attempt: int, seconds_min: float, seconds_max: float) -> float:
    """How long a subscription at the end of its topic waits before it asks again."""
    return min(seconds_min * 2.0 ** min(attempt, 32), seconds_max)
