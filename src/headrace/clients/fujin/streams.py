"""Streams of a Fujin client: requests, and the futures of their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from headrace.clients.errors import OutcomeUnknown, Refused
from headrace.clients.fujin.connection import Connection
from headrace.errors import HeadraceError, WireError
from headrace.wire.fujin import (
    Disconnected,
    Failed,
    Fetched,
    MessageBatch,
    ReaderConnected,
    ReaderKind,
    ReplyDecoder,
    Request,
    ServerMessage,
    Settled,
    Stop,
    Transacted,
    WrittenBatch,
    encode,
)

_Answer = TypeVar("_Answer")
_KINDS: Final = {"writer not found": "unknown_topic", "reader not found": "unknown_topic"}
"""Kinds of the errors that the original has its own words for."""


class ClientStream:
    """One stream, a `StreamReceiver`. `over` is called once if the server ends the stream before the client leaves."""

    def __init__(self, connection: Connection, first: bytes, *, with_ids: bool, over: Callable[[str], None]) -> None:
        self._connection, self._over = connection, over
        self._decoder = ReplyDecoder(with_ids=with_ids)
        self._next_cid = 0
        self._waiting: dict[bytes, asyncio.Future[ServerMessage]] = {}
        self._is_leaving = False
        self.is_open = True
        self.is_answered = False
        """Whether the server has sent anything on the stream."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream = connection.open(self, first)

    def send(self, frames: bytes) -> None:
        self._connection.send(self._stream, frames)

    def taken(self, size_bytes: int) -> None:
        self._connection.taken(self._stream, size_bytes)

    def leave(self) -> None:
        """Send DISCONNECT. The server answers earlier requests first."""
        if self.is_open and not self._is_leaving:
            self._is_leaving = True
            self.send(encode.DISCONNECT)

    async def request(self, make: Callable[[bytes], bytes]) -> ServerMessage:
        """Send a request and wait for the reply. Raises `Refused`, and `OutcomeUnknown` if the stream ends first."""
        if not self.is_open:
            raise OutcomeUnknown(0)
        cid = self._next_cid.to_bytes(4, "big")
        self._next_cid = (self._next_cid + 1) % (1 << 32)
        answer: asyncio.Future[ServerMessage] = asyncio.get_running_loop().create_future()
        self._waiting[cid] = answer
        self.send(make(cid))
        try:
            return await answer
        finally:
            self._waiting.pop(cid, None)

    # Called by the connection.

    def receive(self, data: bytes) -> int:
        self.is_answered = True
        try:
            for message in self._decoder.feed(data):
                self._dispatch(message)
        except WireError as failure:
            self._connection.drop(f"the server sent undecodable bytes: {failure}")
        return self.credit(len(data))

    def ended(self, reason: str) -> None:
        self.is_open = False
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(OutcomeUnknown(0))
                answer.exception()
        if not self.gone.done():
            self.gone.set_result(None)
        if not self._is_leaving:
            self._over(reason)

    # Overridden by subclasses.

    def credit(self, size_bytes: int) -> int:
        """Return the credit to grant for received bytes."""
        return size_bytes

    def handle(self, message: ServerMessage) -> None:
        """Handle a message that is not the reply to a pending request."""

    def _dispatch(self, message: ServerMessage) -> None:
        match message:
            case Transacted(cid=cid) | Fetched(cid=cid) | Settled(cid=cid):
                self._answer(cid, message)
            case Failed(cid=cid, error=error) if cid in self._waiting:
                self._waiting[cid].set_exception(_error_of(error))
            case WrittenBatch(cids):
                for cid in cids if self._waiting else ():
                    self._answer(cid, message)
                self.handle(message)
            case Stop():
                self._connection.drop("the server is stopping")
            case Disconnected():
                pass  # the stream ends after it
            case _:
                self.handle(message)

    def _answer(self, cid: bytes, message: ServerMessage) -> None:
        answer = self._waiting.get(cid)
        if answer is not None and not answer.done():
            answer.set_result(message)


class WriterStream(ClientStream):
    """Stream of a writer. `answered` receives the cids of WRITEs, and the error if there is one."""

    def __init__(
        self,
        connection: Connection,
        id: bytes | int | None,
        *,
        answered: Callable[[Sequence[bytes], HeadraceError | None], None],
        over: Callable[[str], None],
    ) -> None:
        self._answered = answered
        super().__init__(connection, encode.connect_writer(id), with_ids=False, over=over)

    def handle(self, message: ServerMessage) -> None:
        match message:
            case WrittenBatch(cids):
                self._answered(cids, None)
            case Failed(cid=cid, error=error):
                self._answered([cid], _error_of(error))


class ReaderStream(ClientStream):
    """Stream of a reader. `arrived` receives pushed messages; `credit_of` returns the credit to grant for received bytes."""

    def __init__(
        self,
        connection: Connection,
        kind: ReaderKind,
        name: str,
        *,
        auto_commit: bool,
        arrived: Callable[[MessageBatch], None],
        credit_of: Callable[[int], int],
        over: Callable[[str], None],
    ) -> None:
        self._arrived, self._credit_of = arrived, credit_of
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(connection, encode.connect_reader(kind, auto_commit, name), with_ids=not auto_commit, over=over)

    def credit(self, size_bytes: int) -> int:
        return self._credit_of(size_bytes)

    def ended(self, reason: str) -> None:
        if not self.connected.done():
            self.connected.set_exception(OutcomeUnknown(0))
            self.connected.exception()
        super().ended(reason)

    def handle(self, message: ServerMessage) -> None:
        match message:
            case MessageBatch():
                self._arrived(message)
            case ReaderConnected(error) if not self.connected.done():
                if error is None:
                    self.connected.set_result(None)
                else:
                    self._is_leaving = True  # the server ends the stream after its error
                    self.connected.set_exception(_error_of(error))
                    self.connected.exception()

    async def settle(self, request: Request, ids: Sequence[bytes]) -> list[bool]:
        """Return for each message whether the server has settled it: False if the stream ends first."""
        try:
            answer = await self.request(lambda cid: encode.settle(request, cid, ids))
        except OutcomeUnknown:
            return [False] * len(ids)
        assert isinstance(answer, Settled)
        return [error is None for error in answer.errors]

    def settle_without_reply(self, request: Request, ids: Sequence[bytes]) -> None:
        """Settle messages without waiting for the reply. No request uses this cid."""
        self.send(encode.settle(request, b"\xff\xff\xff\xff", ids))


def _error_of(text: str) -> Refused:
    """Return the error. A Headrace server sends its kind before the first colon."""
    return Refused(code=0, text=text, kind=_KINDS.get(text, text.partition(":")[0]))
