"""The first words on a FlyMQ connection, where there is a user to log in as."""

from __future__ import annotations

import asyncio

from headrace.clients.errors import ConnectFailed
from headrace.errors import WireError
from headrace.wire.flymq import Dialect, Opcode, ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.access_messages import Auth, AuthReply
from headrace.wire.flymq.messages import Failure, ReplyFrame


class LoginRefused(ConnectFailed):
    """The server did not take the name and the password."""

    kind = "not_authorized"


class Login:
    """One attempt. Nothing else is said on the connection before it is answered."""

    def __init__(self, host: str, port: int, dialect: Dialect) -> None:
        self._host, self._port, self._dialect = host, port, dialect
        self._decoder = ReplyDecoder()
        self._answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def frame(self, user: str, password: str) -> bytes:
        return encode_request(Auth(user, password))

    def receive(self, data: bytes) -> None:
        for event in self._decoder.feed(data):
            if not self._answer.done():
                self._answer.set_result(self._refusal(event))

    def lost(self, reason: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectFailed(host=self._host, port=self._port, reason=reason))

    async def done(self, seconds: float) -> None:
        """Raises `LoginRefused`, `ConnectFailed`."""
        try:
            async with asyncio.timeout(seconds):
                refusal = await self._answer
        except TimeoutError:
            raise ConnectFailed(host=self._host, port=self._port, reason=f"no answer to the login within {seconds:g} s") from None
        if refusal is not None:
            raise LoginRefused(host=self._host, port=self._port, reason=refusal)

    def _refusal(self, event: object) -> str | None:
        """Why not; None: logged in. A user may have been told to be answered in the other dialect: a success is known by its first byte."""
        if not isinstance(event, ReplyFrame) or event.opcode not in (Opcode.AUTH, Opcode.AUTH_RESPONSE, Opcode.ERROR):
            return "the server does not understand logins"
        if event.opcode != Opcode.ERROR and event.payload[:1] == b"\x01":
            return None
        try:
            reply = decode_reply(event, self._dialect)
        except WireError:
            return "the login was refused"
        if isinstance(reply, Failure):
            return reply.message
        assert isinstance(reply, AuthReply)
        return reply.error or "the login was refused"
