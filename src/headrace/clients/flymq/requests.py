"""Requests without a reply. FlyMQ replies in the order of the requests.

A batch of records is one entry here and has one reply per record on the wire. After a lost connection the unanswered rest is sent again
in order. Reads and commits are idempotent; records may be written twice.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace.clients.errors import OutcomeUnknown
from headrace.clients.flymq import access as flymq_access
from headrace.clients.flymq.advanced import is_unrepeatable, is_write
from headrace.clients.flymq.errors import error_of
from headrace.clients.messages import Receipt
from headrace.clients.window import Batch, Entry, Window
from headrace.errors import WireError
from headrace.wire.flymq import Dialect, Opcode, decode_reply, encode_request, opcode_of, speaks_sdk
from headrace.wire.flymq.messages import Failure, ProduceBatch, RecordMetadataBatch, ReplyEvent, ReplyFrame, Request


class PendingRequest(Entry):
    """One request and the future of its reply."""

    __slots__ = ("dialect", "frame", "is_ping", "request")

    def __init__(self, request: Request, *, is_ping: bool = False) -> None:
        self.request, self.frame = request, encode_request(request)
        super().__init__(len(self.frame))
        self.dialect = Dialect.SPEC
        self.is_ping = is_ping


class Publication(Batch):
    """A batch of records. Raises `InvalidRequest` if they do not fit in frames."""

    __slots__ = ("_encoded", "_places", "answered", "batch")

    def __init__(self, batch: ProduceBatch) -> None:
        self.batch = batch
        self._encoded: bytes | None = encode_request(batch)
        size_bytes = sum(map(len, batch.values)) + (0 if batch.keys is None else sum(map(len, filter(None, batch.keys))))
        super().__init__(len(batch), size_bytes)
        self._places: tuple[list[int], list[int], list[int]] = ([], [], [])
        """Partitions, offsets and timestamps."""
        self.answered = 0

    @property
    def records(self) -> int:
        return self.count - self.answered

    def receipts(self) -> list[Receipt]:
        return [Receipt(self.batch.topic, *place) for place in zip(*self._places, strict=True)]

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
        for places, column in zip(self._places, (rows.partitions, rows.offsets, rows.timestamps), strict=True):
            places += column[begin:stop]
        self.answered += stop - begin

    def refused(self, failure: Failure) -> None:
        self.refuse(self.answered, error_of(failure, self.batch.topic))
        self.answered += 1


Call: TypeAlias = PendingRequest | Publication


class Calls(Window[Call]):
    """Calls without a reply, oldest first."""

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
            call.placed(rows, begin, stop)
            self._answered(call, stop - begin)
            begin = stop

    def _take_reply(self, event: ReplyFrame) -> None:
        call = self._oldest()
        if isinstance(call, Publication):
            failure = decode_reply(event) if event.opcode == Opcode.ERROR else None
            if not isinstance(failure, Failure):
                raise WireError(f"PRODUCE was answered with opcode {event.opcode:#04x}")
            call.refused(failure)
            self._answered(call, 1)
            return
        if event.opcode not in (Opcode.ERROR, opcode_of(call.request)):
            raise WireError(f"{type(call.request).__name__} was answered with opcode {event.opcode:#04x}")
        call.resolve(decode_reply(event, call.dialect))
        self._entries.popleft()
        self._shrink(1, call.size_bytes)

    def _oldest(self) -> Call:
        if not self._entries or not self._entries[0].was_sent:
            raise WireError("a reply arrived without a request")
        return self._entries[0]

    def _answered(self, call: Publication, count: int) -> None:
        is_whole = not call.records
        self._shrink(count, call.size_bytes if is_whole else 0)
        if is_whole:
            self._entries.popleft()
            call.settle()

    def give_up_unrepeatable(self, *, writes: bool) -> None:
        """Fail sent calls that must not be repeated, since the server may have executed them. `writes` includes records."""

        def is_dropped(call: Call) -> bool:
            if isinstance(call, Publication):
                return call.was_sent and writes
            return call.was_sent and (
                is_unrepeatable(call.request) or flymq_access.is_unrepeatable(call.request) or (writes and is_write(call.request))
            )

        self.drop(is_dropped, lambda call: OutcomeUnknown(max(call.records, 1)))


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
