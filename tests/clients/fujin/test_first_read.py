"""Bytes of a push reader as another client's first reads see them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.net.quic.endpoint import ClientEndpoint, ClientTls
from headrace.records import RecordBatch
from headrace.wire.fujin import ALPN, ReaderKind, encode
from tests.clients.fujin.support import WHO, fujin_server
from tests.net.polling import until
from tests.net.quic_peer import Client


class ReadingClient(Client):
    """Keeps the bytes of each read separate."""

    def __init__(self, endpoint: ClientEndpoint) -> None:
        super().__init__(endpoint)
        self.reads: list[bytes] = []

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        super().received(stream, data, finished)
        if stream & 3 == 0:
            self.reads.append(data)


@pytest.mark.parametrize("auto_commit", [False, True])
async def test_the_reply_to_connect_reader_is_alone_in_the_first_read(tmp_path: Path, auto_commit: bool) -> None:
    async with fujin_server(tmp_path) as server:
        await server.broker.ensure_topic(WHO, "t")
        await server.broker.publish(WHO, "t", RecordBatch([b"x" * 10] * 100))
        endpoint = await ClientEndpoint.open(
            server.host, server.port, alpn=ALPN, tls=ClientTls(fingerprint=server.fingerprint), idle_seconds=60
        )
        client = ReadingClient(endpoint)
        try:
            endpoint.start()
            async with asyncio.timeout(300):
                await client.up.wait()
            client.say(encode.connect_reader(ReaderKind.PUSH, auto_commit, "t"))
            await until(lambda: b"".join(client.reads).count(b"x" * 10) == 100)
            assert client.reads[0] == encode.reader_connected(None)
        finally:
            client.carrier.close(0, "")
            endpoint.close()
