"""Requests without a reply. FlyMQ replies in the order of the requests.

A batch of records is one entry here and has one reply per record on the wire. After a lost connection the unanswered rest is sent again
in order. Reads and commits are idempotent; records may be written twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown
from headrace.clients.flymq import access as flymq_access
from headrace.clients.flymq.advanced import is_unrepeatable, is_write
from headrace.clients.flymq.errors import error_of
from headrace.errors import WireError
from headrace.wire.flymq import Dialect, Opcode, decode_reply, encode_request, opcode_of, speaks_sdk
from headrace.wire.flymq.messages import Failure, ProduceBatch, RecordMetadataBatch, Reply, ReplyEvent, ReplyFrame, Request


class PendingRequest:
    """One request and the future of its reply."""

    __slots__ = ("dialect", "frame", "reply", "request", "was_sent")
    records = 0

    def __init__(self, request: Request, frame: bytes) -> None:
        self.request, self.frame = request, frame
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.dialect = Dialect.SPEC
        self.was_sent = False

    @property
    def size_bytes(self) -> int:
        return len(self.frame)

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # retrieved: `close` reports it even if the reply is never awaited


@dataclass(slots=True)
class Places:
    """Partitions, offsets and timestamps of the records of a batch."""

    partitions: list[int]
    offsets: list[int]
    timestamps: list[int]


class Publication:
    """A batch of records and the future of their places. Raises `InvalidRequest` if they do not fit in frames."""

    __slots__ = ("_encoded", "_failure", "answered", "batch", "done", "places", "size_bytes", "was_sent")

    def __init__(self, batch: ProduceBatch) -> None:
        self.batch = batch
        self._encoded: bytes | None = encode_request(batch)
        self.size_bytes = sum(map(len, batch.values)) + (0 if batch.keys is None else sum(map(len, filter(None, batch.keys))))
        self.places = Places([], [], [])
        self.answered = 0
        self.done: asyncio.Future[Places] = asyncio.get_running_loop().create_future()
        """Places of all records, or the first error."""
        self._failure: Failure | None = None
        self.was_sent = False

    @property
    def records(self) -> int:
        """Number of records without a reply."""
        return len(self.batch) - self.answered

    def frames(self) -> bytes:
        """Return the frames of records without a reply. They are encoded again only for another connection."""
        if self._encoded is not None:
            frames, self._encoded = self._encoded, None
            return frames
        batch, begin = self.batch, self.answered
        if begin:
            keys, partitions = batch.keys and batch.keys[begin:], batch.partitions and batch.partitions[begin:]
            batch = ProduceBatch(batch.topic, batch.values[begin:], keys, partitions)
        return encode_request(batch)

    def placed(self, rows: RecordMetadataBatch, begin: int, stop: int) -> None:
        places = self.places
        places.partitions += rows.partitions[begin:stop]
        places.offsets += rows.offsets[begin:stop]
        places.timestamps += rows.timestamps[begin:stop]
        self.answered += stop - begin
        self._settle()

    def refused(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self.answered += 1
        self._settle()

    def _settle(self) -> None:
        if self.records or self.done.done():
            return
        if self._failure is None:
            self.done.set_result(self.places)
        else:
            self.fail(error_of(self._failure, self.batch.topic))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # as above


Call: TypeAlias = PendingRequest | Publication


class Calls:
    """Calls without a reply, oldest first. Bounded by records and bytes; further calls wait in FIFO order."""

    def __init__(self, *, records_max: int, bytes_max: int) -> None:
        self._records_max, self._bytes_max = records_max, bytes_max
        self._calls: deque[Call] = deque()
        self._bytes = self._weight = 0
        self._entry_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def records(self) -> int:
        """Number of unacknowledged records, sent or queued."""
        return sum(call.records for call in self._calls)

    async def enter(self, call: Call) -> None:
        """Wait for room, then queue. A call above the bounds enters when the queue is empty. Raises `ClientClosed`."""
        async with self._entry_lock:
            while not self._has_room(call) and not self._is_closed:
                self._changed.clear()
                await self._changed.wait()
            if self._is_closed:
                raise ClientClosed("the client is closed")
            self._calls.append(call)
            self._bytes += call.size_bytes
            self._weight += max(call.records, 1)

    def take(self, event: ReplyEvent) -> None:
        """Match a reply to the oldest call. Raises `WireError` if it does not belong to it."""
        if isinstance(event, RecordMetadataBatch):
            self._take_places(event)
        elif not isinstance(event, ReplyFrame):
            raise WireError(event.reason)
        elif event.opcode == Opcode.PRODUCE:
            rows = decode_reply(event)
            assert isinstance(rows, RecordMetadataBatch)
            self._take_places(rows)
        else:
            self._take_reply(event)

    def _take_places(self, rows: RecordMetadataBatch) -> None:
        begin, count = 0, len(rows)
        while begin < count:
            call = self._oldest()
            if not isinstance(call, Publication) or call.batch.topic != rows.topic:
                raise WireError(f"acknowledgement of a record that was not sent: {rows.topic}")
            stop = min(count, begin + call.records)
            self._weight -= stop - begin
            call.placed(rows, begin, stop)
            begin = stop
            self._leave_if_answered(call)

    def _take_reply(self, event: ReplyFrame) -> None:
        call = self._oldest()
        if isinstance(call, Publication):
            failure = decode_reply(event) if event.opcode == Opcode.ERROR else None
            if not isinstance(failure, Failure):
                raise WireError(f"PRODUCE was answered with opcode {event.opcode:#04x}")
            self._weight -= 1
            call.refused(failure)
            self._leave_if_answered(call)
            return
        if event.opcode not in (Opcode.ERROR, opcode_of(call.request)):
            raise WireError(f"{type(call.request).__name__} was answered with opcode {event.opcode:#04x}")
        reply = decode_reply(event, call.dialect)
        if not call.reply.done():
            call.reply.set_result(reply)
        self._weight -= 1
        self._leave()

    def _oldest(self) -> Call:
        if not self._calls or not self._calls[0].was_sent:
            raise WireError("a reply arrived without a request")
        return self._calls[0]

    def _leave_if_answered(self, call: Publication) -> None:
        if not call.records:
            self._leave()

    def _leave(self) -> None:
        self._bytes -= self._calls.popleft().size_bytes
        self._changed.set()

    def unanswered(self) -> Iterator[Call]:
        """Iterate over the calls in order."""
        return iter(self._calls)

    def give_up_unrepeatable(self, *, writes: bool) -> None:
        """Fail sent calls that must not be repeated, since the server may have executed them. `writes` includes records."""

        def is_dropped(call: Call) -> bool:
            if isinstance(call, Publication):
                return call.was_sent and writes
            return call.was_sent and (
                is_unrepeatable(call.request) or flymq_access.is_unrepeatable(call.request) or (writes and is_write(call.request))
            )

        self._drop(is_dropped, lambda call: OutcomeUnknown(max(call.records, 1)))

    def _drop(self, is_dropped: Callable[[Call], bool], reason: Callable[[Call], Exception]) -> None:
        kept: deque[Call] = deque()
        for call in self._calls:
            if is_dropped(call):
                call.fail(reason(call))
            else:
                kept.append(call)
        self._calls = kept
        self._bytes = sum(call.size_bytes for call in kept)
        self._weight = sum(max(call.records, 1) for call in kept)
        self._changed.set()

    async def emptied(self) -> None:
        """Wait until every call has a reply or the queue is closed."""
        while self._calls and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> tuple[int, int]:
        """Fail the remaining calls. Returns the number of records sent without a reply, and of records never sent."""
        self._is_closed = True
        unknown = sum(call.records for call in self._calls if call.was_sent)
        unsent = sum(call.records for call in self._calls if not call.was_sent)
        self._drop(lambda call: True, _left_open)
        return unknown, unsent

    def _has_room(self, call: Call) -> bool:
        if not self._calls:
            return True
        return self._weight + max(call.records, 1) <= self._records_max and self._bytes + call.size_bytes <= self._bytes_max


def _left_open(call: Call) -> Exception:
    if not call.records:
        return ClientClosed("the client was closed")
    return OutcomeUnknown(call.records) if call.was_sent else NotSent(call.records)


class ConnectionDialect:
    """Dialect of one connection. It changes with the first request that only the SDK dialect has."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def encode(self, call: Call) -> bytes:
        """Return the frames of a call and mark it as sent."""
        call.was_sent = True
        if isinstance(call, Publication):
            return call.frames()
        if speaks_sdk(call.request):
            self._dialect = Dialect.SDK
        call.dialect = self._dialect
        return call.frame
