"""Base of clients whose replies arrive in the order of requests: requests are pipelined, subscriptions poll.

A timer probes an idle connection and drops one whose oldest request has waited too long.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sized
from datetime import datetime
from typing import Protocol

from headrace.clients.messages import OnState, Start, check_start
from headrace.clients.reconnecting import Outstanding, StreamClient
from headrace.retry import Backoff


class Unanswered(Outstanding, Sized, Protocol):
    """Requests without a reply, with their number."""


class RequestReplyClient(StreamClient):
    """Request-reply client. `idle_seconds`: interval of probes when idle. `reply_seconds`: longest wait for a reply."""

    def __init__(
        self, host: str, port: int, calls: Unanswered, *, idle_seconds: float, reply_seconds: float, backoff: Backoff, on_state: OnState
    ) -> None:
        super().__init__(host, port, calls, backoff=backoff, on_state=on_state)
        self._unanswered = calls
        self._idle_seconds, self._reply_seconds = idle_seconds, reply_seconds
        self._received_at = 0.0
        self._probing: asyncio.Task[None] | None = None

    @abstractmethod
    async def ping(self) -> None: ...

    @abstractmethod
    async def first_offset(self, topic: str, *, partition: int = 0) -> int: ...

    @abstractmethod
    async def end_offset(self, topic: str, *, partition: int = 0) -> int: ...

    def _note_received(self) -> None:
        self._received_at = self._loop.time()

    def _begin_watch(self) -> None:
        """Start the timer and send a first request: a server with a shared port detects the protocol by it."""
        self._note_received()
        self._probe()
        self._watch()

    def _probe(self) -> None:
        if len(self._unanswered) == 0 and self._probing is None:
            self._probing = self._loop.create_task(self.ping())
            self._probing.add_done_callback(self._probed)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if not task.cancelled():
            task.exception()  # an error is a reply too; `_lost` handles a lost connection

    def _watch(self) -> None:
        stream = self._stream
        assert stream is not None, "the timer stops with its connection"
        silent_seconds = self._loop.time() - self._received_at
        if len(self._unanswered) and silent_seconds >= self._reply_seconds:
            stream.drop(f"no reply for {silent_seconds:.0f} s")
            return
        if silent_seconds >= self._idle_seconds:
            self._probe()
        self._schedule(min(self._idle_seconds, self._reply_seconds) / 2, self._watch)

    async def _place(self, topic: str, partition: int, start: Start) -> int:
        """Return the offset of a start position."""
        check_start(start)
        if isinstance(start, int):
            return start
        if isinstance(start, datetime):
            return await self.offset_for_time(topic, int(start.timestamp() * 1000), partition=partition)
        if start == "earliest":
            return await self.first_offset(topic, partition=partition)
        return await self.end_offset(topic, partition=partition)

    async def _next_to_read(self, topic: str, partition: int, offset: Start, group: str | None) -> int:
        """Return where a fetch begins: the requested offset, or the group's committed offset if that is higher."""
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
    """Return the delay before the next poll of a subscription that has read everything."""
    return min(seconds_min * 2.0 ** min(attempt, 32), seconds_max)
