"""Login on a FlyMQ connection."""

from __future__ import annotations

import asyncio

from headrace.clients.errors import ConnectFailed
from headrace.errors import WireError
from headrace.wire.flymq import Dialect, Opcode, ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.access_messages import Auth, AuthReply
from headrace.wire.flymq.messages import Failure, ReplyFrame


class LoginRefused(ConnectFailed):
    """The server rejected the user name or password."""

    kind = "not_authorized"


class Login:
    """One login attempt. No other request is sent before its reply."""

    def __init__(self, host: str, port: int, dialect: Dialect) -> None:
        self._host, self._port, self._dialect = host, port, dialect
        self._decoder = ReplyDecoder()
        self._answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def frame(self, user: str, password: str) -> bytes:
        return encode_request(Auth(user, password))

    def receive(self, data: bytes) -> None:
        for event in self._decoder.feed(data):
            if not self._answer.done():
                self._answer.set_result(self._error_of(event))

    def lost(self, reason: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectFailed(host=self._host, port=self._port, reason=reason))

    async def done(self, seconds: float) -> None:
        """Wait for the reply. Raises `LoginRefused`, `ConnectFailed`."""
        try:
            async with asyncio.timeout(seconds):
                error = await self._answer
        except TimeoutError:
            raise ConnectFailed(host=self._host, port=self._port, reason=f"no reply to the login within {seconds:g} s") from None
        if error is not None:
            raise LoginRefused(host=self._host, port=self._port, reason=error)

    def _error_of(self, event: object) -> str | None:
        """Return why the login failed; None on success, which the first byte shows in both dialects of the reply."""
        if not isinstance(event, ReplyFrame) or event.opcode not in (Opcode.AUTH, Opcode.AUTH_RESPONSE, Opcode.ERROR):
            return "the server does not support logins"
        if event.opcode != Opcode.ERROR and event.payload[:1] == b"\x01":
            return None
        try:
            reply = decode_reply(event, self._dialect)
        except WireError:
            return "the login was rejected"
        if isinstance(reply, Failure):
            return reply.message
        assert isinstance(reply, AuthReply)
        return reply.error or "the login was rejected"
