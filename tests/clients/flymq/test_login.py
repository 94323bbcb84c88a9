"""FlyMQ client with a login, which precedes all requests on every connection."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.clients.errors import ConnectFailed, LoginRefused
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.wire.flymq import RequestDecoder, encode_reply
from headrace.wire.flymq.access_messages import Auth, AuthReply
from headrace.wire.flymq.messages import Metadata, RequestEvent, TopicList
from tests.canaries import secret, shows

OPTIONS = FlyMqOptions(user="ann", password=secret("password"), connect_seconds=30.0, backoff=lambda attempt: 0.01)


class Server:
    """Server with scripted login replies and no topics. The test drops its connections."""

    def __init__(self, answer: AuthReply | None) -> None:
        self.answer = answer
        self.heard: list[list[RequestEvent]] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._server.close()
        self.drop()

    def drop(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        heard: list[RequestEvent] = []
        self.heard.append(heard)
        decoder = RequestDecoder()
        while data := await reader.read(65_536):
            for request in decoder.feed(data):
                heard.append(request)
                if isinstance(request, Auth) and self.answer is not None:
                    writer.write(encode_reply(0x70, self.answer))
                elif not isinstance(request, Auth | Metadata):
                    writer.write(encode_reply(0x08, TopicList([])))


async def test_every_connection_begins_with_the_login() -> None:
    async with Server(AuthReply(True, "", "ann", [])) as server:
        client = await FlyMqClient.connect("127.0.0.1", server.port, OPTIONS)
        server.drop()
        async with asyncio.timeout(300):
            while len(server.heard) < 2 or not server.heard[1]:  # noqa: ASYNC110  (the server has no event for it)
                await asyncio.sleep(0.005)
        client.abandon()
        assert [connection[0] for connection in server.heard] == [Auth("ann", OPTIONS.password)] * 2


async def test_a_rejected_login_has_the_text_of_the_server() -> None:
    async with Server(AuthReply(False, "invalid username or password")) as server:
        with pytest.raises(LoginRefused, match="invalid username or password") as caught:
            await FlyMqClient.connect("127.0.0.1", server.port, OPTIONS)
        assert not shows(str(caught.value))


async def test_a_server_that_does_not_answer_a_login_is_given_up() -> None:
    async with Server(None) as server:
        with pytest.raises(ConnectFailed, match="no reply to the login within 1 s"):
            await FlyMqClient.connect("127.0.0.1", server.port, replace(OPTIONS, connect_seconds=1.0))


def test_the_options_do_not_print_the_password() -> None:
    assert not shows(repr(OPTIONS))
