"""Session of one Fujin stream, as a writer or as a reader.

    opened ──CONNECT──▶ writer | reader ──DISCONNECT, end of stream or error──▶ ending ──▶ closed

Requests take effect in the order in which they were sent. A request that must wait (to create a topic, to commit a transaction) runs in
the session's only task. Later requests wait, and the stream is not read.

The last frame that the server sends is a DISCONNECT, after every write has its reply and whichever side ends the stream. It is sent only
once, because clients fail on a second one. A stream without a successful CONNECT ends without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from typing import Final

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.errors import WireError
from headrace.sessions.contract import StreamedLink
from headrace.sessions.fujin.reader import Reader
from headrace.sessions.fujin.settings import FujinSettings
from headrace.sessions.fujin.writer import Step, Writer, WriterIds
from headrace.wire.fujin import (
    ClientMessage,
    ConnectReader,
    ConnectWriter,
    Disconnect,
    Fetch,
    Refused,
    Reply,
    RequestDecoder,
    Settle,
    Transact,
    WriteBatch,
    encode,
)

log = logging.getLogger(__name__)

PING_ERROR_CODE: Final = 3
"""Error code for closing a connection whose client does not answer pings."""


class FujinSession:
    """State of one stream. `ids` are shared by all streams."""

    def __init__(
        self,
        broker: Broker,
        link: StreamedLink,
        who: Principal,
        ids: WriterIds,
        settings: FujinSettings = FujinSettings(),
    ) -> None:
        self._broker, self._link, self._who, self._ids, self._settings = broker, link, who, ids, settings
        self._loop = asyncio.get_running_loop()
        self._decoder = RequestDecoder(form=settings.write_form, message_bytes_max=settings.message_bytes_max)
        self._role: Writer | Reader | None = None
        self._inbox: deque[ClientMessage] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_paused = False
        self._ending: tuple[str, bool] | None = None
        self._last_frame = b""
        self._is_leaving = False
        """The reader is committing its progress."""
        self._is_lost = self._is_closed = False
        self._doubt_timer: asyncio.TimerHandle | None = None
        self._stop_timer: asyncio.TimerHandle | None = None

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        if self._ending is not None:
            return
        self._take(self._decoder.feed(data))
        if self._decoder.is_in_doubt and self._doubt_timer is None:
            self._doubt_timer = self._loop.call_later(self._settings.doubt_seconds, self._settle_doubt)

    def finished(self) -> None:
        self._take(self._decoder.finish())
        self._end("peer finished", error=False)

    def drained(self) -> None:
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
        self._is_lost = True
        self._inbox.clear()
        for timer in (self._doubt_timer, self._stop_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._role is not None:
            self._role.lost()

    # Order.

    def _take(self, messages: Iterator[ClientMessage]) -> None:
        try:
            for message in messages:
                if self._ending is not None:
                    break
                self._accept(message)
        except WireError as error:
            # Earlier requests are completed. The end of the stream tells the peer.
            self._end(f"bad request: {error}")

    def _accept(self, message: ClientMessage) -> None:
        """Handle the message now, or after the waiting ones."""
        if self._task is not None:
            self._inbox.append(message)
            if not self._is_paused:
                self._is_paused = True
                self._link.pause_reading()
            return
        step = self._handle(message)
        if step is not None:
            self._start(step)

    def _start(self, step: Step | None) -> None:
        self._task = self._loop.create_task(self._work(step))
        self._task.add_done_callback(self._worked)

    async def _work(self, step: Step | None) -> None:
        while True:
            if step is not None:
                await step()
            if not self._inbox:
                return
            step = self._handle(self._inbox.popleft())

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled() or self._is_lost:
            return
        if (failure := task.exception()) is not None:
            # A bug. Close, because the peer would wait for a reply that never comes.
            log.error("a request failed", exc_info=failure, extra={"peer": self._link.peer})
            self._inbox.clear()
            self._is_closed = True
            self._link.close("internal error: the request could not be completed")
            return
        if self._inbox:
            # A message arrived between the end of the task and this call.
            self._start(None)
            return
        if self._is_paused:
            self._is_paused = False
            self._link.resume_reading()
        self._close_when_done()

    def _settle_doubt(self) -> None:
        self._doubt_timer = None
        if self._ending is None:
            self._take(self._decoder.settle_doubt())

    # Requests.

    def _handle(self, message: ClientMessage) -> Step | None:
        match message:
            case WriteBatch() | Transact():
                assert isinstance(self._role, Writer), "the decoder knows the role"
                return self._role.handle(message)
            case Fetch() | Settle():
                if isinstance(self._role, Reader):
                    self._role.handle(message)
            case ConnectWriter(id):
                self._role = Writer(self._broker, self._link, self._who, self._settings, self._ids, id, settled=self._close_when_done)
                self._last_frame = encode.DISCONNECT
            case ConnectReader():
                return lambda: self._connect_reader(message)
            case Disconnect():
                self._inbox.clear()  # anything after it is ignored
                self._end("disconnected", error=False)
            case Refused():
                self._send_error(message)
        return None

    async def _connect_reader(self, message: ConnectReader) -> None:
        reader = Reader(
            self._broker,
            self._link,
            self._who,
            self._settings,
            message,
            settled=self._close_when_done,
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
            self._link.send(encode.answered(message.reply, message.cid, message.text))
        if message.is_fatal:
            self._end(f"refused: {message.text}")

    # Ending.

    def _stop(self) -> None:
        self._stop_timer = None
        self._end("drained", error=False)

    def _end(self, reason: str, *, error: bool = True) -> None:
        """Accept nothing new, and close when everything has its reply."""
        if self._ending is None and not self._is_lost:
            self._ending = (reason, error)
            if isinstance(self._role, Reader):
                self._role.stop()
        self._close_when_done()

    def _close_when_done(self) -> None:
        if self._ending is None or self._is_lost or self._is_closed or self._task is not None:
            return
        if self._role is not None and not self._role.is_settled:
            return
        if isinstance(self._role, Reader) and self._last_frame and not self._is_leaving:
            self._is_leaving = True
            self._start(self._role.disconnect)
            return
        self._is_closed = True
        if isinstance(self._role, Writer):
            self._role.disconnected()
        self._link.send(self._last_frame)
        reason, error = self._ending
        self._link.close(reason, error=error)
