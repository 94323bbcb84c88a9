"""The QUIC listener: streams that peers open become links, each with a session of its own.

    UDP socket ─ ServerEndpoint ─ Carrier ─ QuicPeer ─┬─ StreamLink ⇄ session
                 (the library's side)                 └─ StreamLink ⇄ session

A connection is kept alive, and found dead, by pings: a stream that the server opens, with a few bytes and an end on it; any answer that
ends it will do. A stream closes gently: what was sent is acknowledged first, or the linger time is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from headrace import limits
from headrace.net.admission import Place, admit
from headrace.net.connection import NetLimits
from headrace.net.counters import NetCounters
from headrace.net.quic_carrier import Carrier, Windows
from headrace.net.quic_endpoint import NO_ERROR, Retry, ServerEndpoint, ServerTls
from headrace.sessions.contract import Session

log = logging.getLogger(__name__)

_OPENED_BY_PEER: Final = 0
_OPENED_HERE: Final = 1
"""The last two bits of a stream's number."""


class StreamSession(Session, Protocol):
    """A session on a stream, whose two directions end apart."""

    def finished(self) -> None:
        """The peer has sent its last byte: complete what was received, then close the link."""


@dataclass(frozen=True, slots=True)
class QuicDoor:
    """One protocol over QUIC."""

    name: str
    alpn: str
    open: Callable[[StreamLink], StreamSession]
    ping: bytes
    """What a ping's stream carries."""
    ping_code: int = NO_ERROR
    """The application error code of a connection whose pings go unanswered."""
    needs_login: Callable[[], bool] = lambda: False
    """Whether a peer without a certificate can do nothing here, asked when the deadline for logging in has passed."""


@dataclass(frozen=True, slots=True)
class QuicLimits:
    """The numbers one listener holds its peers to."""

    net: NetLimits = NetLimits()
    windows: Windows = Windows()
    idle_seconds: float = limits.IDLE_SECONDS_MAX
    """A connection on which nothing arrives for so long is over."""
    ping_seconds: float = limits.QUIC_PING_SECONDS
    pong_seconds: float = limits.QUIC_PONG_SECONDS_MAX
    retry: Retry = Retry.AUTO


class StreamLink:
    """A stream, as its session sees it: a `Link`."""

    def __init__(self, owner: QuicPeer, stream: int) -> None:
        self._owner, self._stream = owner, stream
        self._carrier, self._limits, self._counters = owner.carrier, owner.limits.net, owner.counters
        self._loop = asyncio.get_running_loop()
        self.peer = f"{self._carrier.peer}#{stream}"
        self.identity = self._carrier.identity
        """Whom the peer's certificate names; None without one."""
        self._pauses = 0
        self._choked = False
        """Reading is paused because the peer does not take its answers."""
        self._held: list[bytes] = []
        """Came while the session did not read. The peer's credit bounds it."""
        self._peer_finished = False
        self._told_finished = False
        self._wants_drained = False
        self._reason: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._session: StreamSession | None = owner.door.open(self)

    # What the session may ask: `Link`.

    def send(self, frames: bytes) -> None:
        if self._reason is not None or not frames:
            return
        self._counters.bytes_out += len(frames)
        self._carrier.send(self._stream, frames)
        unsent = self.unsent_bytes
        if unsent > limits.OUTPUT_FREE_BYTES:
            self._counters.output.update(self, unsent, self._limits.output_total_bytes_max)
        if unsent > self._limits.output_high_water_bytes:
            self._wants_drained = True
        if unsent > self._limits.output_bytes_max and not self._choked:
            self._choked = True
            self.pause_reading()

    def close(self, reason: str, *, error: bool = True) -> None:
        if self._reason is not None:
            return
        self._end(reason, error=error)
        self._held.clear()
        self._carrier.send(self._stream, b"", finish=True)
        self._carrier.ignore(self._stream)
        if self._limits.linger_seconds:
            self._timer = self._loop.call_later(self._limits.linger_seconds, self.abort)

    def pause_reading(self) -> None:
        self._pauses += 1
        if self._pauses == 1:
            self._counters.reading_pauses += 1

    def resume_reading(self) -> None:
        assert self._pauses > 0, "a resume without its pause"
        self._pauses -= 1
        if self._pauses == 0 and (self._held or self._peer_finished):
            # Not now: whoever resumes is in the middle of something.
            self._loop.call_soon(self._hand_over)

    @property
    def unsent_bytes(self) -> int:
        """What the peer has not acknowledged: with QUIC it waits in this process, not in the kernel."""
        return self._carrier.unacknowledged(self._stream)

    # What the sum of all outputs may ask: `Holder`.

    @property
    def waiting_bytes(self) -> int:
        return self.unsent_bytes

    @property
    def kept_bytes(self) -> int:
        return self.unsent_bytes

    def feed(self) -> None:
        if self._session is not None and self._reason is None:
            self._session.drained()

    def disconnect(self, reason: str) -> None:
        self._end(reason, error=True)
        self.abort()

    # What its connection tells.

    def received(self, data: bytes, finished: bool) -> None:
        self._counters.bytes_in += len(data)
        self._peer_finished = self._peer_finished or finished
        if self._reason is not None:
            self._carrier.taken(self._stream, len(data))
            return
        self._held.append(data)
        self._hand_over()

    def progressed(self) -> None:
        if self._reason is not None:
            if not self.unsent_bytes:
                self._leave()
        elif self._wants_drained and self.unsent_bytes <= self._limits.output_low_water_bytes:
            self._wants_drained = False
            if self._choked:
                self._choked = False
                self.resume_reading()
            if self._session is not None:
                self._session.drained()

    def drain(self) -> None:
        if self._reason is None and self._session is not None:
            self._session.closing()

    def lost(self, reason: str) -> None:
        """The stream or its connection is gone."""
        self._end(reason, error=False)
        self._leave()

    def abort(self) -> None:
        """The peer has not taken its last bytes in time."""
        self._carrier.abort(self._stream)
        self._leave()

    # The rest.

    def _hand_over(self) -> None:
        while self._held and not self._pauses and self._reason is None and self._session is not None:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._carrier.taken(self._stream, len(data))
            self._session.receive(data)
        if self._peer_finished and not self._held and not self._pauses and self._reason is None and not self._told_finished:
            self._told_finished = True
            if self._session is not None:
                self._session.finished()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._counters.output.left(self)
        session, self._session = self._session, None
        if session is not None:
            self._held.clear()
            self._owner.left(self._stream)
            session.lost()

    def _end(self, reason: str, *, error: bool) -> None:
        """Settle why this stream ends, once."""
        if self._reason is None:
            self._reason = reason
            self._counters.count_end(reason, error=error)
            level = logging.WARNING if error else logging.DEBUG
            log.log(level, "stream closed", extra={"peer": self.peer, "door": self._owner.door.name, "reason": reason})


class QuicPeer:
    """One connection of a listener: a `Hearer`."""

    def __init__(self, listener: QuicListener, carrier: Carrier, host: str) -> None:
        self.carrier, self.door, self.limits, self.counters = carrier, listener.door, listener.limits, listener.counters
        self._listener, self._host = listener, host
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, StreamLink] = {}
        self._pinging: int | None = None
        self._is_draining = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._login_timer: asyncio.TimerHandle | None = None
        self.counters.enter(host)
        carrier.attach(self)
        if self.limits.net.handshake_seconds:
            self._timer = self._loop.call_later(self.limits.net.handshake_seconds, self._came_too_late)

    # What the carrier tells.

    def connected(self) -> None:
        self._listener.connected(self)
        self._stop_timer()
        self._ping_later()
        if self.limits.net.login_seconds and self.carrier.identity is None:
            self._login_timer = self._loop.call_later(self.limits.net.login_seconds, self._login_is_late)

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        if stream & 3 == _OPENED_HERE:
            self.carrier.taken(stream, len(data))
            if finished and stream == self._pinging:
                self._pinging = None
                self._stop_timer()
                self._ping_later()
            return
        link = self._links.get(stream)
        if link is None:
            if self._is_draining or self._is_closed:
                self.carrier.ignore(stream)
                self.carrier.abort(stream)
                return
            link = self._links[stream] = StreamLink(self, stream)
            self.counters.enter_door(self.door.name)
        link.received(data, finished)

    def reset(self, stream: int) -> None:
        if stream == self._pinging:
            self._unanswered()
            return
        self.carrier.ignore(stream)
        link = self._links.get(stream)
        if link is not None:
            self.carrier.abort(stream)
            link.lost("peer gave the stream up")

    def progressed(self) -> None:
        for link in list(self._links.values()):
            link.progressed()

    def lost(self, reason: str) -> None:
        self._stop_timer()
        if self._login_timer is not None:
            self._login_timer.cancel()
        self._is_closed = True
        for link in list(self._links.values()):
            link.lost(f"connection lost: {reason}")
        self.counters.leave(self._host)
        self._listener.left(self)

    # What its links and the listener ask.

    def left(self, stream: int) -> None:
        if self._links.pop(stream, None) is not None:
            self.counters.leave_door(self.door.name)
            if self._is_draining and not self._links:
                self.close("drained")

    def drain(self) -> None:
        self._is_draining = True
        for link in list(self._links.values()):
            link.drain()
        if not self._links:
            self.close("drained")

    def close(self, reason: str, code: int = NO_ERROR) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._stop_timer()
            for link in list(self._links.values()):
                link.lost(reason)
            self.carrier.close(code, reason)
            self._listener.closing(self)

    # Pings.

    def _ping_later(self) -> None:
        if self.limits.ping_seconds and not self._is_closed:
            self._timer = self._loop.call_later(self.limits.ping_seconds, self._ping)

    def _ping(self) -> None:
        self._pinging = self.carrier.open_stream()
        self.carrier.send(self._pinging, self.door.ping, finish=True)
        self._timer = self._loop.call_later(self.limits.pong_seconds, self._unanswered)

    def _unanswered(self) -> None:
        self.close(f"read: no answer to a ping within {self.limits.pong_seconds:g} s", self.door.ping_code)

    def _login_is_late(self) -> None:
        if self.door.needs_login():
            self.close("no login in time: nothing is allowed without a certificate")

    def _came_too_late(self) -> None:
        self.close("no handshake in time")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class QuicListener:
    """Accepts connections from `open` to `drain` or `close`."""

    def __init__(self, door: QuicDoor, limits: QuicLimits, counters: NetCounters) -> None:
        self.door, self.limits, self.counters = door, limits, counters
        self._endpoint: ServerEndpoint
        self._peers: set[QuicPeer] = set()
        """Those whose end has not been said yet."""
        self._empty = asyncio.Event()
        self._empty.set()

    @classmethod
    async def open(
        cls, host: str, port: int, door: QuicDoor, tls: ServerTls, limits: QuicLimits = QuicLimits(), counters: NetCounters | None = None
    ) -> QuicListener:
        """Bind and accept. Port 0 takes a free one: see `address`. Raises `OSError` when the address cannot be had."""
        listener = cls(door, limits, NetCounters() if counters is None else counters)
        listener._endpoint = await ServerEndpoint.open(
            host,
            port,
            alpn=door.alpn,
            tls=tls,
            windows=limits.windows,
            idle_seconds=limits.idle_seconds,
            accept=listener._accept,
            retry=limits.retry,
        )
        return listener

    def renew(self, tls: ServerTls) -> None:
        """Use this certificate for connections from now on. Raises `OSError` or `ValueError`; the old one then stays in use."""
        self._endpoint.renew(tls)

    @property
    def host(self) -> str:
        return self._endpoint.bound[0]

    @property
    def port(self) -> int:
        return self._endpoint.bound[1]

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def drain(self, deadline_seconds: float) -> int:
        """Accept nobody, let every session finish what it has, and close. Returns how many had to be cut off at the deadline."""
        self._endpoint.refuse_new()
        for peer in list(self._peers):
            peer.drain()
        try:
            await asyncio.wait_for(self._empty.wait(), deadline_seconds)
        except TimeoutError:
            pass
        late = len(self._peers)
        self.close()
        await self._endpoint.wait_closed()
        return late

    def close(self) -> None:
        """Accept nobody and cut every connection off. Idempotent."""
        self._endpoint.refuse_new()
        for peer in list(self._peers):
            peer.close("listener closed")
        self._endpoint.close()

    # What connections tell us.

    def _accept(self, carrier: Carrier, host: str) -> str | None:
        self.counters.accepted += 1
        refusal = self._refusal(host)
        if refusal is not None:
            self.counters.count_end(refusal, error=True)
            carrier.attach(_Refused(self._endpoint, carrier))
            return refusal
        self._peers.add(QuicPeer(self, carrier, host))
        self._empty.clear()
        return None

    def _refusal(self, host: str) -> str | None:
        """Nobody logs in over QUIC, so that the reserve for administrators is not for its peers."""
        place = admit(self.limits.net.admission, self.counters, host)
        return place if isinstance(place, str) else None if place is Place.REGULAR else "too many connections"

    def connected(self, peer: QuicPeer) -> None:
        self._endpoint.proven(peer.carrier)

    def closing(self, peer: QuicPeer) -> None:
        """Its end has been said; the library still answers latecomers for a while."""
        self._peers.discard(peer)
        if not self._peers:
            self._empty.set()

    def left(self, peer: QuicPeer) -> None:
        self._endpoint.forget(peer.carrier)
        self.closing(peer)


class _Refused:
    """Hears of a connection that was refused at once: only its end matters."""

    def __init__(self, endpoint: ServerEndpoint, carrier: Carrier) -> None:
        self._endpoint, self._carrier = endpoint, carrier

    def connected(self) -> None: ...

    def received(self, stream: int, data: bytes, finished: bool) -> None: ...

    def reset(self, stream: int) -> None: ...

    def progressed(self) -> None: ...

    def lost(self, reason: str) -> None:
        self._endpoint.forget(self._carrier)
