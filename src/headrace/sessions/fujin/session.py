"""Session of one Fujin stream, as a writer or as a reader.

    opened ──CONNECT──▶ writer | reader ──DISCONNECT, end of stream or error──▶ ending ──▶ closed

Requests take effect in the order in which they were sent. WRITEs are answered in the order of completion.

The last frame that the server sends is a DISCONNECT, after every write has its reply and whichever side ends the stream. It is sent only
once, because clients fail on a second one. A stream without a successful CONNECT ends without it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.errors import BrokerError, NotCoordinator, WireError
from headrace.sessions.contract import Login, StreamedLink
from headrace.sessions.fujin.errors import READER_NOT_FOUND, text
from headrace.sessions.fujin.reader import Reader
from headrace.sessions.fujin.settings import FujinSettings
from headrace.sessions.fujin.writer import Writer, WriterIds
from headrace.sessions.request_ids import log_refused
from headrace.sessions.session import BaseSession
from headrace.wire.fujin import (
    ClientMessage,
    ConnectReader,
    ConnectWriter,
    Disconnect,
    Fetch,
    Refused,
    Reply,
    Request,
    RequestDecoder,
    Settle,
    Transact,
    WriteBatch,
    encode,
)

PING_ERROR_CODE: Final = 3
"""Error code for closing a connection whose client does not answer pings."""


class FujinSession(BaseSession[ClientMessage]):
    """State of one stream. `ids` are shared by all streams."""

    _decoder: RequestDecoder
    _link: StreamedLink
    _has_ordered_replies = False
    _bad_input = "bad request: {}"

    def __init__(
        self,
        broker: Broker,
        link: StreamedLink,
        who: Principal,
        ids: WriterIds,
        settings: FujinSettings = FujinSettings(),
    ) -> None:
        super().__init__(link, in_flight_bytes_max=settings.in_flight_bytes_max)
        self._broker, self._who, self._ids, self._settings = broker, who, ids, settings
        self._decoder = RequestDecoder(form=settings.write_form, message_bytes_max=settings.message_bytes_max)
        self._role: Writer | Reader | None = None
        self._writer_id: int | bytes | None = None
        self._last_frame = b""
        self._is_leaving = False
        """The reader is committing its progress."""
        self._doubt_timer: asyncio.TimerHandle | None = None
        self._stop_timer: asyncio.TimerHandle | None = None

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        super().receive(data)
        if self._decoder.is_in_doubt and self._doubt_timer is None and self._ending is None:
            self._doubt_timer = self._loop.call_later(self._settings.doubt_seconds, self._settle_doubt)

    def finished(self) -> None:
        if self._ending is None:
            self._take(self._decoder.finish())
        self._end("peer finished", error=False)

    def drained(self) -> None:
        super().drained()
        if isinstance(self._role, Reader):
            self._role.drained()

    def closing(self) -> None:
        """Ask the client to disconnect, and serve it until it does or the timeout expires."""
        if self._role is None:
            self._end("draining", error=False)
        elif self._stop_timer is None and self._ending is None:
            self._link.send(encode.STOP)
            if isinstance(self._role, Reader):
                self._role.stop()
            self._stop_timer = self._loop.call_later(self._settings.stop_seconds, self._stop)

    def lost(self) -> None:
        super().lost()
        for timer in (self._doubt_timer, self._stop_timer):
            if timer is not None:
                timer.cancel()
        if isinstance(self._role, Reader):
            self._role.lost()
        elif self._role is not None:
            self._role.left()

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (isinstance(self._role, Reader) and not self._role.is_settled)

    def _settle_doubt(self) -> None:
        self._doubt_timer = None
        if self._ending is None:
            self._take(self._decoder.settle_doubt())

    # Requests.

    def _serves(self, message: ClientMessage) -> bool:
        match message:
            case Transact(Request.BEGIN) | ConnectReader() if not self._broker.is_coordinator:
                if self._owed:
                    return False
                self._start(self._pass_on(message, lambda: self._not_coordinator(message)))
            case WriteBatch() | Transact():
                assert isinstance(self._role, Writer), "the decoder knows the role"
                work = self._role.handle(message)
                if work is not None:
                    self._start(work, message.cids if isinstance(message, WriteBatch) else (message.cid,))
            case Fetch() | Settle():
                if isinstance(self._role, Reader):
                    self._role.handle(message)
            case ConnectWriter(id):
                self._writer_id = id
                self._role = Writer(
                    self._broker, self._who, self._settings, self._ids, id, peer=self._link.peer, reply=self._reply, owe=self._owe
                )
                self._last_frame = encode.DISCONNECT
            case ConnectReader():
                self._start(self._connect_reader(message))
            case Disconnect():
                self._inbox.clear()  # anything after it is ignored
                self._end("disconnected", error=False)
            case Refused():
                self._send_error(message)
        return True

    # Handover to the coordinator.

    def _login(self) -> Login:
        return Login()

    def _unserved(self, message: ClientMessage) -> bytes:
        rest = super()._unserved(message)
        return rest if self._role is None else encode.connect_writer(self._writer_id) + rest

    def _encode(self, message: ClientMessage) -> bytes:
        match message:
            case ConnectReader(kind, auto_commit, name):
                return encode.connect_reader(kind, auto_commit, name)
            case WriteBatch(name, cids, values, headers):
                return encode.writes(name, cids, values, headers, form=self._settings.write_form)
            case Transact(request, cid):
                return encode.transact(request, cid)
            case Fetch(cid, count):
                return encode.fetch(cid, count)
            case Settle(request, cid, ids):
                return encode.settle(request, cid, ids)
            case Disconnect():
                return encode.DISCONNECT
            case _:
                raise WireError("the request was not understood, so it cannot be encoded")

    def _not_coordinator(self, message: Transact | ConnectReader) -> None:
        try:
            self._broker.check_coordinator()
        except NotCoordinator as failure:
            error = self._error_text(failure)
        else:
            self._inbox.appendleft(message)  # this broker is the coordinator since
            return
        if isinstance(message, Transact):
            log_refused("fujin", self._link.peer, error, [message.cid])
            self._reply(encode.answered(Reply.BEGIN, message.cid, error))
            return
        self._link.send(encode.reader_connected(error))
        self._inbox.clear()
        self._end(f"reader refused: {error}")

    def _error_text(self, error: BrokerError) -> str:
        self._broker.meters.refuse("fujin", error.code)
        return text(error, READER_NOT_FOUND)

    # Readers.

    async def _connect_reader(self, message: ConnectReader) -> None:
        reader = Reader(
            self._broker,
            self._link,
            self._who,
            self._settings,
            message,
            settled=self._update,
            failed=self._reader_failed,
        )
        self._role = reader
        error = await reader.connect()
        self._link.send(encode.reader_connected(error))
        if error is not None:
            self._inbox.clear()
            self._end(f"reader refused: {error}")
            return
        self._last_frame = encode.DISCONNECT
        # The original Go client drops whatever it reads together with the reply.
        self._link.when_acknowledged(reader.start)

    def _reader_failed(self, reason: str) -> None:
        """End the stream: the topic is deleted or unreadable."""
        self._end(f"reader failed: {reason}")

    def _send_error(self, message: Refused) -> None:
        if message.reply is Reply.READER:
            self._link.send(encode.reader_connected(message.text))
        else:
            log_refused("fujin", self._link.peer, message.text, [message.cid])
            self._link.send(encode.answered(message.reply, message.cid, message.text))
        if message.is_fatal:
            self._end(f"refused: {message.text}")

    # Ending.

    def _stop(self) -> None:
        self._stop_timer = None
        self._end("drained", error=False)

    def _end(self, reason: str, *, error: bool = True) -> None:
        if self._ending is None and isinstance(self._role, Reader):
            self._role.stop()
        super()._end(reason, error=error)

    def _close(self, reason: str, error: bool) -> None:
        if isinstance(self._role, Reader) and self._last_frame and not self._is_leaving:
            self._is_leaving = True
            self._start(self._role.disconnect())
            self._update()
            return
        if isinstance(self._role, Writer):
            self._role.left()
        self._link.send(self._last_frame)
        super()._close(reason, error)
