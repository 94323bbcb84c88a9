"""A connection for clients, TCP with TLS or without: bytes come by callback, writes of one turn of the loop leave together."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from headrace.clients.errors import ConnectFailed
from headrace.clients.tls import TlsOptions, TlsUnusable


class Stream(asyncio.Protocol):
    """`receive` gets the bytes; `lost` is called once, with a reason, unless `close` was called before.

    Made by `open_stream`: a connection that ends before it was handed over is a failed attempt, not a lost connection.
    """

    def __init__(self, receive: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive, self._lost = receive, lost
        self._transport: asyncio.Transport
        self._unwritten: list[bytes] = []
        self._pauses = 0
        self._is_closed = False
        self._is_handed_over = False
        self._reason = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_closed:
            self._receive(data)

    def eof_received(self) -> bool:
        self._end("the server closed the connection")
        return False

    def connection_lost(self, failure: Exception | None) -> None:
        self._end(f"connection lost: {failure}" if failure else "the server closed the connection")

    def write(self, frames: bytes) -> None:
        """Never blocks. How much may wait is for the caller to bound."""
        if self._is_closed:
            return
        if not self._unwritten:
            self._loop.call_soon(self._write_out)
        self._unwritten.append(frames)

    def pause_reading(self) -> None:
        """Counted: n pauses need n resumes."""
        self._pauses += 1
        if self._pauses == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        assert self._pauses > 0, "a resume without its pause"
        self._pauses -= 1
        if self._pauses == 0 and not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def is_paused(self) -> bool:
        return self._pauses > 0

    def close(self) -> None:
        """Write what waits, then close. Nothing is received or reported after this."""
        self._write_out()
        self._is_closed = True
        self._transport.close()

    def drop(self, reason: str) -> None:
        """Give this connection up at once, as if it had been lost."""
        self._transport.abort()
        self._end(reason)

    def _write_out(self) -> None:
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, []
            self._transport.write(unwritten[0] if len(unwritten) == 1 else b"".join(unwritten))

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self._is_closed, self._reason = True, reason
            if self._is_handed_over:
                self._lost(reason)

    def hand_over(self) -> str | None:
        """From now on the end is reported. Returns why it has ended already, if it has."""
        self._is_handed_over = True
        return self._reason if self._is_closed else None


async def open_stream(
    host: str,
    port: int,
    receive: Callable[[bytes], None],
    lost: Callable[[str], None],
    *,
    timeout_seconds: float,
    tls: TlsOptions | None = None,
) -> Stream:
    """Raises `ConnectFailed`."""
    loop = asyncio.get_running_loop()
    try:
        context = None if tls is None else tls.context()
        name = None if tls is None else tls.server_name or host
        async with asyncio.timeout(timeout_seconds):
            _, stream = await loop.create_connection(lambda: Stream(receive, lost), host, port, ssl=context, server_hostname=name)
    except TlsUnusable as failure:
        raise ConnectFailed(host=host, port=port, reason=str(failure)) from None
    except TimeoutError:
        raise ConnectFailed(host=host, port=port, reason=f"no answer within {timeout_seconds:g} s") from None
    except OSError as failure:
        raise ConnectFailed(host=host, port=port, reason=_plainly(failure)) from failure
    early_end = stream.hand_over()
    if early_end is not None:
        raise ConnectFailed(host=host, port=port, reason=early_end)
    return stream


def _plainly(failure: OSError) -> str:
    """asyncio wraps the reason in a sentence that repeats the address; a user wants the reason."""
    if isinstance(failure, ConnectionRefusedError):
        return "connection refused"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"the certificate of the server cannot be trusted: {failure.verify_message}"
    if isinstance(failure, ssl.SSLError):
        return f"no TLS with this server: {(failure.reason or str(failure)).lower().replace('_', ' ')}"
    return failure.strerror or str(failure)
