"""A listener keeps working after the process ran out of file descriptors."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.net.listener import listening_socket
from tests.net.polling import until
from tests.net.test_listener import Sessions, connect, listening


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Make every new descriptor fail with EMFILE; open ones stay usable."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_accepting_pauses_and_resumes_by_itself() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        kept = await connect(listener)
        await until(lambda: listener.counters.open == 1)
        late = socket.socket()
        late.setblocking(False)
        loop = asyncio.get_running_loop()
        with no_more_descriptors():
            await loop.sock_connect(late, (listener.host, listener.port))
            await until(lambda: listener.counters.accept_pauses >= 2)
            assert listener.counters.accept_pauses < 100, "it does not spin"
            kept[1].write(b"still here")
            assert await kept[0].readexactly(10) == b"still here"
            assert listener.counters.open == 1
        await loop.sock_sendall(late, b"hello")
        async with asyncio.timeout(300):
            assert await loop.sock_recv(late, 5) == b"hello"
        reader, writer = await connect(listener)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        late.close()
        writer.close()
        kept[1].close()


async def test_a_connection_that_resets_before_it_is_accepted_affects_no_other() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        for _ in range(20):
            gone = socket.create_connection((listener.host, listener.port))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            gone.close()
        reader, writer = await connect(listener)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.close()


def test_an_address_that_is_taken_is_an_os_error() -> None:
    with listening_socket("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", taken.getsockname()[1])
