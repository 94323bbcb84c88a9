"""Relay of a QUIC stream: a connection to the coordinator with one stream, which continues that of a peer.

    peer ⇄ StreamLink ⇄ StreamRelay ⇄ stream of the coordinator

Each relayed stream has a connection of its own, so a peer that does not read uses up no credit of others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from headrace import limits
from headrace.net.quic.endpoint import NO_ERROR, REFUSED, ClientEndpoint, ClientTls, first_to_answer
from headrace.net.relay import PREFACE, Place, RelayedLink, Relays

_OPENED_BY_SERVER: Final = 1
"""The last two bits of the id of a stream."""


class StreamRelay:
    """A `ConnectionReceiver` of the coordinator and, from `attach` on, a `StreamSession` of the peer's stream."""

    def __init__(self, owner: Relays, protocol: str, place: Place, endpoint: ClientEndpoint, pong: bytes) -> None:
        self._owner, self.protocol, self.place, self._endpoint, self._pong = owner, protocol, place, endpoint, pong
        self._carrier = endpoint.carrier
        self._stream = -1
        self._link: RelayedLink | None = None
        self._untaken_bytes = 0
        """Received bytes for which the coordinator gets no credit yet, because the peer does not read."""
        self._is_full = False
        """The peer is not read, because the coordinator does not read."""
        self._is_over = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carrier.attach(self)

    @classmethod
    async def open(cls, owner: Relays, protocol: str, place: Place, *, alpn: str, pong: bytes, ca: str) -> StreamRelay:
        """Raises `OSError`."""
        tls = ClientTls(ca_file=Path(ca) if ca else None, fingerprint=place.fingerprint or None)

        async def attempt(address: str) -> StreamRelay:
            endpoint = await ClientEndpoint.open(
                place.host, place.port, alpn=alpn, tls=tls, idle_seconds=limits.IDLE_SECONDS_MAX, address=address
            )
            relay = cls(owner, protocol, place, endpoint, pong)
            try:
                endpoint.start()
                await relay.ready
            except BaseException:
                relay.abort("not handed over")
                raise
            return relay

        return await first_to_answer(place.host, place.port, attempt, seconds=limits.RELAY_CONNECT_SECONDS_MAX)

    def attach(self, link: RelayedLink, unserved: bytes) -> None:
        self._link = link
        self._owner.entered(self)
        self._stream = self._carrier.open_stream()
        link.replace_session(self)
        self.receive(PREFACE + unserved)

    # `ConnectionReceiver`: called by the carrier.

    def connected(self) -> None:
        distrust = self._endpoint.distrust()
        if distrust is not None:
            self.abort(distrust)
        elif not self.ready.done():
            self.ready.set_result(None)

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        if stream & 3 == _OPENED_BY_SERVER:
            self._carrier.taken(stream, len(data))
            if finished:
                self._carrier.send(stream, self._pong, finish=True)
            return
        if self._link is None:
            self._carrier.taken(stream, len(data))
            return
        self._link.send(data)
        self._untaken_bytes += len(data)
        self.drained()
        if finished:
            self.abort("the coordinator has closed the stream")

    def reset(self, stream: int) -> None:
        if stream == self._stream:
            self.abort("the coordinator has reset the stream")

    def progressed(self) -> None:
        if self._is_full and self._link is not None and self._carrier.unacknowledged(self._stream) <= limits.RELAY_BUFFER_BYTES:
            self._is_full = False
            self._link.resume_reading()

    def lost(self, reason: str = "") -> None:
        """The connection to the coordinator has ended, or (without a reason) the stream of the peer."""
        self.abort(reason or "the peer has left")
        if reason:
            self._endpoint.close()

    # `StreamSession`: called by the peer's stream.

    def receive(self, data: bytes) -> None:
        self._carrier.send(self._stream, data)
        if not self._is_full and self._link is not None and self._carrier.unacknowledged(self._stream) > limits.RELAY_BUFFER_BYTES:
            self._is_full = True
            self._link.pause_reading()

    def drained(self) -> None:
        if self._untaken_bytes and self._link is not None and self._link.unsent_bytes <= limits.OUTPUT_HIGH_WATER_BYTES:
            size_bytes, self._untaken_bytes = self._untaken_bytes, 0
            self._carrier.taken(self._stream, size_bytes)

    def finished(self) -> None:
        """Pass on the end of the requests. The coordinator answers them and closes."""
        self._carrier.send(self._stream, b"", finish=True)

    def closing(self) -> None:
        self.finished()

    # Ending.

    def abort(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._owner.left(self)
        if not self.ready.done():
            self.ready.set_exception(ConnectionRefusedError(reason) if reason == REFUSED else ConnectionError(reason))
            self.ready.exception()
        link, self._link = self._link, None
        if link is not None:
            link.close(f"coordinator lost: {reason}", error=False)
        self._carrier.close(NO_ERROR, "")
        self._carrier.give_up(reason)
