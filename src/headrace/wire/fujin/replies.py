"""Decoder of replies and messages, for clients.

Adjacent replies to WRITEs are decoded as one batch, and so are adjacent messages. The reply to a FETCH, ACK or NACK is decoded as its bytes
arrive, so that a long reply is read only once.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import WireError
from headrace.limits import FUJIN_ERROR_BYTES_MAX, FUJIN_ID_BYTES_MAX, VALUE_BYTES_MAX
from headrace.wire.fujin.frames import (
    CID_BYTES,
    U32,
    Decoder,
    Disconnected,
    Failed,
    Fetched,
    Found,
    MessageBatch,
    ReaderConnected,
    Reply,
    ServerMessage,
    Settled,
    Stop,
    Transacted,
    WrittenBatch,
)

_WRITTEN_BYTES: Final = 1 + CID_BYTES + 1
_STEPS: Final = frozenset((Reply.BEGIN, Reply.COMMIT, Reply.ROLLBACK))
_LISTS: Final = frozenset((Reply.FETCH, Reply.ACK, Reply.NACK))
_SINGLES: Final[dict[int, ServerMessage]] = {Reply.DISCONNECT: Disconnected(), Reply.STOP: Stop()}


class ReplyDecoder(Decoder[ServerMessage]):
    """Decoder of one stream. `with_ids`: the reader is connected without auto commit, so messages have ids."""

    def __init__(self, *, with_ids: bool = False, value_bytes_max: int = VALUE_BYTES_MAX) -> None:
        super().__init__()
        self._with_ids = with_ids
        self._value_bytes_max = value_bytes_max
        self._list: Fetched | Settled | None = None
        self._left = 0

    def _next(self, buffer: bytes, position: int) -> Found[ServerMessage]:
        match self._list:
            case Fetched() as fetched:
                return self._entries(fetched, buffer, position)
            case Settled() as settled:
                return self._results(settled, buffer, position)
        reply = buffer[position]
        if reply == Reply.MSG:
            return self._messages_from(buffer, position)
        if reply == Reply.WRITE:
            return self._written(buffer, position)
        if reply in _STEPS or reply in _LISTS:
            return self._answer(Reply(reply), buffer, position)
        if reply == Reply.READER:
            error = self._error(buffer, position, position + 1)
            return None if error is None else (ReaderConnected(error[0]), error[1])
        if reply in _SINGLES:
            return _SINGLES[reply], position + 1
        raise WireError(f"unknown reply: 0x{reply:02x}")

    # Writers.

    def _written(self, buffer: bytes, position: int) -> Found[ServerMessage]:
        cids: list[bytes] = []
        end = len(buffer)
        started = position
        while position + _WRITTEN_BYTES <= end and buffer[position] == Reply.WRITE and buffer[position + _WRITTEN_BYTES - 1] == 0:
            cids.append(buffer[position + 1 : position + 1 + CID_BYTES])
            position += _WRITTEN_BYTES
        return (WrittenBatch(cids), position) if cids else self._answer(Reply.WRITE, buffer, started)

    def _answer(self, reply: Reply, buffer: bytes, position: int) -> Found[ServerMessage]:
        """Decode a reply with a cid and an error."""
        begin = position + 1 + CID_BYTES
        error = self._error(buffer, position, begin)
        if error is None:
            return None
        text, end = error
        cid = buffer[position + 1 : begin]
        if text is not None:
            return Failed(reply, cid, text), end
        if reply not in _LISTS:
            return Transacted(reply, cid), end
        if len(buffer) < end + U32.size:
            return self._need(end + U32.size - position)
        (self._left,) = U32.unpack_from(buffer, end)
        if reply == Reply.FETCH:
            self._list = Fetched(cid, [] if self._with_ids else None, [])
        else:
            self._list = Settled(reply, cid, [], [])
        if self._left == 0:
            done, self._list = self._list, None
            return done, end + U32.size
        return None, end + U32.size

    # Readers.

    def _messages_from(self, buffer: bytes, position: int) -> Found[ServerMessage]:
        batch = MessageBatch([] if self._with_ids else None, [])
        end, started = len(buffer), position
        while position < end and buffer[position] == Reply.MSG:
            try:
                stop = self._message(buffer, position, 1, batch)
            except WireError:
                if position == started:
                    raise
                break  # the messages before it are valid; the error is raised again at this one
            if stop is None:
                break
            position = stop
        return (batch, position) if position > started else None

    def _entries(self, fetched: Fetched, buffer: bytes, position: int) -> Found[ServerMessage]:
        started = position
        while self._left:
            stop = self._message(buffer, position, 0, fetched)
            if stop is None:
                return (None, position) if position > started else None
            position = stop
            self._left -= 1
        self._list = None
        return fetched, position

    def _message(self, buffer: bytes, position: int, skipped: int, into: MessageBatch | Fetched) -> int | None:
        """Decode `[id] value` after `skipped` bytes. Return its end."""
        begin, id = position + skipped, b""
        if into.ids is not None:
            found = self._text(buffer, position, begin, FUJIN_ID_BYTES_MAX, "message id")
            if found is None:
                return None
            id, begin = found
        found = self._text(buffer, position, begin, self._value_bytes_max, "message")
        if found is None:
            return None
        if into.ids is not None:
            into.ids.append(id)
        into.values.append(found[0])
        return found[1]

    def _results(self, settled: Settled, buffer: bytes, position: int) -> Found[ServerMessage]:
        started = position
        while self._left:
            found = self._text(buffer, position, position, FUJIN_ID_BYTES_MAX, "message id")
            error = None if found is None else self._error(buffer, position, found[1])
            if found is None or error is None:
                return (None, position) if position > started else None
            settled.ids.append(found[0])
            settled.errors.append(error[0])
            position = error[1]
            self._left -= 1
        self._list = None
        return settled, position

    # Fields. `position` is the start of the message, or of the part that is decoded in one step.

    def _text(self, buffer: bytes, position: int, begin: int, bytes_max: int, what: str) -> tuple[bytes, int] | None:
        if len(buffer) < begin + U32.size:
            self._need(begin + U32.size - position)
            return None
        (size,) = U32.unpack_from(buffer, begin)
        if size > bytes_max:
            raise WireError(f"{what} too large: {size} bytes, at most {bytes_max}")
        end = begin + U32.size + int(size)
        if len(buffer) < end:
            self._need(end - position)
            return None
        return buffer[begin + U32.size : end], end

    def _error(self, buffer: bytes, position: int, begin: int) -> tuple[str | None, int] | None:
        if len(buffer) <= begin:
            self._need(begin + 1 - position)
            return None
        if buffer[begin] == 0:
            return None, begin + 1
        if buffer[begin] != 1:
            raise WireError(f"malformed reply: {buffer[begin]} where an error begins")
        found = self._text(buffer, position, begin + 1, FUJIN_ERROR_BYTES_MAX, "error text")
        return None if found is None else (found[0].decode(errors="replace"), found[1])
