"""QUIC listener: each stream that a peer opens is a link with its own session.

    UDP socket ─ ServerEndpoint ─ Carrier ─ QuicPeer ─┬─ StreamLink ⇄ session
                 (adapter of aioquic)                 └─ StreamLink ⇄ session

Pings keep a connection alive and detect a dead one: the server opens a stream, sends a few bytes and its end, and the client ends it.
A stream closes after the peer has acknowledged its output, or after the linger time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from headrace import limits
from headrace.net.connection import NetLimits
from headrace.net.counters import NetCounters, Slot, admit
from headrace.net.quic.connection import Carrier, Windows
from headrace.net.quic.endpoint import NO_ERROR, Retry, ServerEndpoint, ServerTls
from headrace.net.relay import PREFACE
from headrace.sessions.contract import Session

log = logging.getLogger(__name__)

_OPENED_BY_PEER: Final = 0
_OPENED_HERE: Final = 1
"""The last two bits of a stream id."""


class StreamSession(Session, Protocol):
    """A session on a stream, whose two directions end separately."""

    def finished(self) -> None:
        """The peer has sent its last byte. Complete the requests received, then close the link."""


@dataclass(frozen=True, slots=True)
class QuicProtocol:
    """One protocol over QUIC."""

    name: str
    alpn: str
    open: Callable[[StreamLink], StreamSession]
    ping: bytes
    """The content of a ping stream."""
    ping_code: int = NO_ERROR
    """The application error code that closes a connection after an unanswered ping."""
    needs_login: Callable[[], bool] = lambda: False
    """Return, at the login deadline, whether a peer without a certificate has no permission at all."""


@dataclass(frozen=True, slots=True)
class QuicLimits:
    """Limits of one listener."""

    net: NetLimits = NetLimits()
    windows: Windows = Windows()
    idle_seconds: float = limits.IDLE_SECONDS_MAX
    """Time a connection may be silent before it is closed."""
    ping_seconds: float = limits.QUIC_PING_SECONDS
    pong_seconds: float = limits.QUIC_PONG_SECONDS_MAX
    retry: Retry = Retry.AUTO


class StreamLink:
    """A stream as its session sees it: a `StreamedLink`."""

    def __init__(self, owner: QuicPeer, stream: int) -> None:
        self._owner, self._stream = owner, stream
        self._carrier, self._limits, self._counters = owner.carrier, owner.limits.net, owner.counters
        self._loop = asyncio.get_running_loop()
        self.peer = f"{self._carrier.peer}#{stream}"
        self.identity = self._carrier.identity
        """The name in the client certificate; None without one."""
        self.is_relayed = False
        """Whether another broker relays the stream to this one."""
        self._first: bytes | None = b""
        """Bytes that may begin the preface of a relay; None: that is decided."""
        self._is_draining = False
        self._pauses = 0
        self._is_output_full = False
        """Reading is paused because the peer does not read its replies."""
        self._held: list[bytes] = []
        """Input that arrived while reading was paused, bounded by the peer's credit."""
        self._peer_finished = False
        self._finish_delivered = False
        self._wants_drained = False
        self._acknowledged: Callable[[], None] | None = None
        self._reason: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._session: StreamSession | None = owner.protocol.open(self)

    # `Link`: called by the session.

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
            self._owner.watched[self] = None
        if unsent > self._limits.output_bytes_max and not self._is_output_full:
            self._is_output_full = True
            self.pause_reading()

    def close(self, reason: str, *, error: bool = True) -> None:
        if self._reason is not None:
            return
        self._end(reason, error=error)
        self._owner.watched[self] = None
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
            # Scheduled: the caller is not reentrant.
            self._loop.call_soon(self._hand_over)

    @property
    def unsent_bytes(self) -> int:
        """The unacknowledged bytes: with QUIC they wait in this process, not in the kernel."""
        return self._carrier.unacknowledged(self._stream)

    def when_acknowledged(self, callback: Callable[[], None]) -> None:
        self._acknowledged = callback
        self._owner.watched[self] = None
        if not self.unsent_bytes:  # otherwise an acknowledgement is to come
            self._loop.call_soon(self.progressed)

    def when_sent(self, callback: Callable[[], None]) -> None:
        self._carrier.when_sent(callback)

    # `Holder`: called by the output budget.

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

    # Called by the connection.

    def received(self, data: bytes, finished: bool) -> None:
        self._counters.bytes_in += len(data)
        self._peer_finished = self._peer_finished or finished
        if self._reason is not None:
            self._carrier.taken(self._stream, len(data))
            return
        self._held.append(data)
        self._hand_over()

    def progressed(self) -> None:
        """Do what waits for an acknowledgement."""
        if self._reason is not None:
            if not self.unsent_bytes:
                self._leave()
            return
        if self._acknowledged is not None and not self.unsent_bytes:
            callback, self._acknowledged = self._acknowledged, None
            callback()
        if self._wants_drained and self.unsent_bytes <= self._limits.output_low_water_bytes:
            self._wants_drained = False
            if self._is_output_full:
                self._is_output_full = False
                self.resume_reading()
            if self._session is not None:
                self._session.drained()
        if self._acknowledged is None and not self._wants_drained and self._reason is None:
            self._owner.watched.pop(self, None)

    def drain(self) -> None:
        self._is_draining = True
        if self._reason is None and self._session is not None:
            self._session.closing()

    def replace_session(self, session: StreamSession) -> None:
        assert self._session is not None, "a session hands its stream over"
        before, self._session = self._session, session
        before.lost()
        self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        """Tell the new session what its predecessor was told."""
        self._finish_delivered = False
        self._hand_over()
        if self._is_draining and not self._finish_delivered and self._session is not None:
            self._session.closing()

    def lost(self, reason: str) -> None:
        """The stream or its connection has ended."""
        self._end(reason, error=False)
        self._leave()

    def abort(self) -> None:
        """Reset the stream: the peer has not acknowledged its last bytes in time."""
        self._carrier.abort(self._stream)
        self._leave()

    def _hand_over(self) -> None:
        while self._held and not self._pauses and self._reason is None and self._session is not None:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._carrier.taken(self._stream, len(data))
            data = self._without_preface(data)
            if data:
                self._session.receive(data)
        if self._peer_finished and not self._held and not self._pauses and self._reason is None and not self._finish_delivered:
            self._finish_delivered = True
            if self._session is not None:
                self._session.finished()

    def _without_preface(self, data: bytes) -> bytes:
        if self._first is None:
            return data
        data, self._first = self._first + data, None
        if data.startswith(PREFACE):
            self.is_relayed = True
            return data[len(PREFACE) :]
        if PREFACE.startswith(data):
            self._first = data
            return b""
        return data

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._counters.output.left(self)
        self._owner.watched.pop(self, None)
        session, self._session = self._session, None
        if session is not None:
            self._held.clear()
            self._owner.left(self._stream)
            session.lost()

    def _end(self, reason: str, *, error: bool) -> None:
        """Record and log the reason of the end, once."""
        if self._reason is None:
            self._reason = reason
            self._counters.count_end(reason, error=error)
            fields: dict[str, object] = {"peer": self.peer, "protocol": self._owner.protocol.name, "reason": reason}
            if not error:
                log.debug("stream closed", extra=fields)
                return
            key = (self.peer.rpartition(":")[0], "stream", reason.partition(":")[0])
            left_out = self._counters.end_lines.left_out(key, asyncio.get_running_loop().time())
            if left_out is not None:
                log.warning("stream closed", extra=fields | ({"left_out": left_out} if left_out else {}))


class QuicPeer:
    """One connection of a listener: a `ConnectionReceiver`."""

    def __init__(self, listener: QuicListener, carrier: Carrier, host: str) -> None:
        self.carrier, self.protocol, self.limits, self.counters = carrier, listener.protocol, listener.limits, listener.counters
        self._listener, self._host = listener, host
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, StreamLink] = {}
        self.watched: dict[StreamLink, None] = {}
        """Links that wait for acknowledgements."""
        self._pinging: int | None = None
        self._is_draining = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._login_timer: asyncio.TimerHandle | None = None
        self.counters.enter(host)
        carrier.attach(self)
        if self.limits.net.handshake_seconds:
            self._timer = self._loop.call_later(self.limits.net.handshake_seconds, self._handshake_timed_out)

    # Called by the carrier.

    def connected(self) -> None:
        self._listener.connected(self)
        self._stop_timer()
        self._ping_later()
        if self.limits.net.login_seconds and self.carrier.identity is None:
            self._login_timer = self._loop.call_later(self.limits.net.login_seconds, self._login_timed_out)

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
            self.counters.enter_protocol(self.protocol.name)
        link.received(data, finished)

    def reset(self, stream: int) -> None:
        if stream == self._pinging:
            self._ping_timed_out()
            return
        self.carrier.ignore(stream)
        link = self._links.get(stream)
        if link is not None:
            self.carrier.abort(stream)
            link.lost("peer reset the stream")

    def progressed(self) -> None:
        for link in list(self.watched):
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

    # Called by its links and the listener.

    def left(self, stream: int) -> None:
        if self._links.pop(stream, None) is not None:
            self.counters.leave_protocol(self.protocol.name)
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
        self.carrier.send(self._pinging, self.protocol.ping, finish=True)
        self._timer = self._loop.call_later(self.limits.pong_seconds, self._ping_timed_out)

    def _ping_timed_out(self) -> None:
        self.close(f"read: no answer to a ping within {self.limits.pong_seconds:g} s", self.protocol.ping_code)

    def _login_timed_out(self) -> None:
        if self.protocol.needs_login():
            self.close("no login in time: nothing is allowed without a certificate")

    def _handshake_timed_out(self) -> None:
        self.close("no handshake in time")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class QuicListener:
    """Accepts connections from `open` to `drain` or `close`."""

    def __init__(self, protocol: QuicProtocol, limits: QuicLimits, counters: NetCounters) -> None:
        self.protocol, self.limits, self.counters = protocol, limits, counters
        self._endpoint: ServerEndpoint
        self._peers: set[QuicPeer] = set()
        """Connections that are not closed yet."""
        self._empty = asyncio.Event()
        self._empty.set()

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        protocol: QuicProtocol,
        tls: ServerTls,
        limits: QuicLimits = QuicLimits(),
        counters: NetCounters | None = None,
    ) -> QuicListener:
        """Bind and accept. Port 0 selects a free port, which `address` reports. Raises `OSError` if the address is unavailable."""
        listener = cls(protocol, limits, NetCounters() if counters is None else counters)
        listener._endpoint = await ServerEndpoint.open(
            host,
            port,
            alpn=protocol.alpn,
            tls=tls,
            windows=limits.windows,
            idle_seconds=limits.idle_seconds,
            accept=listener._accept,
            retry=limits.retry,
        )
        return listener

    def renew(self, tls: ServerTls) -> None:
        """Use this certificate for new connections. Raises `OSError` or `ValueError`; the old one then stays in use."""
        self._endpoint.renew(tls)

    @property
    def host(self) -> str:
        return self._endpoint.bound[0]

    @property
    def port(self) -> int:
        return self._endpoint.bound[1]

    @property
    def address(self) -> str:
        """The bound address as `host:port`, with an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def drain(self, deadline_seconds: float) -> int:
        """Stop accepting, let every session finish its requests, and close. Return how many were aborted at the deadline."""
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
        """Stop accepting and abort every connection. Idempotent."""
        self._endpoint.refuse_new()
        for peer in list(self._peers):
            peer.close("listener closed")
        self._endpoint.close()

    # Called by connections and the endpoint.

    def _accept(self, carrier: Carrier, host: str) -> str | None:
        self.counters.accepted += 1
        reason = self._reject_reason(host)
        if reason is not None:
            self.counters.count_end(reason, error=True)
            carrier.attach(_Rejected(self._endpoint, carrier))
            return reason
        self._peers.add(QuicPeer(self, carrier, host))
        self._empty.clear()
        return None

    def _reject_reason(self, host: str) -> str | None:
        """Return why the connection is rejected, or None. QUIC has no login, so its peers get no reserved slot."""
        slot = admit(self.limits.net.admission, self.counters, host)
        return slot if isinstance(slot, str) else None if slot is Slot.REGULAR else "too many connections"

    def connected(self, peer: QuicPeer) -> None:
        self._endpoint.proven(peer.carrier)

    def closing(self, peer: QuicPeer) -> None:
        """Forget a closed connection; aioquic still answers late packets for a while."""
        self._peers.discard(peer)
        if not self._peers:
            self._empty.set()

    def left(self, peer: QuicPeer) -> None:
        self._endpoint.forget(peer.carrier)
        self.closing(peer)


class _Rejected:
    """Receiver of a rejected connection: only its end matters."""

    def __init__(self, endpoint: ServerEndpoint, carrier: Carrier) -> None:
        self._endpoint, self._carrier = endpoint, carrier

    def connected(self) -> None: ...

    def received(self, stream: int, data: bytes, finished: bool) -> None: ...

    def reset(self, stream: int) -> None: ...

    def progressed(self) -> None: ...

    def lost(self, reason: str) -> None:
        self._endpoint.forget(self._carrier)
