"""Requests on their way to a RustLog server and back: replies come in the order of the requests, that is how they are matched.

What has no reply when a connection is lost is sent again on the next one, in order. For reads and commits that changes nothing; records
may be written twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown
from headrace.wire.rustlog import Reply, Request
from headrace.wire.rustlog.messages import Ping


@dataclass(slots=True)
class Call:
    """One request and the promise of its reply."""

    request: Request
    frame: bytes
    records: int
    """How many records it would write."""
    reply: asyncio.Future[Reply]
    was_sent: bool = False

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # whoever does not await its reply hears of it from the client's `close`


class Calls:
    """All requests without a reply, oldest first. Bounded by count and by bytes; whoever asks for more waits in line."""

    def __init__(self, *, calls_max: int, bytes_max: int) -> None:
        self._calls_max, self._bytes_max = calls_max, bytes_max
        self._calls: deque[Call] = deque()
        self._bytes = 0
        self._in_line = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def records(self) -> int:
        """Records sent or about to be, and not acknowledged."""
        return sum(call.records for call in self._calls)

    async def enter(self, request: Request, frame: bytes, records: int) -> Call:
        """Wait for room, then take a place. A frame larger than all room enters when there is nothing else. Raises `ClientClosed`."""
        async with self._in_line:
            while not self._has_room(len(frame)) and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
            if self._is_closed:
                raise ClientClosed("the client is closed")
            call = Call(request, frame, records, asyncio.get_running_loop().create_future())
            self._calls.append(call)
            self._bytes += len(frame)
            return call

    def oldest(self) -> Call | None:
        """The one the next reply belongs to."""
        return self._calls[0] if self._calls and self._calls[0].was_sent else None

    def answered(self, reply: Reply) -> None:
        """The oldest has its reply."""
        call = self._calls.popleft()
        self._bytes -= len(call.frame)
        if not call.reply.done():
            call.reply.set_result(reply)
        self._changed.set()

    def unanswered(self) -> Iterator[Call]:
        """In order."""
        return iter(self._calls)

    def give_up_writes(self) -> None:
        """Fail the writes that were sent: the server may have carried them out, and they must not be sent again."""
        for call in self._calls:
            if call.was_sent and call.records:
                call.fail(OutcomeUnknown(call.records))
        self._calls = deque(call for call in self._calls if not (call.was_sent and call.records))
        self._bytes = sum(len(call.frame) for call in self._calls)
        self._changed.set()

    async def emptied(self) -> None:
        """Wait until no request but a ping is without a reply, or everything was closed."""
        while not self._is_closed and any(not isinstance(call.request, Ping) for call in self._calls):
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> tuple[int, int]:
        """Fail what is left. Returns how many records were sent without an answer, and how many were never sent."""
        self._is_closed = True
        self._changed.set()
        unknown = unsent = 0
        for call in self._calls:
            if not call.records:
                call.fail(ClientClosed("the client was closed"))
            elif call.was_sent:
                unknown += call.records
                call.fail(OutcomeUnknown(call.records))
            else:
                unsent += call.records
                call.fail(NotSent(call.records))
        self._calls.clear()
        self._bytes = 0
        return unknown, unsent

    def _has_room(self, size_bytes: int) -> bool:
        return not self._calls or (len(self._calls) < self._calls_max and self._bytes + size_bytes <= self._bytes_max)
