"""Slow frames are closed, and the memory of incomplete frames is limited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace.limits import FRAME_BYTES_PER_SECOND_MIN, UNFINISHED_BYTES_FREE
from headrace.net.connection import Connection
from headrace.net.counters import NetCounters
from headrace.net.listener import NetLimits
from headrace.sessions.contract import Link
from tests.net.polling import WAIT_SECONDS, until
from tests.net.test_listener import Echo, Sessions, connect, listening

CHECK_SECONDS = 0.05


class Lines(Echo):
    """A frame is a line; whole lines are sent back."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.held = b""

    def receive(self, data: bytes) -> None:
        *lines, self.held = (self.held + data).split(b"\n")
        self.held_bytes = len(self.held)
        for line in lines:
            self.link.send(line + b"\n")


def lines() -> Sessions:
    return Sessions("lines", make=Lines)


async def test_a_frame_that_hardly_grows_is_closed_and_no_other() -> None:
    async with listening([lines().protocol], NetLimits(frame_check_seconds=CHECK_SECONDS)) as listener:
        idle = await connect(listener)
        idle[1].write(b"done\n")
        assert await idle[0].readline() == b"done\n"
        reader, writer = await connect(listener)
        trickle = asyncio.create_task(_trickle(writer))
        async with asyncio.timeout(WAIT_SECONDS):
            assert await reader.read() == b""
        trickle.cancel()
        assert listener.counters.rejected == {"frame too slow": 1}
        idle[1].write(b"still here\n")
        assert await idle[0].readline() == b"still here\n"
        for each in (writer, idle[1]):
            each.close()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    """Send single bytes, far below the minimum rate but at least one per interval."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(CHECK_SECONDS / 4)


@asynccontextmanager
async def conversation() -> AsyncIterator[tuple[Connection, Callable[[bytes], Awaitable[None]]]]:
    """Return a connection that checks its frame only on demand, and a function that sends bytes and waits for their arrival."""
    sessions = lines()
    async with listening([sessions.protocol], NetLimits(frame_check_seconds=0)) as listener:
        _, writer = await connect(listener)

        async def send(chunk: bytes) -> None:
            before = listener.counters.bytes_in
            writer.write(chunk)
            await until(lambda: listener.counters.bytes_in == before + len(chunk))

        await send(b"begin")
        link = sessions.opened[0].link
        assert isinstance(link, Connection)
        yield link, send
        writer.close()


async def test_a_large_frame_that_grows_fast_enough_is_left_alone() -> None:
    async with conversation() as (connection, send):
        for _ in range(6):
            connection.check_frame(1.0)
            await send(b"x" * FRAME_BYTES_PER_SECOND_MIN)
        assert connection._counters.rejected == {}
        connection.check_frame(1.0)
        await send(b"x" * (FRAME_BYTES_PER_SECOND_MIN - 1))
        connection.check_frame(1.0)
        assert connection._counters.rejected == {"frame too slow": 1}


async def test_small_frames_cut_at_every_look_are_left_alone() -> None:
    async with conversation() as (connection, send):
        for _ in range(6):
            connection.check_frame(1.0)
            await send(b"end of it\nbegin of the next")
        assert connection._counters.rejected == {}


async def test_a_paused_peer_is_not_blamed_for_what_it_may_not_send() -> None:
    async with conversation() as (connection, _):
        connection.check_frame(1.0)
        connection.pause_reading()
        connection.check_frame(1.0)
        connection.resume_reading()
        connection.check_frame(1.0)
        assert connection._counters.rejected == {}
        connection.check_frame(1.0)
        assert connection._counters.rejected == {"frame too slow": 1}


async def test_unfinished_frames_have_a_sum_and_the_large_one_goes() -> None:
    counters = NetCounters()
    limits = NetLimits(unfinished_bytes_max=4 * UNFINISHED_BYTES_FREE)
    async with listening([lines().protocol], limits, counters) as listener:
        small, large, larger = [await connect(listener) for _ in range(3)]
        large[1].write(b"x" * 3 * UNFINISHED_BYTES_FREE)
        await until(lambda: counters.unfinished_bytes == 3 * UNFINISHED_BYTES_FREE)
        larger[1].write(b"x" * 2 * UNFINISHED_BYTES_FREE)
        assert await larger[0].read() == b""
        assert counters.rejected == {"too many unfinished frames": 1}
        larger[1].close()
        await until(lambda: counters.unfinished_bytes == 3 * UNFINISHED_BYTES_FREE)
        small[1].write(b"x" * UNFINISHED_BYTES_FREE)
        await until(lambda: counters.unfinished_bytes == 4 * UNFINISHED_BYTES_FREE)
        small[1].write(b"\n")
        await small[0].readline()
        await until(lambda: counters.unfinished_bytes == 3 * UNFINISHED_BYTES_FREE)
        for _, writer in (small, large):
            writer.transport.abort()
        await until(lambda: counters.unfinished_bytes == 0)
