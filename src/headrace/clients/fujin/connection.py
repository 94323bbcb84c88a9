"""A client's QUIC connection to a Fujin server: streams, each with somebody who hears what comes on it; pings are answered."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from headrace.clients.errors import ConnectFailed
from headrace.clients.tls import TlsOptions
from headrace.net.quic.endpoint import NO_ERROR, ClientEndpoint, ClientTls
from headrace.wire.fujin import ALPN, encode

_OPENED_BY_SERVER = 1
"""The last two bits of such a stream's number."""


class StreamReceiver(Protocol):
    """Whoever uses a stream."""

    def receive(self, data: bytes) -> int:
        """Returns how many received bytes are used up: the server may send as many more."""

    def ended(self, reason: str) -> None:
        """Nothing more will come. Called once."""


class Connection:
    """Made by `open_connection`. `lost` is called once, with a reason, unless `close` was called before."""

    def __init__(self, endpoint: ClientEndpoint, lost: Callable[[str], None]) -> None:
        self._endpoint, self._carrier, self._tell_lost = endpoint, endpoint.carrier, lost
        self._hearers: dict[int, StreamReceiver] = {}
        self._is_over = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carrier.attach(self)

    # What the client asks.

    def open(self, hearer: StreamReceiver, frames: bytes) -> int:
        """A new stream, with its first words."""
        stream = self._carrier.open_stream()
        self._hearers[stream] = hearer
        self._carrier.send(stream, frames)  # the number is taken by sending, not by asking for it
        return stream

    def send(self, stream: int, frames: bytes) -> None:
        if stream in self._hearers:
            self._carrier.send(stream, frames)

    def taken(self, stream: int, size_bytes: int) -> None:
        if stream in self._hearers:
            self._carrier.taken(stream, size_bytes)

    def finish(self, stream: int) -> None:
        """Say no more on the stream, and hear no more."""
        if self._hearers.pop(stream, None) is not None:
            self._carrier.send(stream, b"", finish=True)
            self._carrier.ignore(stream)

    def close(self) -> None:
        """Nothing is reported after this."""
        self._is_over = True
        self._hearers.clear()
        self._carrier.close(NO_ERROR, "")
        self._carrier.give_up("closed")

    def drop(self, reason: str) -> None:
        """Give it up, as if it had been lost."""
        if not self._is_over:
            self._carrier.close(NO_ERROR, reason)
            self._end(reason)
            self._carrier.give_up(reason)

    # What the carrier tells: `ConnectionReceiver`.

    def connected(self) -> None:
        distrust = self._endpoint.distrust()
        if distrust is not None:
            self.drop(distrust)
        elif not self.ready.done():
            self.ready.set_result(None)

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        if stream & 3 == _OPENED_BY_SERVER:
            self._carrier.taken(stream, len(data))
            if finished:
                self._carrier.send(stream, encode.PONG, finish=True)
            return
        hearer = self._hearers.get(stream)
        if hearer is None:
            self._carrier.taken(stream, len(data))
            return
        if data:
            self._carrier.taken(stream, hearer.receive(data))
        if finished and self._hearers.get(stream) is hearer:
            self.finish(stream)
            hearer.ended("the server closed the stream")

    def reset(self, stream: int) -> None:
        """A server that has finished asks to be sent no more: what it sent before still counts."""
        self._carrier.abort(stream)

    def progressed(self) -> None:
        """The window of the client bounds what waits here."""

    def lost(self, reason: str) -> None:
        self._end(f"connection lost: {reason}")
        self._endpoint.close()

    def _end(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        hearers, self._hearers = self._hearers, {}
        for hearer in hearers.values():
            hearer.ended(reason)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))
            self.ready.exception()
        else:
            self._tell_lost(reason)


async def open_connection(
    host: str, port: int, tls: ClientTls, lost: Callable[[str], None], *, timeout_seconds: float, idle_seconds: float
) -> Connection:
    """Raises `ConnectFailed`."""
    try:
        async with asyncio.timeout(timeout_seconds):
            endpoint = await ClientEndpoint.open(host, port, alpn=ALPN, tls=tls, idle_seconds=idle_seconds)
            connection = Connection(endpoint, lost)
            try:
                endpoint.start()
                await connection.ready
            except BaseException:
                connection.close()
                raise
    except TimeoutError:
        raise ConnectFailed(host=host, port=port, reason=f"no answer within {timeout_seconds:g} s") from None
    except ConnectionError as failure:
        raise ConnectFailed(host=host, port=port, reason=str(failure)) from None
    except OSError as failure:
        raise ConnectFailed(host=host, port=port, reason=failure.strerror or str(failure)) from failure
    return connection


def trust(host: str, tls: TlsOptions | None, fingerprint: str | None) -> ClientTls:
    """Whom to believe. A server on this machine that nobody was said to vouch for is believed: it may have made its certificate."""
    if tls is not None:
        return ClientTls(
            ca_file=None if tls.ca_file is None else Path(tls.ca_file),
            fingerprint=fingerprint,
            certificate_file=None if tls.certificate_file is None else Path(tls.certificate_file),
            key_file=None if tls.key_file is None else Path(tls.key_file),
            server_name=tls.server_name,
        )
    if fingerprint is not None:
        return ClientTls(fingerprint=fingerprint)
    return ClientTls(insecure=_is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
