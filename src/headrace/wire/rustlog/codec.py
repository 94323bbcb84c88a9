"""Codec for both roles: a server feeds a `RequestDecoder`, a client feeds a `ReplyDecoder`.

The first byte of a payload selects the dialect of that frame and of its reply:

    01 to 08, ff                                   binary
    09                                             binary if the frame is that one byte (metrics), else a TAB before JSON
    { " [ space LF CR                              JSON
    anything else                                  an error, in the connection's last dialect; JSON if there was none

Frames: a length and a payload, in both dialects and both directions.

    0          4
    +----------+-----------+
    | length   | payload   |     length counts the payload, 1 to 10,485,760; big-endian
    | u32      |           |
    +----------+-----------+

The reader checks the length as soon as its four bytes are received and allocates nothing for it. A wrong length ends the stream, because
the start of the next frame is unknown.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

from headrace.errors import LimitExceeded
from headrace.limits import (
    RUSTLOG_DECODE_STEP_BYTES,
    RUSTLOG_ERROR_CHARS_MAX,
    RUSTLOG_FRAME_BYTES_MAX,
    RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX,
    RUSTLOG_PRODUCE_RECORDS_MAX,
)
from headrace.wire.rustlog import binary, json
from headrace.wire.rustlog import errors as errors
from headrace.wire.rustlog.messages import Dialect, ErrorReply, FetchReply, Produce, Reply, Request, Undecodable

LENGTH = struct.Struct(">I")
assert LENGTH.size == 4, "the drawing says 4"


@dataclass(slots=True)
class BadLength:
    """The length word that ended the stream, and the largest length the peer may send."""

    length: int
    length_max: int = RUSTLOG_FRAME_BYTES_MAX


class FrameReader:
    """Splits a stream into payloads. `has_rights` is called for every frame above `RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX`."""

    __slots__ = ("_has_rights", "_held", "_needed", "ended")

    def __init__(self, has_rights: Callable[[], bool] = lambda: True) -> None:
        self._has_rights = has_rights
        self._held = bytearray()
        self._needed = 0
        self.ended = False

    @property
    def held_bytes(self) -> int:
        """Bytes received of a frame that is not complete."""
        return len(self._held)

    @property
    def held(self) -> bytes:
        return bytes(self._held)

    def feed(self, data: bytes) -> list[bytes | BadLength]:
        """Return the payloads that are complete. A `BadLength` is always the last one."""
        if self.ended:
            return []
        if self._held:
            if len(self._held) + len(data) < self._needed:
                self._held += data
                return []
            data = b"".join((self._held, data))
            self._held.clear()
        payloads: list[bytes | BadLength] = []
        at, end = 0, len(data)
        self._needed = LENGTH.size
        while end - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            length_max = self._length_max(length)
            if not 1 <= length <= length_max:
                self.ended = True
                payloads.append(BadLength(length, length_max))
                return payloads
            start = at + LENGTH.size
            if end - start < length:
                self._needed = LENGTH.size + length
                break
            at = start + length
            payloads.append(data[start:at])
        self._held += data[at:]
        return payloads

    def _length_max(self, length: int) -> int:
        if length <= RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX or self._has_rights():
            return RUSTLOG_FRAME_BYTES_MAX
        return RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX


def frame(payload: bytes) -> bytes:
    """Return one frame. The caller guarantees the size of the payload."""
    assert 1 <= len(payload) <= RUSTLOG_FRAME_BYTES_MAX
    return LENGTH.pack(len(payload)) + payload


_TAB: Final = 0x09
_JSON_STARTS: Final = frozenset(b'{"[ \t\r\n')

_decode_reply: Final[dict[Dialect, Callable[[bytes], Reply]]] = {Dialect.JSON: json.decode_reply, Dialect.BINARY: binary.decode_reply}
_encode_request: Final[dict[Dialect, Callable[[Request], bytes]]] = {
    Dialect.JSON: json.encode_request,
    Dialect.BINARY: binary.encode_request,
}
_produced_record_bytes: Final[dict[Dialect, Callable[[bytes], int]]] = {
    Dialect.JSON: json.produced_record_bytes,
    Dialect.BINARY: binary.produced_record_bytes,
}


def dialect_of(payload: bytes, *, binary_starts: frozenset[int] = binary.REQUESTS) -> Dialect | None:
    """Return the dialect of a non-empty payload, or None if its first byte belongs to neither."""
    first = payload[0]
    if first == _TAB:
        return Dialect.BINARY if len(payload) == 1 else Dialect.JSON
    if first in binary_starts:
        return Dialect.BINARY
    return Dialect.JSON if first in _JSON_STARTS else None


@dataclass(slots=True, init=False)
class Received:
    """A request and the dialect of its reply."""

    dialect: Dialect
    request: Request

    def __init__(self, dialect: Dialect, request: Request) -> None:
        self.dialect, self.request = dialect, request


@dataclass(slots=True)
class Refused:
    """A frame that is no request. The server sends the error, and closes the connection if it is `fatal`."""

    dialect: Dialect
    error: ErrorReply
    fatal: bool = False


@dataclass(slots=True)
class Deferred:
    """A JSON payload above `RUSTLOG_DECODE_STEP_BYTES`. `decode_in_steps` decodes it."""

    dialect: Dialect
    payload: bytes


Incoming: TypeAlias = Received | Refused | Deferred


class RequestDecoder:
    """The server's side of a connection. Never raises: a frame that is no request becomes `Refused`, in its place among the requests.

    `has_rights` tells whether the peer may send large frames. With `defers_large`, large JSON payloads are returned as `Deferred`.
    """

    __slots__ = ("_defers_large", "_dialect", "_frames")

    def __init__(self, has_rights: Callable[[], bool] = lambda: True, *, defers_large: bool = False) -> None:
        self._frames = FrameReader(has_rights)
        self._defers_large = defers_large
        self._dialect = Dialect.JSON

    @property
    def held_bytes(self) -> int:
        """Bytes received of an incomplete frame."""
        return self._frames.held_bytes

    @property
    def held(self) -> bytes:
        return self._frames.held

    def feed(self, data: bytes) -> list[Incoming]:
        return [self._incoming(payload) for payload in self._frames.feed(data)]

    def _incoming(self, payload: bytes | BadLength) -> Incoming:
        if isinstance(payload, BadLength):
            return Refused(self._dialect, errors.bad_length(self._dialect, payload.length, payload.length_max), fatal=True)
        dialect = dialect_of(payload)
        if dialect is None:
            return Refused(self._dialect, errors.undecodable(self._dialect, f"unknown request type: {payload[0]}"))
        self._dialect = dialect
        if self._defers_large and dialect is Dialect.JSON and len(payload) > RUSTLOG_DECODE_STEP_BYTES:
            return Deferred(dialect, payload)
        try:
            # An `Enum` as the key of a dict costs as much as decoding a short request.
            decode = json.decode_request if dialect is Dialect.JSON else binary.decode_request
            return Received(dialect, decode(payload))
        except Undecodable as error:
            return Refused(dialect, errors.undecodable(dialect, str(error)))


def decode_in_steps(deferred: Deferred) -> Generator[None, None, Received | Refused]:
    """Decode a large payload, and yield after each bounded step."""
    try:
        request = yield from json.decode_request_in_steps(deferred.payload)
    except Undecodable as error:
        return Refused(Dialect.JSON, errors.undecodable(Dialect.JSON, str(error)))
    return Received(Dialect.JSON, request)


class ReplyDecoder:
    """Client side of a connection. Raises `Undecodable` for an invalid reply; the stream cannot be used after that."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames = FrameReader()

    def feed(self, data: bytes) -> list[Reply]:
        return [self._reply(payload) for payload in self._frames.feed(data)]

    def _reply(self, payload: bytes | BadLength) -> Reply:
        if isinstance(payload, BadLength):
            raise Undecodable(f"frame length {payload.length} is not in 1 to {RUSTLOG_FRAME_BYTES_MAX}")
        dialect = Dialect.BINARY if payload[0] == _TAB else dialect_of(payload, binary_starts=binary.REPLIES)
        if dialect is None:
            raise Undecodable(f"unknown response type: {payload[0]}")
        return _decode_reply[dialect](payload)


def encode_request(dialect: Dialect, request: Request) -> bytes:
    """Return one frame. Raises `InvalidRequest` for a value that the dialect cannot express, `LimitExceeded` if it fits no frame."""
    payload = _encode_request[dialect](request)
    if len(payload) > RUSTLOG_FRAME_BYTES_MAX:
        raise LimitExceeded(f"{type(request).__name__} of {len(payload)} bytes exceeds the frame of {RUSTLOG_FRAME_BYTES_MAX} bytes")
    return frame(payload)


def encode_reply(dialect: Dialect, reply: Reply) -> bytes:
    """Return one frame. A long error text is truncated. Every other reply must fit, see `fetch_reply`."""
    if isinstance(reply, ErrorReply) and len(reply.message) > RUSTLOG_ERROR_CHARS_MAX:
        reply = ErrorReply(reply.message[: RUSTLOG_ERROR_CHARS_MAX - 1] + "…", reply.code)
    if dialect is Dialect.JSON:
        return frame(json.encode_reply(reply))
    if isinstance(reply, FetchReply) and (page := binary.encode_page(reply)) is not None:
        return page
    return frame(binary.encode_reply(reply))


# Frame sizes.

FETCH_BYTES_MAX: Final[dict[Dialect, int]] = {Dialect.JSON: RUSTLOG_FRAME_BYTES_MAX // 2, Dialect.BINARY: RUSTLOG_FRAME_BYTES_MAX}
"""Maximum payload of a reply: JSON needs at least a digit and a comma for each byte. Reading more would be useless."""

_BINARY_ACCOUNTED_OVERHEAD: Final = 12
"""The original counts 12 bytes for each record in addition to its payload. The specification counts payloads only."""


def fetch_reply(
    dialect: Dialect,
    offsets: Sequence[int],
    values: Sequence[bytes],
    max_bytes: int,
    reply_bytes_max: int = RUSTLOG_FRAME_BYTES_MAX,
    value_size: int | None = None,
) -> FetchReply | ErrorReply:
    """Return as many of these records as the reader wants and `reply_bytes_max` allows: at least one, or an error. A single record may
    fill a frame. `value_size` is the size of each value, if it is known.

    The binary dialect sends no offsets, so a binary reply also ends before the first gap.
    """
    assert values, "an empty reply needs the log's end, which only the broker knows"
    overhead = _BINARY_ACCOUNTED_OVERHEAD if dialect is Dialect.BINARY else 0
    if value_size is None:
        sizes = list(map(len, values))
        value_size = sizes[0] if sizes.count(sizes[0]) == len(sizes) else None
        fitting = _within(sizes, overhead, max_bytes) if not value_size else max_bytes // (value_size + overhead)
    else:
        fitting = max_bytes // (value_size + overhead)
    count = max(1, min(fitting, len(values)))
    if dialect is Dialect.BINARY:
        count = _before_gap(offsets, count)
    # What is within `max_bytes` with 12 bytes a record fits a frame of that size with 4 bytes a record.
    is_small = dialect is Dialect.BINARY and len(values[0]) + _BINARY_ACCOUNTED_OVERHEAD <= max_bytes
    if not is_small or max_bytes + binary.FETCH_REPLY_OVERHEAD_BYTES > reply_bytes_max:
        count = _fitting(dialect, offsets, values, count, reply_bytes_max) or _fitting(dialect, offsets, values, 1, RUSTLOG_FRAME_BYTES_MAX)
    if count == 0:
        alone = len(values[0]) + binary.RECORD_OVERHEAD_BYTES + binary.FETCH_REPLY_OVERHEAD_BYTES
        return errors.record_does_not_fit(dialect, offsets[0], len(values[0]), fits_binary=alone <= RUSTLOG_FRAME_BYTES_MAX)
    if count < len(values):
        offsets, values = offsets[:count], values[:count]
    return FetchReply(offsets, values, offsets[count - 1] + 1, value_size)


def _within(sizes: Sequence[int], overhead: int, room: int) -> int:
    """Return how many values of these sizes fit, each with its overhead."""
    if sum(sizes) + overhead * len(sizes) <= room:
        return len(sizes)
    return bisect_right(list(accumulate(map(overhead.__add__, sizes))), room)


def _before_gap(offsets: Sequence[int], count: int) -> int:
    if isinstance(offsets, range):
        return count
    first = offsets[0]
    return next((index for index in range(count) if offsets[index] != first + index), count)


def _fitting(dialect: Dialect, offsets: Sequence[int], values: Sequence[bytes], count: int, bytes_max: int) -> int:
    """Return how many of the first `count` records fit a frame of `bytes_max`."""
    if dialect is Dialect.BINARY:
        return _within(list(map(len, values[:count])), binary.RECORD_OVERHEAD_BYTES, bytes_max - binary.FETCH_REPLY_OVERHEAD_BYTES)
    room = bytes_max - json.FETCH_REPLY_OVERHEAD_BYTES
    if json.records_bytes_at_most(values[:count]) <= room:
        return count
    return bisect_right(list(accumulate(map(json.record_bytes, offsets[:count], values[:count]))), room)


def produce_requests(dialect: Dialect, topic: str, partition: int, records: Sequence[bytes]) -> list[Produce]:
    """Split the records into as few requests as possible. Raises `LimitExceeded` for a record that fits no frame, before any is sent."""
    room = RUSTLOG_FRAME_BYTES_MAX - len(_encode_request[dialect](Produce(topic, partition, ())))
    requests: list[Produce] = []
    start = used = 0
    for index, record in enumerate(records):
        # A record above the limit needs no exact count, which may take seconds.
        size = _produced_record_bytes[dialect](record) if len(record) <= room else len(record)
        if size > room:
            which = "a record" if len(records) == 1 else f"record {index}"
            raise LimitExceeded(
                f"{which} of {len(record)} bytes takes {size} bytes or more in a {dialect.value} frame, which has room for {room}"
            )
        used += size
        if used > room or index - start == RUSTLOG_PRODUCE_RECORDS_MAX:
            requests.append(Produce(topic, partition, records[start:index]))
            start, used = index, size
    if start < len(records):
        requests.append(Produce(topic, partition, records[start:]))
    return requests
