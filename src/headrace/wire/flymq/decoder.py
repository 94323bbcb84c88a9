"""Decoder of FlyMQ messages for both roles.

`feed` accepts bytes cut anywhere and returns the complete messages. A frame that cannot be decoded is a `Malformed`, and the stream
continues after it. A stream that cannot be decoded further ends with one `Broken`, after which all bytes are ignored. Only received
bytes are stored: the length in a header allocates nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar

from headrace.errors import WireError
from headrace.limits import FLYMQ_LOOP_INFLATED_BYTES_TOTAL, FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire.flymq import transactions
from headrace.wire.flymq.advanced_messages import DelayedBatch, TxnBeginBatch, TxnProduceBatch, TxnWholeBatch
from headrace.wire.flymq.framing import COMPRESSION_MASK, GZIP, HEADER, HEADER_BYTES, MAGIC, VERSION, InflatedTooLarge, inflate
from headrace.wire.flymq.many import MANY_MIN, take_many
from headrace.wire.flymq.messages import (
    Broken,
    CommitBatch,
    Malformed,
    Packed,
    ProduceBatch,
    ReplyEvent,
    ReplyFrame,
    RequestEvent,
    UnknownOpcode,
)
from headrace.wire.flymq.opcodes import Opcode
from headrace.wire.flymq.produce import read_produce, take_batch, take_metadata
from headrace.wire.flymq.reader import Reader
from headrace.wire.flymq.table import BY_OPCODE
from headrace.wire.flymq.timed import take_commits, take_timed

E = TypeVar("E")

_Taken: TypeAlias = ProduceBatch | TxnProduceBatch | TxnWholeBatch | TxnBeginBatch | DelayedBatch | CommitBatch
_TAKERS: Final[dict[int, Callable[[bytes, int, int], tuple[_Taken | None, int]]]] = {
    Opcode.PRODUCE: take_batch,
    Opcode.TXN_BEGIN: transactions.take_begins,
    Opcode.TXN_PRODUCE: transactions.take_whole,
    Opcode.COMMIT: take_commits,
    Opcode.PRODUCE_DELAYED: take_timed,
    Opcode.PRODUCE_WITH_TTL: take_timed,
}
"""Decoders of batches, by opcode."""

_STRAY: Final = b"\xff\xff\xff\xff"
"""The partition −1 that the specification's example sends after a frame whose length does not count it."""


def _front_fault(buffer: bytes, position: int, end: int) -> Broken | None:
    """Return the error in the header at `position`, as far as it is received: magic, then version, then length."""
    if buffer[position] != MAGIC:
        return Broken(f"magic byte {buffer[position]:#04x} is wrong: expected 0xaf")
    if end - position > 1 and buffer[position + 1] != VERSION:
        version = buffer[position + 1]
        return Broken(f"protocol version {version} is not supported", f"unsupported protocol version: {version}")
    if end - position >= HEADER_BYTES:
        length = HEADER.unpack_from(buffer, position)[4]
        if length > FLYMQ_PAYLOAD_BYTES_MAX:
            text = f"message too large: {length} bytes, at most {FLYMQ_PAYLOAD_BYTES_MAX}"
            return Broken(text, text)
    return None


class _Decoder(ABC, Generic[E]):
    """Splits a stream into frames."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._wanted = 0
        self._broken = False
        self.more = False
        """Complete frames are left, and `feed(b"")` continues. The caller should first handle the messages it has."""

    @property
    def held_bytes(self) -> int:
        """Bytes received of an incomplete frame."""
        return len(self._held)

    @property
    def held(self) -> bytes:
        """The bytes received after the last message returned."""
        return bytes(self._held)

    def feed(self, chunk: bytes) -> list[E | Broken]:
        if self._broken:
            return []
        buffer = self._join(chunk)
        if buffer is None:
            return []
        self.more = False
        events: list[E | Broken] = []
        position, end, wanted = 0, len(buffer), 0
        while position < end and not self.more:
            if buffer[position] != MAGIC:
                ahead = self._skip(buffer, position, end)
                if ahead is None:
                    break
                if ahead > position:
                    position = ahead
                    continue
            length = -1
            if end - position >= HEADER_BYTES and buffer[position] == MAGIC and buffer[position + 1] == VERSION:
                length = int.from_bytes(buffer[position + 4 : position + HEADER_BYTES], "big")
            if not 0 <= length <= FLYMQ_PAYLOAD_BYTES_MAX:
                fault = _front_fault(buffer, position, end)
                if fault is not None:
                    self._broken = True
                    events.append(fault)
                    return events
                break
            if end - position < HEADER_BYTES + length:
                wanted = HEADER_BYTES + length
                break
            opcode, flags = buffer[position + 2], buffer[position + 3]
            position = self._take(buffer, position, end, opcode, flags, position + HEADER_BYTES + length, events)
        if position < end:
            self._held += memoryview(buffer)[position:]
            self._wanted = wanted
        return events

    def _join(self, chunk: bytes) -> bytes | None:
        """Return all bytes, or None while a frame is incomplete, so that its bytes are not copied for every chunk."""
        if not self._held:
            return chunk
        if len(self._held) + len(chunk) < self._wanted:
            self._held += chunk
            return None
        joined = b"".join((self._held, chunk))
        self._held.clear()
        return joined

    def _skip(self, buffer: bytes, position: int, end: int) -> int | None:
        """Return the position after bytes that belong to no frame. None: too few bytes to tell. The first of them is not the magic."""
        return position

    @abstractmethod
    def _take(self, buffer: bytes, position: int, end: int, opcode: int, flags: int, behind: int, events: list[E | Broken]) -> int:
        """Decode the complete frame at `position` (it ends at `behind`), or a batch of frames. Return the position to continue from."""


class RequestDecoder(_Decoder[RequestEvent]):
    """Server side. A compressed payload that exceeds `inflated_bytes_max` becomes a `Packed`. Without such a limit it is decompressed
    here."""

    def __init__(self, inflated_bytes_max: int | None = None) -> None:
        super().__init__()
        self.inflated_bytes_max = inflated_bytes_max
        self._stray_allowed = False
        self._inflated = 0

    def feed(self, chunk: bytes) -> list[RequestEvent]:
        self._inflated = 0
        return super().feed(chunk)

    def _skip(self, buffer: bytes, position: int, end: int) -> int | None:
        """Skip the unexpected partition where it is possible. Anything else that starts with 0xFF is no frame."""
        if not self._stray_allowed or buffer[position] != _STRAY[0]:
            return position
        if _STRAY.startswith(buffer[position : position + len(_STRAY)]):
            if end - position < len(_STRAY):
                return None
            self._stray_allowed = False
            return position + len(_STRAY)
        return position

    def _take(self, buffer: bytes, position: int, end: int, opcode: int, flags: int, behind: int, events: list[RequestEvent]) -> int:
        self._stray_allowed = False
        compressed = flags & COMPRESSION_MASK
        take = _TAKERS.get(opcode)
        if take is not None and not compressed:
            batch, ahead = take(buffer, position, end)
            if opcode == Opcode.PRODUCE and ahead < end and batch is not None and len(batch) < MANY_MIN:
                many, behind_many = take_many(buffer, position, end)
                if many is not None:
                    events.append(many)
                    return behind_many
            if batch is not None:
                _add(events, batch)
                return ahead
        begin = position + HEADER_BYTES
        try:
            if not compressed:
                reader = Reader(buffer, begin, behind)
            else:
                total_max = FLYMQ_PAYLOAD_BYTES_MAX if self.inflated_bytes_max is None else FLYMQ_LOOP_INFLATED_BYTES_TOTAL
                if self._inflated >= total_max:
                    self.more = True
                    return position
                reader = Reader(self._inflate(buffer[begin:behind], compressed))
            _add(events, self._read(opcode, reader))
        except InflatedTooLarge as too_large:
            events.append(Malformed(opcode, str(too_large)) if self.inflated_bytes_max is None else Packed(opcode, buffer[begin:behind]))
            self._stray_allowed = opcode == Opcode.PRODUCE
        except WireError as error:
            events.append(Malformed(opcode, str(error)))
        return behind

    def unpacked(self, opcode: int, plain: bytes) -> RequestEvent:
        """Decode the request of a `Packed` frame from its decompressed payload."""
        allowed = self._stray_allowed  # the stream has continued since
        try:
            return self._read(opcode, Reader(plain))
        except WireError as error:
            return Malformed(opcode, str(error))
        finally:
            self._stray_allowed = allowed

    def _inflate(self, payload: bytes, compression: int) -> bytes:
        """Limit what one call of `feed` decompresses: its bytes may hold several compression bombs."""
        if compression != GZIP:
            raise WireError(f"compression {compression:#04x} is not supported")
        bytes_max = FLYMQ_PAYLOAD_BYTES_MAX if self.inflated_bytes_max is None else self.inflated_bytes_max
        charge = bytes_max
        try:
            plain = inflate(payload, bytes_max)
            charge = len(plain)
        finally:
            self._inflated += charge
        return plain

    def _read(self, opcode: int, reader: Reader) -> RequestEvent:
        if opcode == Opcode.PRODUCE:
            batch, named = read_produce(reader)
            self._stray_allowed = not named
            return batch
        row = BY_OPCODE.get(opcode)
        if row is None:
            return UnknownOpcode(opcode)
        event: RequestEvent = row.request.read(reader)
        return event


def _add(events: list[RequestEvent], event: RequestEvent) -> None:
    """Join adjacent records for one topic into one batch."""
    last = events[-1] if events else None
    if isinstance(last, ProduceBatch) and isinstance(event, ProduceBatch) and last.topic == event.topic and last.ttls is event.ttls is None:
        last.extend(event)
        return
    if isinstance(last, TxnProduceBatch) and isinstance(event, TxnProduceBatch):
        is_same = (last.transaction, last.topic) == (event.transaction, event.topic)
        if is_same:
            last.extend(event)
            return
    events.append(event)


class ReplyDecoder(_Decoder[ReplyEvent]):
    """Client side. RecordMetadata is decoded in batches. Other replies are decoded by the caller, who knows the request."""

    def _take(self, buffer: bytes, position: int, end: int, opcode: int, flags: int, behind: int, events: list[ReplyEvent]) -> int:
        if opcode == Opcode.PRODUCE:
            batch, ahead = take_metadata(buffer, position, end)
            if batch is not None:
                events.append(batch)
                return ahead
        events.append(ReplyFrame(opcode, buffer[position + HEADER_BYTES : behind]))
        return behind
