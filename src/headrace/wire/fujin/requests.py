"""Decoder of requests, for servers.

The first request of a stream selects the role, writer or reader, and with it the allowed requests. Adjacent WRITEs to one name are decoded
as one batch, with one `unpack_from` and one slice each, or one `unpack_from` for 64 of them if they have one size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from headrace.errors import WireError
from headrace.limits import FUJIN_ID_BYTES_MAX, FUJIN_IDS_MAX, FUJIN_MESSAGE_BYTES_MAX, FUJIN_NAME_BYTES_MAX, HEADERS_BYTES_MAX, HEADERS_MAX
from headrace.records import Headers
from headrace.wire.fujin.frames import (
    AUTO_PLAIN_BYTES_MAX,
    CID_BYTES,
    U32,
    ClientMessage,
    ConnectReader,
    ConnectWriter,
    Decoder,
    Disconnect,
    Fetch,
    Found,
    ReaderKind,
    Refused,
    Reply,
    Request,
    Settle,
    Transact,
    WriteBatch,
    WriteForm,
    is_plain_in_auto,
)

EMPTY_NAME: Final = "writer topic len arg not provided"
EMPTY_VALUE: Final = "write size arg not provided"
TOO_LARGE: Final = "message too large: {} bytes, at most {}"
LONG_NAME: Final = "topic name too long"
BAD_HEADERS: Final = "invalid headers"
BAD_KIND: Final = "invalid reader type"
BAD_AUTO_COMMIT: Final = "connect reader is auto commit arg invalid"
EMPTY_READER_NAME: Final = "reader name size arg not provided"
TOO_MANY_IDS: Final = "too many message ids"
LONG_ID: Final = "message id too long"

_BLOCK: Final = 64
_SINGLES_FIRST: Final = 8
"""WRITEs of a batch before a block is tried, so that alternating names do not pay for blocks that never match."""
_U16: Final = struct.Struct(">H")
_CID_AND_COUNT: Final = struct.Struct(">4sI")
_WRITER: Final = frozenset((Request.WRITE, Request.BEGIN, Request.COMMIT, Request.ROLLBACK, Request.DISCONNECT))
_SETTLES: Final = {Request.ACK: Reply.ACK, Request.NACK: Reply.NACK}


class _Role(Enum):
    UNCONNECTED = auto()
    WRITER = auto()
    READER = auto()


class RequestDecoder(Decoder[ClientMessage]):
    """Decoder of one stream. Raises `WireError` for a request that its role does not allow."""

    def __init__(self, *, form: WriteForm = WriteForm.AUTO, message_bytes_max: int = FUJIN_MESSAGE_BYTES_MAX) -> None:
        super().__init__()
        self._form = form
        self._message_bytes_max = message_bytes_max
        self._plain_bytes_max = {
            WriteForm.AUTO: min(message_bytes_max, AUTO_PLAIN_BYTES_MAX),
            WriteForm.NEVER: message_bytes_max,
            WriteForm.ALWAYS: 0,
        }[form]
        """Up to here the u32 after a name is the length of a valid value, without another check."""
        self._role = _Role.UNCONNECTED
        self._settle: Settle | None = None
        self._ids_left = 0
        self._doubt: bytes | None = None
        """Cid of a WRITE that ends, so far, with a 0: an empty value, or a header count of 0 whose rest is not received yet."""
        self._number: int | None = None
        """Id of CONNECT WRITER, while only the next byte can tell whether it is a number or a length."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether `settle_doubt` has a result. The caller waits a little for more bytes, then calls it."""
        return self._doubt is not None

    def settle_doubt(self) -> Iterator[ClientMessage]:
        """Decode the pending 0 as an empty value, because no more bytes arrived."""
        if self._doubt is not None:
            cid, self._doubt = self._doubt, None
            yield self._over(Reply.WRITE, cid, EMPTY_VALUE)

    def finish(self) -> Iterator[ClientMessage]:
        """Decode what only a next byte could have decided: the stream has ended. An incomplete message is dropped."""
        if self._number is not None:
            yield ConnectWriter(self._number)
            self._number = None
        yield from self.settle_doubt()
        self._is_over = True

    def feed(self, data: bytes) -> Iterator[ClientMessage]:
        if data:
            self._doubt = self._number = None
        return super().feed(data)

    def _over(self, reply: Reply, cid: bytes, text: str) -> Refused:
        self._is_over = True
        return Refused(reply, cid, text, is_fatal=True)

    def _next(self, buffer: bytes, position: int) -> Found[ClientMessage]:
        if self._settle is not None:
            return self._ids(self._settle, buffer, position)
        request = buffer[position]
        if self._role is _Role.WRITER and request in _WRITER:
            return self._writer_request(request, buffer, position)
        if self._role is _Role.READER and (request in _SETTLES or request == Request.FETCH):
            return self._counted(request, buffer, position)
        if self._role is _Role.READER and request == Request.DISCONNECT:
            return Disconnect(), position + 1
        if self._role is _Role.UNCONNECTED and request == Request.CONNECT_WRITER:
            return self._connect_writer(buffer, position)
        if self._role is _Role.UNCONNECTED and request == Request.CONNECT_READER:
            return self._connect_reader(buffer, position)
        raise WireError(f"unknown request: 0x{request:02x}")

    # Connecting.

    def _connect_writer(self, buffer: bytes, position: int) -> Found[ClientMessage]:
        """Decode the id: a number in the specification, a length and a text in the original client. The next byte tells.

        A text never starts with a byte that is a request of a writer.
        """
        begin = position + 1 + U32.size
        if len(buffer) < begin:
            return self._need(1 + U32.size)
        (number,) = U32.unpack_from(buffer, position + 1)
        if number == 0:
            self._role = _Role.WRITER
            return ConnectWriter(None), begin
        if len(buffer) == begin:
            self._number = number
            return self._need(2 + U32.size)
        if buffer[begin] in _WRITER:
            self._role = _Role.WRITER
            return ConnectWriter(number), begin
        if number > FUJIN_NAME_BYTES_MAX:
            raise WireError(f"writer id too long: {number} bytes, at most {FUJIN_NAME_BYTES_MAX}")
        end = begin + number
        if len(buffer) < end:
            return self._need(end - position)
        self._role = _Role.WRITER
        return ConnectWriter(buffer[begin:end]), end

    def _connect_reader(self, buffer: bytes, position: int) -> Found[ClientMessage]:
        fixed = buffer[position + 1 : position + 3]
        if fixed and fixed[0] not in (ReaderKind.PUSH, ReaderKind.PULL):
            return self._over(Reply.READER, b"", BAD_KIND), position + 1
        if len(fixed) == 2 and fixed[1] > 1:
            return self._over(Reply.READER, b"", BAD_AUTO_COMMIT), position + 1
        begin = position + 3 + U32.size
        if len(buffer) < begin:
            # Each byte is checked as soon as it is received.
            return self._need(begin - position if len(fixed) == 2 else 2 + len(fixed))
        (size,) = U32.unpack_from(buffer, position + 3)
        if not 0 < size <= FUJIN_NAME_BYTES_MAX:
            return self._over(Reply.READER, b"", LONG_NAME if size else EMPTY_READER_NAME), position + 1
        end = begin + size
        if len(buffer) < end:
            return self._need(end - position)
        self._role = _Role.READER
        return ConnectReader(ReaderKind(fixed[0]), bool(fixed[1]), _name(buffer[begin:end])), end

    # Writers.

    def _writer_request(self, request: int, buffer: bytes, position: int) -> Found[ClientMessage]:
        if request == Request.WRITE:
            return self._writes(buffer, position)
        if request == Request.DISCONNECT:
            return Disconnect(), position + 1
        end = position + 1 + CID_BYTES
        if len(buffer) < end:
            return self._need(1 + CID_BYTES)
        return Transact(Request(request), buffer[position + 1 : end]), end

    def _writes(self, buffer: bytes, position: int) -> Found[ClientMessage]:
        """Decode the WRITE at `position` and the following ones with the same name."""
        begin = position + 1 + CID_BYTES + U32.size
        if len(buffer) < begin:
            return self._need(begin - position)
        cid, size = _CID_AND_COUNT.unpack_from(buffer, position + 1)
        if not 0 < size <= FUJIN_NAME_BYTES_MAX:
            return self._over(Reply.WRITE, cid, LONG_NAME if size else EMPTY_NAME), position + 1
        if len(buffer) < begin + size:
            return self._need(begin + size - position)
        batch = WriteBatch(_name(buffer[begin : begin + size]), [], [])
        end = self._take_batch(batch, buffer, position, buffer[begin - U32.size : begin + size])
        if batch.values:
            return batch, end
        return self._awkward(buffer, position, begin + size, cid)

    def _take_batch(self, batch: WriteBatch, buffer: bytes, position: int, field: bytes) -> int:
        """Decode complete, valid WRITEs to the name in `field`. Return the start of the first other frame."""
        unpack, plain_bytes_max = _head(len(field)).unpack_from, self._plain_bytes_max
        head_bytes = 1 + CID_BYTES + len(field) + U32.size
        end, last = len(buffer), len(buffer) - head_bytes
        cids, values = batch.cids, batch.values
        singles = _SINGLES_FIRST
        while position <= last:
            request, cid, its_field, size = unpack(buffer, position)
            if request != Request.WRITE or its_field != field:
                break
            if 0 < size <= plain_bytes_max:
                begin = position + head_bytes
                stop = begin + size
                if stop > end:
                    break
                if singles == 0:
                    taken = _take_block(buffer, position, stop - position, begin - position, cids, values)
                    if taken > position:
                        if batch.headers is not None:
                            batch.headers += [()] * _BLOCK
                        position = taken
                        continue
                    singles = _BLOCK  # try again after as many frames as a block has
                singles -= 1
                value = buffer[begin:stop]
                if batch.headers is not None:
                    batch.headers.append(())
            else:
                body = self._body(buffer, position + head_bytes - U32.size)
                if not isinstance(body, _Body) or body.value is _SKIPPED:
                    break
                value, stop = body.value, body.end
                if body.headers and batch.headers is None:
                    batch.headers = [()] * len(values)
                if batch.headers is not None:
                    batch.headers.append(body.headers)
            cids.append(cid)
            values.append(value)
            position = stop
        return position

    def _awkward(self, buffer: bytes, position: int, begin: int, cid: bytes) -> Found[ClientMessage]:
        """Decode a WRITE that is incomplete or invalid. `begin` is the end of its name."""
        body = self._body(buffer, begin)
        if isinstance(body, int):
            if len(buffer) == begin + U32.size and self._form is WriteForm.AUTO and U32.unpack_from(buffer, begin) == (0,):
                self._doubt = cid
            return self._need(body - position)
        if isinstance(body, str):
            return self._over(Reply.WRITE, cid, body), position + 1
        assert body.value is _SKIPPED, "a valid body belongs to a batch"
        return Refused(Reply.WRITE, cid, TOO_LARGE.format(body.size, self._message_bytes_max)), body.end

    def _body(self, buffer: bytes, begin: int) -> _Body | int | str:
        """Return headers and value from `begin` on, or where to continue if they are incomplete, or the error."""
        if len(buffer) < begin + U32.size:
            return begin + U32.size
        (size,) = U32.unpack_from(buffer, begin)
        if self._form is WriteForm.NEVER or (self._form is WriteForm.AUTO and is_plain_in_auto(size)):
            return self._value(buffer, begin, ())
        (count,) = _U16.unpack_from(buffer, begin)
        if count % 2 or count > 2 * HEADERS_MAX:
            return BAD_HEADERS
        return self._headed(buffer, begin + _U16.size, count)

    def _headed(self, buffer: bytes, position: int, count: int) -> _Body | int | str:
        fields: list[bytes] = []
        total = 0
        for _ in range(count):
            begin = position + U32.size
            if len(buffer) < begin:
                return begin
            (size,) = U32.unpack_from(buffer, position)
            total += size
            if total > HEADERS_BYTES_MAX:
                return BAD_HEADERS
            position = begin + size
            if len(buffer) < position:
                return position
            fields.append(buffer[begin:position])
        try:
            headers = tuple(zip((name.decode() for name in fields[::2]), fields[1::2], strict=True))
        except UnicodeDecodeError:
            return BAD_HEADERS
        return self._value(buffer, position, headers)

    def _value(self, buffer: bytes, position: int, headers: Headers) -> _Body | int | str:
        begin = position + U32.size
        if len(buffer) < begin:
            return begin
        (size,) = U32.unpack_from(buffer, position)
        if size == 0:
            return EMPTY_VALUE
        end = begin + int(size)
        if size > self._message_bytes_max:
            return _Body(headers, _SKIPPED, end, size)
        return _Body(headers, buffer[begin:end], end, size) if end <= len(buffer) else end

    # Readers.

    def _counted(self, request: int, buffer: bytes, position: int) -> Found[ClientMessage]:
        """Decode a FETCH, or the start of an ACK or NACK."""
        end = position + 1 + _CID_AND_COUNT.size
        if len(buffer) < end:
            return self._need(1 + _CID_AND_COUNT.size)
        cid, count = _CID_AND_COUNT.unpack_from(buffer, position + 1)
        if request == Request.FETCH:
            return Fetch(cid, count), end
        if count > FUJIN_IDS_MAX:
            return self._over(_SETTLES[Request(request)], cid, TOO_MANY_IDS), end
        settle = Settle(Request(request), cid, [])
        if count == 0:
            return settle, end
        self._settle, self._ids_left = settle, count
        return None, end

    def _ids(self, settle: Settle, buffer: bytes, position: int) -> Found[ClientMessage]:
        """Decode ids as they arrive, so that a long list is read only once."""
        ids, end, started = settle.ids, len(buffer), position
        while self._ids_left:
            begin = position + U32.size
            if end < begin:
                return (None, position) if position > started else self._need(U32.size)
            (size,) = U32.unpack_from(buffer, position)
            if size > FUJIN_ID_BYTES_MAX:
                return self._over(_SETTLES[settle.request], settle.cid, LONG_ID), end
            if end < begin + size:
                return (None, position) if position > started else self._need(U32.size + size)
            position = begin + size
            ids.append(buffer[begin:position])
            self._ids_left -= 1
        self._settle = None
        return settle, position


class _Body:
    """Headers and value of a WRITE, its end, and the size of its value."""

    __slots__ = ("end", "headers", "size", "value")

    def __init__(self, headers: Headers, value: bytes, end: int, size: int) -> None:
        self.headers, self.value, self.end, self.size = headers, value, end, size


_SKIPPED: Final = b"\x00skipped"
"""Placeholder for a value that is too large, compared by identity."""


def _name(raw: bytes) -> str:
    """Decode the name of a topic. The broker validates it."""
    try:
        return raw.decode()
    except UnicodeDecodeError as failure:
        raise WireError("a name is not UTF-8") from failure


def _take_block(buffer: bytes, position: int, frame_bytes: int, head_bytes: int, cids: list[bytes], values: list[bytes]) -> int:
    """Decode `_BLOCK` WRITEs that differ from the one at `position` only in cid and value. Return their end, or `position`.

    Frames of one size have equal distances: one slice compares their heads, and one call unpacks them.
    """
    end = position + _BLOCK * frame_bytes
    if end > len(buffer) or buffer[position:end:frame_bytes].count(Request.WRITE) != _BLOCK:
        return position
    fixed_bytes = head_bytes - 1 - CID_BYTES
    columns = _block(fixed_bytes, frame_bytes - head_bytes).unpack_from(buffer, position)
    if columns[1::3].count(columns[1]) != _BLOCK:
        return position
    cids += columns[::3]
    values += columns[2::3]
    return end


@lru_cache(maxsize=256)
def _block(fixed_bytes: int, value_bytes: int) -> struct.Struct:
    return struct.Struct(f"x{CID_BYTES}s{fixed_bytes}s{value_bytes}s" * _BLOCK)


@lru_cache(maxsize=256)
def _head(field_bytes: int) -> struct.Struct:
    return struct.Struct(f">B4s{field_bytes}sI")
