"""QUIC connection of a Fujin client: streams with their receivers, and replies to the server's pings."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from headrace.clients.errors import ConnectFailed
from headrace.clients.tls import TlsOptions
from headrace.net.quic.endpoint import NO_ERROR, REFUSED, ClientEndpoint, ClientTls, first_to_answer
from headrace.wire.fujin import ALPN, encode

_OPENED_BY_SERVER = 1
"""Last two bits of the id of a stream opened by the server."""


class StreamReceiver(Protocol):
    """Receives the bytes of a stream."""

    def receive(self, data: bytes) -> int:
        """Handle bytes. Returns the credit to grant to the server."""

    def ended(self, reason: str) -> None:
        """Handle the end of the stream. Called once."""


class Connection:
    """Connection created by `open_connection`. `lost` is called once with a reason unless `close` was called."""

    def __init__(self, endpoint: ClientEndpoint, lost: Callable[[str], None]) -> None:
        self._endpoint, self._carrier, self._tell_lost = endpoint, endpoint.carrier, lost
        self._receivers: dict[int, StreamReceiver] = {}
        self._is_over = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carrier.attach(self)

    # Called by the client.

    def open(self, receiver: StreamReceiver, frames: bytes) -> int:
        """Open a stream and send its first frames."""
        stream = self._carrier.open_stream()
        self._receivers[stream] = receiver
        self._carrier.send(stream, frames)  # sending allocates the stream id
        return stream

    def send(self, stream: int, frames: bytes) -> None:
        if stream in self._receivers:
            self._carrier.send(stream, frames)

    def taken(self, stream: int, size_bytes: int) -> None:
        if stream in self._receivers:
            self._carrier.taken(stream, size_bytes)

    def finish(self, stream: int) -> None:
        """Finish the stream and ignore further bytes."""
        if self._receivers.pop(stream, None) is not None:
            self._carrier.send(stream, b"", finish=True)
            self._carrier.ignore(stream)

    def close(self) -> None:
        """Close the connection. No callback is called afterwards."""
        self._is_over = True
        self._receivers.clear()
        self._carrier.close(NO_ERROR, "")
        self._carrier.give_up("closed")

    def drop(self, reason: str) -> None:
        """Close the connection as if it were lost."""
        if not self._is_over:
            self._carrier.close(NO_ERROR, reason)
            self._end(reason)
            self._carrier.give_up(reason)

    # `ConnectionReceiver`, called by the carrier.

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
        receiver = self._receivers.get(stream)
        if receiver is None:
            self._carrier.taken(stream, len(data))
            return
        if data:
            self._carrier.taken(stream, receiver.receive(data))
        if finished and self._receivers.get(stream) is receiver:
            self.finish(stream)
            receiver.ended("the server closed the stream")

    def reset(self, stream: int) -> None:
        """Stop sending on a stream that the server has finished. Bytes it sent before remain valid."""
        self._carrier.abort(stream)

    def progressed(self) -> None:
        """Do nothing: the client's window bounds unsent bytes."""

    def lost(self, reason: str) -> None:
        self._end(f"connection lost: {reason}", ConnectionRefusedError if reason == REFUSED else ConnectionError)
        self._endpoint.close()

    def _end(self, reason: str, error: type[ConnectionError] = ConnectionError) -> None:
        if self._is_over:
            return
        self._is_over = True
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.ended(reason)
        if not self.ready.done():
            self.ready.set_exception(error(reason))
            self.ready.exception()
        else:
            self._tell_lost(reason)


async def open_connection(
    host: str, port: int, tls: ClientTls, lost: Callable[[str], None], *, timeout_seconds: float, idle_seconds: float
) -> Connection:
    """Open a connection to the first address of the host that answers. Raises `ConnectFailed`."""

    async def attempt(address: str) -> Connection:
        endpoint = await ClientEndpoint.open(host, port, alpn=ALPN, tls=tls, idle_seconds=idle_seconds, address=address)
        connection = Connection(endpoint, lost)
        try:
            endpoint.start()
            await connection.ready
        except BaseException:
            connection.close()
            raise
        return connection

    try:
        return await first_to_answer(host, port, attempt, seconds=timeout_seconds)
    except TimeoutError:
        raise ConnectFailed(host=host, port=port, reason=f"no reply within {timeout_seconds:g} s") from None
    except ConnectionError as failure:
        raise ConnectFailed(host=host, port=port, reason=str(failure)) from None
    except OSError as failure:
        raise ConnectFailed(host=host, port=port, reason=failure.strerror or str(failure)) from failure


def trust(host: str, tls: TlsOptions | None, fingerprint: str | None) -> ClientTls:
    """Return the TLS settings. Without options, any certificate on loopback is trusted: the server may have generated its own."""
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
