"""Large JSON requests: bounded work in each turn of the event loop, and none at all for a peer without rights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.limits import RUSTLOG_DECODE_STEP_BYTES
from headrace.sessions.rustlog.session import RustLogSession
from headrace.wire.rustlog import Dialect, encode_request
from headrace.wire.rustlog import messages as m
from tests.server.test_access import enforced
from tests.sessions.rustlog.support import WHO, Peer, running_server
from tests.sessions.wire import Wire

JSON, BINARY = Dialect.JSON, Dialect.BINARY
LARGE = encode_request(JSON, m.Produce("t", 0, [b""] * 100_000))
assert len(LARGE) > 4 * RUSTLOG_DECODE_STEP_BYTES


async def test_other_connections_are_served_while_a_large_request_is_decoded() -> None:
    async with running_server() as server:
        large, other = server.connect(), server.connect()
        await other.exchange(BINARY, m.CreateTopic("t", 1))
        large.send(LARGE)
        assert large.wire.pauses == 1, "not read while its request is decoded"
        for _ in range(len(LARGE) // RUSTLOG_DECODE_STEP_BYTES):
            await asyncio.sleep(0)
            assert await other.exchange(JSON, m.Ping()) == m.Pong()
            assert large.heard() == [] and server.broker.bounds(WHO, "t", 0).end == 0
        assert await large.replies(1) == [m.ProduceReply(range(100_000))]
        assert large.wire.pauses == 0


async def test_requests_before_and_after_a_large_one_keep_their_order() -> None:
    async with running_server() as server:
        peer = server.connect()
        await peer.exchange(BINARY, m.CreateTopic("t", 1))
        wrong = b'{"Produce":{"topic":"t","partition":0,"records":[' + b"[1]," * 30_000 + b'"x"]}}'
        small = encode_request(BINARY, m.Produce("t", 0, [b"a"]))
        peer.send(small + LARGE + small + len(wrong).to_bytes(4, "big") + wrong + encode_request(JSON, m.Ping()))
        first, large, second, error, pong = await peer.replies(5)
        assert (first, large, second) == (
            m.ProduceReply(range(1)),
            m.ProduceReply(range(1, 100_001)),
            m.ProduceReply(range(100_001, 100_002)),
        )
        assert isinstance(error, m.ErrorReply) and "failed to parse request: Expected `array`, got `str`" in error.message
        assert pong == m.Pong()


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_lost_while_its_request_is_decoded_publishes_nothing(turns: int) -> None:
    async with running_server() as server:
        wire = Wire()
        peer = Peer(RustLogSession(wire, server.broker, WHO, server.context), wire)
        await peer.exchange(BINARY, m.CreateTopic("t", 1))
        peer.send(LARGE)
        for _ in range(turns):
            await asyncio.sleep(0)
        peer.session.lost()
        for _ in range(20):
            await asyncio.sleep(0)
        assert server.broker.bounds(WHO, "t", 0).end == 0


async def test_a_drain_completes_a_large_request() -> None:
    async with running_server() as server:
        peer = server.connect()
        await peer.exchange(BINARY, m.CreateTopic("t", 1))
        peer.send(LARGE)
        peer.session.closing()
        assert await peer.replies(1) == [m.ProduceReply(range(100_000))]
        assert await peer.closed() == ("drained", False)


async def test_where_access_is_enforced_an_anonymous_peer_may_not_send_a_large_frame(tmp_path: Path) -> None:
    with enforced(tmp_path) as broker:
        reader, writer = await asyncio.open_connection(*broker.addresses[0])
        writer.write(LARGE[:100])
        async with asyncio.timeout(300):
            reply = await reader.read(-1)
        writer.close()
    assert b"max frame size exceeded: %d bytes (max 8192 for a peer without rights)" % (len(LARGE) - 4) in reply
