"""Login on a FlyMQ connection."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.clients.errors import ConnectFailed, LoginRefused
from headrace.clients.options import ClientOptions
from headrace.errors import WireError
from headrace.wire.flymq import Dialect, Opcode, ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.access_messages import Auth, AuthReply
from headrace.wire.flymq.messages import Failure, ReplyFrame

_KEY_ID_CHARACTERS_MAX: Final = 12


class Login:
    """One login attempt. No other request is sent before its reply."""

    def __init__(self, host: str, port: int, dialect: Dialect) -> None:
        self._host, self._port, self._dialect = host, port, dialect
        self._decoder = ReplyDecoder()
        self._answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def frame(self, options: ClientOptions) -> bytes:
        """Return the request. An API key, `hr_ID_SECRET`, is the password of a user named by its id."""
        if not options.api_key:
            return encode_request(Auth(options.user, options.password))
        key = options.api_key if isinstance(options.api_key, str) else options.api_key.decode("utf-8", "replace")
        return encode_request(Auth(key.removeprefix("hr_").partition("_")[0][:_KEY_ID_CHARACTERS_MAX], key))

    def receive(self, data: bytes) -> None:
        for event in self._decoder.feed(data):
            if not self._answer.done():
                self._answer.set_result(self._error_of(event))

    def lost(self, reason: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectFailed(host=self._host, port=self._port, reason=reason, was_accepted=True))

    async def done(self, seconds: float) -> None:
        """Wait for the reply. Raises `LoginRefused`, `ConnectFailed`."""
        try:
            async with asyncio.timeout(seconds):
                error = await self._answer
        except TimeoutError:
            raise ConnectFailed(host=self._host, port=self._port, reason=f"no reply to the login within {seconds:g} s") from None
        if error is not None:
            raise LoginRefused(host=self._host, port=self._port, reason=error, was_accepted=True)

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
