"""A peer that sends many small writes and does not wait for its replies is read less often, but never waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from headrace.net.connection import READ_BYTES_A_TURN, REST_BYTES_MIN, Connection, NetLimits
from tests.net.polling import WAIT_SECONDS, until
from tests.net.test_listener import Echo, Sessions, connect, listening

SMALL = b"x" * REST_BYTES_MIN


class Debtor(Echo):
    """Owes a reply for what it has received, until the test sends one."""

    def receive(self, data: bytes) -> None:
        self.received += data
        self.owes_reply = True
        self.changed.set()


@asynccontextmanager
async def indebted() -> AsyncIterator[tuple[Debtor, Connection, asyncio.StreamWriter]]:
    """Yield a session that owes a reply, its connection, and the peer."""
    sessions = Sessions(make=Debtor)
    async with listening([sessions.protocol]) as listener:
        _, writer = await connect(listener)
        writer.write(b"x")
        await until(lambda: bool(sessions.opened))
        session = cast(Debtor, sessions.opened[0])
        await session.until(lambda: session.owes_reply)
        yield session, cast(Connection, session.link), writer
        writer.transport.abort()
        await session.until(lambda: "lost" in session.events)


def is_read(connection: Connection) -> bool:
    return connection._transport.is_reading()


async def test_a_peer_that_sends_more_before_its_reply_is_read_again_after_the_reply() -> None:
    async with indebted() as (_, connection, _writer):
        connection.data_received(SMALL)
        assert not is_read(connection)
        connection.send(b"reply")
        assert is_read(connection)


async def test_a_peer_without_a_reply_is_read_again_soon() -> None:
    async with indebted() as (session, connection, writer):
        connection.data_received(SMALL)
        writer.write(b"more")
        await session.until(lambda: session.received.endswith(b"more"))
        assert not session.events


@pytest.mark.parametrize("size_bytes", [REST_BYTES_MIN - 1, READ_BYTES_A_TURN])
async def test_a_few_requests_and_a_full_buffer_are_read_on(size_bytes: int) -> None:
    async with indebted() as (_, connection, _writer):
        connection.data_received(bytes(size_bytes))
        await asyncio.sleep(0)  # after a full buffer, the next turn of the loop reads on
        assert is_read(connection)


async def test_a_peer_that_waits_for_its_replies_is_read_on() -> None:
    async with indebted() as (session, connection, _writer):
        session.owes_reply = False
        connection.data_received(SMALL)
        assert is_read(connection)


async def test_a_pause_of_the_session_outlasts_the_rest() -> None:
    async with indebted() as (_, connection, _writer):
        connection.data_received(SMALL)
        connection.pause_reading()
        connection.send(b"reply")
        assert not is_read(connection)
        connection.resume_reading()
        assert is_read(connection)


@pytest.mark.parametrize("size_bytes", [REST_BYTES_MIN, READ_BYTES_A_TURN])
async def test_the_end_of_a_peer_is_seen_when_its_connection_closes_while_it_is_not_read(size_bytes: int) -> None:
    sessions = Sessions(make=Debtor)
    # Without a time to linger, only the end of the peer ends the connection.
    async with listening([sessions.protocol], NetLimits(linger_seconds=0.0)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await until(lambda: bool(sessions.opened))
        session = sessions.opened[0]
        await session.until(lambda: session.owes_reply)
        connection = cast(Connection, session.link)
        connection.data_received(bytes(size_bytes))
        assert not is_read(connection)
        connection.close("done", error=False)
        async with asyncio.timeout(WAIT_SECONDS):
            assert await reader.read() == b""
        writer.close()
        await session.until(lambda: "lost" in session.events)
