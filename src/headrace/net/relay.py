"""Relays: connections to the coordinator on behalf of the peers of this broker.

    peer ⇄ Connection ⇄ Relay ⇄ listener of the coordinator

A session that gets a request for the coordinator hands its connection over: a relay logs in at the coordinator as the peer, sends the
requests that have no reply yet, and takes the place of the session. From then on it copies bytes in both directions. The coordinator
checks the login itself, so brokers need not trust each other.

A relay sends `PREFACE` first. The broker that receives it never relays the connection again, so two brokers that disagree about the
coordinator make no loop. Any peer may send it: it only loses the handover.

Each direction is read only while the other side takes its bytes, so a relay holds little more than `RELAY_BUFFER_BYTES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from headrace import limits
from headrace.errors import WireError
from headrace.net.counters import NetCounters
from headrace.net.tls import TlsRefused, TlsStream
from headrace.sessions.contract import Handed, Handover, Link, Login

log = logging.getLogger(__name__)

PREFACE: Final = b"HEADRACE-RELAY\n"
_TLS: Final = "tls://"
_ANSWER_BYTES_MAX: Final = 64 * limits.KIB
"""The answers to a login."""


class Place(NamedTuple):
    """Listener of the coordinator, written as `HOST:PORT`, `tls://HOST:PORT` or `tls://HOST:PORT#FINGERPRINT`."""

    host: str
    port: int
    is_encrypted: bool = False
    fingerprint: str = ""
    """SHA-256 of a self-signed certificate."""

    @classmethod
    def parse(cls, text: str) -> Place | None:
        address, _, fingerprint = text.removeprefix(_TLS).partition("#")
        host, _, port = address.rpartition(":")
        return cls(host.strip("[]"), int(port), text.startswith(_TLS), fingerprint) if host and port.isdigit() else None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        mark = f"#{self.fingerprint}" if self.fingerprint else ""
        return f"{_TLS if self.is_encrypted else ''}{host}:{self.port}{mark}"


class RelayedLink(Link, Protocol):
    """The connection of a peer, as a relay sees it."""

    @property
    def identity(self) -> str | None: ...

    @property
    def is_relayed(self) -> bool:
        """Whether another broker relays the connection to this one."""

    def replace_session(self, session: Any) -> None:
        """End the session and let this one continue, which is of the same kind: a `FramedSession` of a connection, a `StreamSession` of a
        stream."""


class AnyRelay(Protocol):
    """A connection to the coordinator that is logged in."""

    @property
    def protocol(self) -> str: ...

    @property
    def place(self) -> Place: ...

    def attach(self, link: RelayedLink, unserved: bytes) -> None:
        """Take the place of the session."""

    def abort(self, reason: str) -> None:
        """Close immediately."""


Open: TypeAlias = Callable[[str, Place, Login], Awaitable[AnyRelay]]
"""Connects to the coordinator. Raises `OSError`, `TlsRefused`, and `WireError` if the login is refused."""


class Relays:
    """The relays of a broker.

    `is_coordinator` tells whether this broker is the coordinator itself. `place_of` returns the coordinator's listener for a protocol, None
    if it is unknown. `context` returns the TLS settings for it.
    """

    def __init__(
        self,
        counters: NetCounters,
        *,
        is_coordinator: Callable[[], bool],
        place_of: Callable[[str], Place | None],
        context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        wait_seconds: float = limits.RELAY_WAIT_SECONDS_MAX,
    ) -> None:
        self.counters = counters
        self._is_coordinator, self._place_of, self._context, self._wait_seconds = is_coordinator, place_of, context, wait_seconds
        self._open: set[AnyRelay] = set()
        self._changed = asyncio.Event()

    def handover(self, protocol: str, link: RelayedLink, open: Open | None = None) -> Handover | None:
        """Return the handover of a connection. None: its peer is known by a certificate, which only the peer itself can present. Without
        `open` the relay is a TCP connection."""
        return None if link.identity is not None else partial(self._hand_over, protocol, link, open or self._logged_in)

    def coordinator_changed(self) -> None:
        """Let the waiting handovers look again, and end the relays to a former coordinator."""
        self._changed.set()
        self._changed = asyncio.Event()
        for relay in list(self._open):
            if self._place_of(relay.protocol) != relay.place:
                relay.abort("the coordinator has changed")

    async def _hand_over(self, protocol: str, link: RelayedLink, open: Open, login: Login, unserved: Callable[[], bytes]) -> Handed:
        loop = asyncio.get_running_loop()
        deadline, reason = loop.time() + self._wait_seconds, "the coordinator is not known"
        while not self._is_coordinator():
            left = deadline - loop.time()
            if left <= 0:
                self._report(protocol, link, reason)
                return Handed.REFUSED
            changed, place = self._changed, None if link.is_relayed else self._place_of(protocol)
            if place is not None:
                try:
                    async with asyncio.timeout(min(left, limits.RELAY_CONNECT_SECONDS_MAX)):
                        relay = await open(protocol, place, login)
                    try:
                        relay.attach(link, unserved())
                    except BaseException:
                        relay.abort("not handed over")
                        raise
                    return Handed.OVER
                except WireError as failure:
                    self._report(protocol, link, f"{place}: {failure}")
                    return Handed.REFUSED
                except (OSError, TlsRefused) as failure:  # includes a timeout
                    reason = f"{place}: {str(failure) or type(failure).__name__}"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left, limits.RELAY_RETRY_SECONDS))
        return Handed.HERE

    async def _logged_in(self, protocol: str, place: Place, login: Login) -> Relay:
        tls = TlsStream(self._context(), place.host) if place.is_encrypted else None
        relay = Relay(self, protocol, place, tls)
        try:
            await asyncio.get_running_loop().create_connection(lambda: relay, place.host, place.port)
            await relay.log_in(login)
        except BaseException:
            relay.abort("not handed over")
            raise
        return relay

    def _report(self, protocol: str, link: RelayedLink, reason: str) -> None:
        left_out = self.counters.end_lines.left_out(("handover", protocol), asyncio.get_running_loop().time())
        if left_out is not None:
            fields = {"peer": link.peer, "protocol": protocol, "reason": reason}
            log.warning("connection not handed over to the coordinator", extra=fields | ({"left_out": left_out} if left_out else {}))

    # Called by a relay.

    def entered(self, relay: AnyRelay) -> None:
        self._open.add(relay)
        self.counters.relayed += 1
        self.counters.relays_open += 1

    def left(self, relay: AnyRelay) -> None:
        if relay in self._open:
            self._open.discard(relay)
            self.counters.relays_open -= 1


class Relay(asyncio.Protocol):
    """One connection to the coordinator. From `attach` on, a `FramedSession` of the peer's connection."""

    held_bytes = 0
    owes_reply = False

    def __init__(self, owner: Relays, protocol: str, place: Place, tls: TlsStream | None) -> None:
        self._owner, self.protocol, self.place, self._tls = owner, protocol, place, tls
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._link: RelayedLink | None = None
        self._received = bytearray()
        """Answers to the login."""
        self._waiting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._is_paused = False
        """The coordinator is not read, because the peer does not read."""

    # Before `attach`.

    async def log_in(self, login: Login) -> None:
        """Raises `OSError` and `TlsRefused` if the connection fails, `WireError` if the coordinator refuses the login."""
        while self._tls is not None and not self._tls.is_open:
            await self._progress()
        self._write(b"".join((PREFACE, *login.frames)))
        for _ in login.frames:
            while not (size_bytes := login.answer_bytes(bytes(self._received))):
                if len(self._received) > _ANSWER_BYTES_MAX:
                    raise WireError(f"the answer to the login exceeds {_ANSWER_BYTES_MAX} bytes")
                await self._progress()
            del self._received[:size_bytes]

    async def _progress(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiting = self._loop.create_future()
        await self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def attach(self, link: RelayedLink, unserved: bytes) -> None:
        self._link = link
        self._owner.entered(self)
        link.replace_session(self)
        self._write(unserved)
        if self._failure is not None:
            link.close(f"coordinator lost: {self._failure}", error=False)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance
        self._transport.set_write_buffer_limits(limits.RELAY_BUFFER_BYTES)
        if self._failure is not None:
            self._transport.abort()
        elif self._tls is not None:
            self._receive_encrypted(self._tls, b"")

    def data_received(self, data: bytes) -> None:
        if self._tls is not None:
            self._receive_encrypted(self._tls, data)
        else:
            self._deliver(data)

    def eof_received(self) -> bool:
        self._end("the coordinator has closed the connection")
        return False

    def connection_lost(self, failure: Exception | None) -> None:
        self._end("the coordinator has closed the connection" if failure is None else str(failure))

    def pause_writing(self) -> None:
        if self._link is not None:
            self._link.pause_reading()

    def resume_writing(self) -> None:
        if self._link is not None:
            self._link.resume_reading()

    def _receive_encrypted(self, tls: TlsStream, data: bytes) -> None:
        assert self._transport is not None
        try:
            plain = tls.receive(data)
        except TlsRefused as failure:
            self._transport.write(tls.take())
            self._failure = failure
            self.abort(str(failure))
            return
        if answer := tls.take():
            self._transport.write(answer)
        self._wake()
        if plain:
            self._deliver(plain)
        if tls.is_finished:
            self._end("the coordinator has closed the connection")

    def _deliver(self, data: bytes) -> None:
        if self._link is None:
            self._received += data
            self._wake()
            return
        self._link.send(data)
        if not self._is_paused and self._link.unsent_bytes > limits.OUTPUT_HIGH_WATER_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    # `FramedSession`: called by the peer's connection.

    def receive(self, data: bytes) -> None:
        self._write(data)

    def drained(self) -> None:
        if self._is_paused and self._link is not None and self._link.unsent_bytes <= limits.OUTPUT_HIGH_WATER_BYTES:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def closing(self) -> None:
        """Pass on the end of the requests. The coordinator answers them and closes."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None:
            self._transport.write(self._tls.close())
        with contextlib.suppress(OSError):
            self._transport.write_eof()

    def lost(self) -> None:
        """Send what the peer had sent, then close."""
        self._link = None
        self._owner.left(self)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._loop.call_later(limits.LINGER_SECONDS_MAX, self._transport.abort)

    # Ending.

    def abort(self, reason: str) -> None:
        """Close immediately."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if self._failure is None:
            self._failure = ConnectionError(reason)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._failure)
        self._owner.left(self)
        link, self._link = self._link, None
        if link is not None:
            link.close(f"coordinator lost: {reason}", error=False)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing() and data:
            self._transport.write(data if self._tls is None else self._tls.send(data))
