"""Requests without a reply, and errors in replies. RustLog replies in the order of the requests.

After a lost connection they are sent again in order. Reads and commits are idempotent; records may be written twice.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown, Refused
from headrace.errors import (
    InvalidRequest,
    InvalidTopicName,
    NotAuthorized,
    OffsetOutOfRange,
    TopicExists,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from headrace.wire.rustlog import Reply, Request
from headrace.wire.rustlog import errors as codes
from headrace.wire.rustlog.messages import ErrorReply, Ping

_OUT_OF_RANGE: Final = re.compile(r"offset out of range: requested (\d+), partition base (\d+)$")
_NOT_AUTHORIZED: Final = re.compile(r"not authorized: (.*) may not (\w+) (.*)$", re.DOTALL)
_END_UNKNOWN: Final = 2**63 - 1
"""The server reports the first offset but not the end offset."""


@dataclass(slots=True)
class Call:
    """One request and the future of its reply."""

    request: Request
    frame: bytes
    records: int
    """Number of records to write."""
    reply: asyncio.Future[Reply]
    was_sent: bool = False

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # retrieved: `close` reports it even if the reply is never awaited


class Calls:
    """Requests without a reply, oldest first. Bounded by count and bytes; further requests wait in FIFO order."""

    def __init__(self, *, calls_max: int, bytes_max: int) -> None:
        self._calls_max, self._bytes_max = calls_max, bytes_max
        self._calls: deque[Call] = deque()
        self._bytes = 0
        self._entry_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def records(self) -> int:
        """Number of unacknowledged records, sent or queued."""
        return sum(call.records for call in self._calls)

    async def enter(self, request: Request, frame: bytes, records: int) -> Call:
        """Wait for room, then queue. A frame above the bound enters when the queue is empty. Raises `ClientClosed`."""
        async with self._entry_lock:
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
        """Return the request that the next reply belongs to."""
        return self._calls[0] if self._calls and self._calls[0].was_sent else None

    def answered(self, reply: Reply) -> None:
        """Complete the oldest request."""
        call = self._calls.popleft()
        self._bytes -= len(call.frame)
        if not call.reply.done():
            call.reply.set_result(reply)
        self._changed.set()

    def unanswered(self) -> Iterator[Call]:
        """Iterate over the requests in order."""
        return iter(self._calls)

    def give_up_writes(self) -> None:
        """Fail sent writes instead of sending them again: the server may have executed them."""
        for call in self._calls:
            if call.was_sent and call.records:
                call.fail(OutcomeUnknown(call.records))
        self._calls = deque(call for call in self._calls if not (call.was_sent and call.records))
        self._bytes = sum(len(call.frame) for call in self._calls)
        self._changed.set()

    async def emptied(self) -> None:
        """Wait until only pings are without a reply, or the queue is closed."""
        while not self._is_closed and any(not isinstance(call.request, Ping) for call in self._calls):
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> tuple[int, int]:
        """Fail the remaining requests. Returns the number of records sent without a reply, and of records never sent."""
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


def raise_error(request: Request, error: ErrorReply) -> NoReturn:
    """Raise the matching broker error, or `Refused` with the server's text. JSON errors have no codes: the text decides."""
    text, code = error.message, error.code
    topic, partition = getattr(request, "topic", ""), getattr(request, "partition", 0)
    if code == codes.NO_PARTITION or (code == 0 and text.startswith(codes.JSON_NO_PARTITION)):
        raise UnknownPartition(topic, partition)
    if found := _OUT_OF_RANGE.search(text):
        raise OffsetOutOfRange(wanted=int(found[1]), first=int(found[2]), end=_END_UNKNOWN)
    if code == codes.TOPIC_EXISTS or (code == 0 and text == codes.topic_exists(topic).message):
        raise TopicExists(topic)
    if text.startswith("DescribeTopic failed: "):
        raise UnknownTopic(topic)
    if text.startswith("DescribePartition failed: "):
        raise UnknownPartition(topic, partition)
    if text.startswith("Invalid topic name: "):
        raise InvalidTopicName(text)
    if text.startswith("Invalid partition count: "):
        raise InvalidRequest(text)
    if found := _NOT_AUTHORIZED.match(text):
        raise NotAuthorized(principal=found[1], action=found[2], resource=found[3])
    if code == codes.UNAVAILABLE:
        raise Unavailable(text)
    raise Refused(code=code, text=text)
