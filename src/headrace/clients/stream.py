"""TCP connection of a client, optionally with TLS. Received bytes go to a callback; writes of one loop iteration are combined."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections.abc import Callable
from typing import Final, cast

from headrace.clients.errors import ConnectFailed
from headrace.clients.tls import TlsOptions, TlsUnusable

_PLAIN_SERVER: Final = ("WRONG_VERSION_NUMBER", "SSLV3_ALERT_HANDSHAKE_FAILURE", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""Reasons of a failed handshake with a server that does not use TLS."""

CERTIFICATE_REQUIRED: Final = "the server requires a client certificate: certificate_file and key_file, or --tls-certificate and --tls-key"


class Stream(asyncio.Protocol):
    """Connection created by `open_stream`. `receive` gets the bytes; `lost` is called once with a reason unless `close` was called.

    A connection that ends before `open_stream` returns is a failed attempt, not a lost connection.
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
        if isinstance(failure, ssl.SSLError) and failure.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
            self._end(CERTIFICATE_REQUIRED)
        else:
            self._end(f"connection lost: {failure}" if failure else "the server closed the connection")

    def write(self, frames: bytes) -> None:
        """Queue frames without blocking. The caller bounds the amount."""
        if self._is_closed:
            return
        if not self._unwritten:
            self._loop.call_soon(self._write_out)
        self._unwritten.append(frames)

    def pause_reading(self) -> None:
        """Pause reading. Calls are counted: n pauses need n resumes."""
        self._pauses += 1
        if self._pauses == 1 and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        assert self._pauses > 0, "every resume has its pause"
        self._pauses -= 1
        if self._pauses == 0 and not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def is_paused(self) -> bool:
        return self._pauses > 0

    def close(self) -> None:
        """Write queued frames, then close. No callback is called afterwards."""
        self._write_out()
        self._is_closed = True
        self._transport.close()

    def drop(self, reason: str) -> None:
        """Abort the connection as if it were lost."""
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
        """Report the end of the connection from now on. Returns the reason if it has already ended."""
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
    """Open a connection. Raises `ConnectFailed`."""
    loop = asyncio.get_running_loop()
    try:
        context = None if tls is None else tls.context()
        name = None if tls is None else tls.server_name or host
        async with asyncio.timeout(timeout_seconds):
            _, stream = await loop.create_connection(lambda: Stream(receive, lost), host, port, ssl=context, server_hostname=name)
    except TlsUnusable as failure:
        raise ConnectFailed(host=host, port=port, reason=str(failure)) from None
    except TimeoutError:
        raise ConnectFailed(host=host, port=port, reason=f"no reply within {timeout_seconds:g} s") from None
    except OSError as failure:
        raise ConnectFailed(host=host, port=port, reason=_reason_of(failure)) from failure
    early_end = stream.hand_over()
    if early_end is not None:
        raise ConnectFailed(host=host, port=port, reason=early_end, was_accepted=True)
    return stream


def _reason_of(failure: OSError) -> str:
    """Return the reason without asyncio's text around it, which repeats the address."""
    if isinstance(failure, ConnectionRefusedError):
        return "connection refused"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"the certificate of the server is not trusted: {failure.verify_message}"
    if isinstance(failure, ssl.SSLError):
        is_plain = failure.reason in _PLAIN_SERVER
        return f"the TLS handshake failed: {(failure.reason or str(failure)).lower().replace('_', ' ')}" + (
            "; the port may not use TLS: remove +tls from the scheme of the URL" if is_plain else ""
        )
    text = failure.strerror or str(failure)
    if text.startswith("Multiple exceptions: "):  # one for each address of a host name, and asyncio keeps only their texts
        numbers = set(map(int, re.findall(r"\[Errno (\d+)\]", text)))
        if numbers == {errno.ECONNREFUSED}:
            return "connection refused"
    return text
