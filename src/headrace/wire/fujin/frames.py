"""Fujin frames on a QUIC stream. All integers are big-endian.

    client → server                                       server → client
    01 id:u32 | 01 id:str        CONNECT WRITER           (no reply)
    02 type:u8 auto:u8 name:str  CONNECT READER           01 error?
    03 cid name:str value:str    WRITE                    02 cid error?
    04 | 05 | 06 cid             BEGIN, COMMIT, ROLLBACK  03 | 04 | 05 cid error?
                                 MSG                      06 [id:str] value:str
    07 cid count:u32             FETCH                    07 cid error? (count:u32, count × ([id:str] value:str))
    08 | 09 cid count:u32 id:str …   ACK, NACK            08 | 09 cid error? (count:u32, count × (id:str error?))
    0a                           DISCONNECT               0a
    0b                           PONG                     0b, on a separate stream   PING
                                 STOP                     0c

`str` is a u32 length and that many bytes. `error?` is 00, or 01 and a text; the fields in parentheses follow a 00 only. `cid` is four bytes
that the client chooses and the server returns. Ids are present if the reader was connected without auto commit.

A WRITE may carry headers between name and value: a u16 that counts strings (name, value, name, value …), then the strings. The
frame does not tell whether they are present, so a `WriteForm` defines how to decode what follows the name:

| form | the u32 after the name is … |
|---|---|
| NEVER | the length of the value |
| ALWAYS | a u16 count and the upper half of a length |
| AUTO | … the second if it is 0, or at least 2¹⁷ with a lower half of 0 and an even upper half; else the first |

So AUTO cannot decode a value without headers whose length is a multiple of 128 KiB, or a value of 64 KiB or more after a count of 0. A 0
at the end is an empty value, which is not allowed.

Base of both decoders: stores the bytes of an incomplete message and joins them once.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, Generic, TypeAlias, TypeVar

from headrace.errors import WireError
from headrace.records import Headers

U32: Final = struct.Struct(">I")
CID_BYTES: Final = 4


class Request(IntEnum):
    """First bytes of client frames."""

    CONNECT_WRITER = 1
    CONNECT_READER = 2
    WRITE = 3
    BEGIN = 4
    COMMIT = 5
    ROLLBACK = 6
    FETCH = 7
    ACK = 8
    NACK = 9
    DISCONNECT = 10
    PONG = 11


class Reply(IntEnum):
    """First bytes of server frames, numbered independently."""

    READER = 1
    WRITE = 2
    BEGIN = 3
    COMMIT = 4
    ROLLBACK = 5
    MSG = 6
    FETCH = 7
    ACK = 8
    NACK = 9
    DISCONNECT = 10
    PING = 11
    STOP = 12


class ReaderKind(IntEnum):
    PUSH = 1
    """The server sends messages as they arrive."""
    PULL = 2
    """The server sends messages in reply to a FETCH."""


class WriteForm(Enum):
    """Whether a WRITE has headers. See the table above."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


AUTO_PLAIN_BYTES_MAX: Final = (1 << 17) - 1
"""Up to here the number is a length in every form but ALWAYS."""
AUTO_COUNTLESS_BYTES_MAX: Final = (1 << 16) - 1
"""Longest value after a header count of 0, in AUTO."""


def is_plain_in_auto(length: int) -> bool:
    """Return whether AUTO decodes this u32 as the length of a value without headers."""
    return 0 < length <= AUTO_PLAIN_BYTES_MAX or bool(length & 0xFFFF) or bool(length >> 16 & 1)


# Client → server.


@dataclass(slots=True)
class ConnectWriter:
    """`id` is a number, a text, or None. There is no reply."""

    id: int | bytes | None


@dataclass(slots=True)
class ConnectReader:
    kind: ReaderKind
    auto_commit: bool
    name: str


@dataclass(slots=True)
class WriteBatch:
    """Adjacent WRITEs to one name. Each has its own reply."""

    name: str
    cids: list[bytes]
    values: list[bytes]
    headers: list[Headers] | None = None
    """None if no record of the batch has headers."""


@dataclass(slots=True)
class Transact:
    """BEGIN, COMMIT or ROLLBACK."""

    request: Request
    cid: bytes


@dataclass(slots=True)
class Fetch:
    cid: bytes
    count: int


@dataclass(slots=True)
class Settle:
    """ACK or NACK of these messages."""

    request: Request
    cid: bytes
    ids: list[bytes]


@dataclass(slots=True)
class Disconnect:
    """Complete the earlier requests, then reply with the same."""


@dataclass(slots=True)
class Refused:
    """A request that was decoded and cannot be served. `text` is sent in the `reply`.

    If `is_fatal`, the bytes after it cannot be decoded.
    """

    reply: Reply
    cid: bytes
    text: str
    is_fatal: bool = False


ClientMessage: TypeAlias = ConnectWriter | ConnectReader | WriteBatch | Transact | Fetch | Settle | Disconnect | Refused


# Server → client.


@dataclass(slots=True)
class ReaderConnected:
    error: str | None


@dataclass(slots=True)
class WrittenBatch:
    """Adjacent replies to successful WRITEs."""

    cids: list[bytes]


@dataclass(slots=True)
class Failed:
    """Error reply to a WRITE, FETCH, ACK, NACK or a step of a transaction."""

    reply: Reply
    cid: bytes
    error: str


@dataclass(slots=True)
class Transacted:
    """A successful step of a transaction."""

    reply: Reply
    cid: bytes


@dataclass(slots=True)
class MessageBatch:
    """Adjacent messages. `ids` is None with auto commit."""

    ids: list[bytes] | None
    values: list[bytes]


@dataclass(slots=True)
class Fetched:
    cid: bytes
    ids: list[bytes] | None
    values: list[bytes]


@dataclass(slots=True)
class Settled:
    """Result for each id of an ACK or NACK, in order. None means success."""

    reply: Reply
    cid: bytes
    ids: list[bytes]
    errors: list[str | None]


@dataclass(slots=True)
class Disconnected:
    """Last frame of a server on a stream."""


@dataclass(slots=True)
class Stop:
    """The server shuts down: disconnect soon."""


ServerMessage: TypeAlias = ReaderConnected | WrittenBatch | Failed | Transacted | MessageBatch | Fetched | Settled | Disconnected | Stop


MessageT = TypeVar("MessageT")
Found: TypeAlias = tuple[MessageT | None, int] | None
"""A message and its end. None instead of the message: a part of one was decoded. None at all: more bytes are needed."""


class Decoder(Generic[MessageT]):
    """Decoder of one direction. Yields every complete message. It cannot be used after a `WireError`."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 1
        self._skip_bytes = 0
        """Remaining bytes of a value that is too large. They are dropped as they arrive."""
        self._failure: WireError | None = None
        self._is_over = False
        """The rest of the stream cannot be decoded, and the peer has the error."""

    @property
    def held_bytes(self) -> int:
        """Bytes received of an incomplete message."""
        return self._held_bytes

    @property
    def held(self) -> bytes:
        return b"".join(self._held)

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Yield the messages completed by `data`, in order. Exhaust the iterator before the next call."""
        if self._failure is not None:
            raise self._failure
        if self._is_over:
            return
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes < self._wanted_bytes:
            return
        buffer = data if len(self._held) == 1 else b"".join(self._held)
        self._held, self._held_bytes = [], 0
        yield from self._messages(buffer)

    def _messages(self, buffer: bytes) -> Iterator[MessageT]:
        position, end = 0, len(buffer)
        self._wanted_bytes = 1
        try:
            while position < end and not self._is_over:
                found = self._next(buffer, position)
                if found is None:
                    break
                message, position = found
                if position > end:
                    self._skip_bytes, position = position - end, end
                if message is not None:
                    yield message
        except WireError as failure:
            self._failure = failure
            raise
        if position < end and not self._is_over:
            self._held, self._held_bytes = [buffer[position:]], end - position

    def _need(self, size_bytes: int) -> Found[MessageT]:
        """Do not decode again before this many bytes of the message are received."""
        self._wanted_bytes = size_bytes
        return None

    @abstractmethod
    def _next(self, buffer: bytes, position: int) -> Found[MessageT]:
        """Decode the message at `position`. If it ends after the buffer, the rest of it is dropped."""
