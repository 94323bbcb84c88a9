"""One TCP connection: it finds its door by the first bytes, then carries bytes between the socket and the session.

The very first byte tells TLS from plain text; what the doors see is plain in both cases.

    sniffing ──► open ──► closing ──► lost
        │                    ▲
        └────────────────────┘            lost may come at any time

Closing is gentle: what was sent leaves first, then our half of the connection is shut and what the peer still sends is thrown away
until it closes too. A socket closed with unread bytes in it would be reset, and a reset takes the last acknowledgements with it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from headrace import limits
from headrace.net.admission import AdmissionLimits, Place, admit, log_in
from headrace.net.counters import NetCounters
from headrace.net.door import Door, Sniff, choose
from headrace.net.tls import HANDSHAKE_BYTE, NOT_HERE, Tls, TlsRefused, TlsStream
from headrace.sessions.contract import FramedSession

log = logging.getLogger(__name__)

SNIFF_BYTES_MAX: Final = 256
"""A door that cannot tell by then never will."""
_TCP_ESTABLISHED, _TCP_SYN_RECEIVED = 1, 3
"""The states of a TCP connection, as Linux numbers them, in which the peer may still send."""
_SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A peer whose machine is gone says nothing, for ever; the kernel finds out within two minutes.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True, slots=True)
class NetLimits:
    """The numbers one listener holds its peers to. Seconds of 0 mean: no deadline."""

    connections_max: int = limits.CONNECTIONS_MAX
    connections_per_ip_max: int = limits.CONNECTIONS_PER_IP_MAX
    connections_per_user_max: int = limits.CONNECTIONS_PER_USER_MAX
    """Of one user who is no administrator; 0: no limit."""
    connections_reserved: int = 0
    """Of `connections_max`, those that only administrators may keep."""
    login_seconds: float = 0.0
    """From the first recognisable bytes to the login, where one is needed."""
    handshake_seconds: float = limits.HANDSHAKE_SECONDS_MAX
    """From the connection to its first recognisable bytes."""
    linger_seconds: float = limits.LINGER_SECONDS_MAX
    """From the decision to close to the close, whatever the peer does."""
    output_high_water_bytes: int = limits.OUTPUT_HIGH_WATER_BYTES
    output_low_water_bytes: int = limits.OUTPUT_LOW_WATER_BYTES
    output_bytes_max: int = limits.OUTPUT_BUFFER_BYTES_MAX
    """Above this the peer is no longer read, so that its requests cannot grow the answers it does not take."""
    output_total_bytes_max: int = limits.OUTPUT_TOTAL_BYTES_MAX
    """Of all connections together."""
    frame_check_seconds: float = limits.FRAME_CHECK_SECONDS
    """How often unfinished frames are looked at."""
    unfinished_bytes_max: int = limits.UNFINISHED_BYTES_MAX
    """Of all connections together."""

    @property
    def admission(self) -> AdmissionLimits:
        return AdmissionLimits(self.connections_max, self.connections_per_ip_max, self.connections_per_user_max, self.connections_reserved)


class House(Protocol):
    """What a connection needs of its listener."""

    @property
    def doors(self) -> Sequence[Door]: ...

    @property
    def limits(self) -> NetLimits: ...

    @property
    def counters(self) -> NetCounters: ...

    @property
    def tls(self) -> Tls | None: ...

    def made(self) -> None: ...

    def entered(self, connection: Connection) -> None: ...

    def left(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """A `Visitor` at its door, and then a `Link` to its session."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._limits, self._counters = house.limits, house.counters
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._host = self.peer = self.local = "unknown"
        self._tls: TlsStream | None = None
        self._place: Place | None = None
        """None: it was not admitted."""
        self._user: str | None = None
        """Whose connection it is counted as."""
        self._is_known = self._is_admin = False
        """Whether the peer has logged in, and as an administrator."""
        self._first = b""
        self._door: Door | None = None
        self._session: FramedSession | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received_bytes = self._held_bytes = 0
        self._look: tuple[int, int] | None = None
        """What had been received and what was unfinished when `look_at_frame` last looked; None: nothing was."""
        self._pauses = 0
        self._largest_unsent = 0
        """The largest write since the output was below its low-water mark."""
        self._choked = False
        """Reading is paused because the peer does not take its answers."""
        self._peer_finished = False
        self._reason: str | None = None
        """Why this connection closes; set once."""

    # What the loop tells us.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance
        self._transport = transport
        name = transport.get_extra_info("peername")
        if name:
            self._host, self.peer = name[0], written(name)
        self._counters.accepted += 1
        self._house.made()
        place = admit(self._limits.admission, self._counters, self._host)
        if isinstance(place, str):
            self._end(place, error=True)
            transport.abort()
            return
        self._place = place
        if place is Place.RESERVED:
            self._counters.enter_reserve(self._host)
        self.local = written(transport.get_extra_info("sockname"))
        self._counters.enter(self._host)
        self._house.entered(self)
        for level, option, value in _SOCKET_OPTIONS:
            transport.get_extra_info("socket").setsockopt(level, option, value)
        transport.set_write_buffer_limits(self._limits.output_high_water_bytes, self._limits.output_low_water_bytes)
        if self._limits.handshake_seconds:
            self._timer = self._loop.call_later(self._limits.handshake_seconds, self._came_too_late)

    def data_received(self, data: bytes) -> None:
        self._counters.bytes_in += len(data)
        if self._reason is not None:
            return
        if self._tls is None:
            if self._session is None and not self._first and not self._is_welcome(data):
                return
            if self._tls is None:
                self._deliver(data)
                return
        self._receive_sealed(self._tls, data)

    def eof_received(self) -> bool:
        """The peer has finished sending; what it sent may still be under way to the disk, and it may still read the answers."""
        if self._reason is not None:
            self._peer_finished = True
            return False
        if self._peer_finished:
            return True
        self._peer_finished = True
        if self._session is None:
            self._end("peer closed before its first message", error=False)
            return False
        self._abort_after_linger()
        self._session.closing()
        return True

    def resume_writing(self) -> None:
        self._largest_unsent = 0
        self._counters.output.update(self, self.kept_bytes, self._limits.output_total_bytes_max)
        if self._choked:
            self._choked = False
            self.resume_reading()
        self.feed()

    def connection_lost(self, failure: Exception | None) -> None:
        self._stop_timer()
        if self._place is None:
            return
        self._end("peer closed" if failure is None else f"connection lost: {failure}", error=False)
        self._counters.leave(self._host)
        self._counters.output.left(self)
        if self._place is Place.RESERVED:
            self._counters.leave_reserve(self._host)
        if self._user is not None:
            self._counters.leave_user(self._user)
        self._counters.unfinished_bytes -= self._held_bytes
        self._house.left(self)
        if self._session is not None and self._door is not None:
            self._counters.leave_door(self._door.name)
            session, self._session = self._session, None
            session.lost()

    # What the session may ask: `Link`.

    def send(self, frames: bytes) -> None:
        if self._reason is not None or self._transport.is_closing():
            return
        if self._tls is not None:
            frames = self._tls.send(frames)
        self._counters.bytes_out += len(frames)
        self._transport.write(frames)
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes > limits.OUTPUT_FREE_BYTES:
            self._largest_unsent = max(self._largest_unsent, len(frames))
            self._counters.output.update(self, self.kept_bytes, self._limits.output_total_bytes_max)
            if not self._choked and unsent_bytes > self._limits.output_bytes_max:
                self._choked = True
                self.pause_reading()

    def close(self, reason: str, *, error: bool = True) -> None:
        if self._reason is not None:
            return
        self._end(reason, error=error)
        if self._transport.is_closing():
            return
        self._abort_after_linger()
        if self._tls is not None:
            self._transport.write(self._tls.close())
        if self._peer_finished:
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the peer has reset the connection, and the loop has not heard of it yet
            self._transport.abort()
            return
        if self._pauses:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        self._pauses += 1
        if self._pauses == 1:
            self._counters.reading_pauses += 1
            if self._may_switch_reading():
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        assert self._pauses > 0, "a resume without its pause"
        self._pauses -= 1
        if self._pauses == 0 and self._may_switch_reading():
            self._transport.resume_reading()

    @property
    def unsent_bytes(self) -> int:
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes > limits.OUTPUT_HIGH_WATER_BYTES or self._is_admin:
            return unsent_bytes
        if self._counters.output.has_to_wait(self, unsent_bytes, self._limits.output_total_bytes_max):
            return limits.OUTPUT_HIGH_WATER_BYTES + 1
        return unsent_bytes

    # What the sum of all outputs may ask: `Holder`.

    @property
    def waiting_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def kept_bytes(self) -> int:
        waiting_bytes = self.waiting_bytes
        return max(waiting_bytes, self._largest_unsent) if waiting_bytes else 0

    def feed(self) -> None:
        if self._session is not None and self._reason is None:
            self._session.drained()

    def disconnect(self, reason: str) -> None:
        self._end(reason, error=True)
        self._transport.abort()

    @property
    def has_peer_left(self) -> bool:
        if self._peer_finished or self._reason is not None or self._transport.is_closing():
            return True
        if not hasattr(socket, "TCP_INFO"):
            return False
        try:
            state = self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state not in (_TCP_ESTABLISHED, _TCP_SYN_RECEIVED)

    # What the door may ask: `Visitor`. (`local` is an attribute.)

    def logged_in(self, user: str, *, is_admin: bool) -> str | None:
        if self._place is None or self._user == user:
            return None
        place = log_in(self._limits.admission, self._counters, self._host, self._place, user, is_admin=is_admin)
        if isinstance(place, str):
            return place
        if self._place is Place.RESERVED and place is Place.REGULAR:
            self._counters.leave_reserve(self._host)
        if self._user is not None:
            self._counters.leave_user(self._user)
        self._user = None if is_admin else user
        if self._user is not None:
            self._counters.enter_user(user)
        self._place, self._is_admin = place, is_admin
        if not self._is_known:
            self._is_known = True
            if self._reason is None and not self._peer_finished:
                self._stop_timer()
        return None

    @property
    def identity(self) -> str | None:
        return None if self._tls is None else self._tls.identity

    # What the listener may ask.

    def drain(self) -> None:
        """Finish: the session completes what it has and closes."""
        if self._session is None:
            self.close("draining", error=False)
        elif self._reason is None:
            self._session.closing()

    def look_at_frame(self, seconds: float) -> None:
        """Close if the same frame has been unfinished since the last look, so many seconds ago, and has hardly grown."""
        before, self._look = self._look, None
        if self._session is None or self._reason is not None or self._pauses or self._peer_finished:
            return
        held_bytes = self._session.held_bytes
        if not held_bytes:
            return
        self._look = self._received_bytes, held_bytes
        if before is None:
            return
        received_bytes, grown_bytes = self._received_bytes - before[0], held_bytes - before[1]
        # A frame that ended in between would have taken bytes away from what is held.
        if received_bytes == grown_bytes < seconds * limits.FRAME_BYTES_PER_SECOND_MIN:
            self.close(f"frame too slow: {held_bytes} bytes of it, {grown_bytes} of them in {seconds:g} s")

    def abort(self, reason: str) -> None:
        """Close at once; what is unsent is lost."""
        self._end(reason, error=False)
        self._transport.abort()

    # The rest.

    def _is_welcome(self, first: bytes) -> bool:
        """Settle by its first byte whether this connection is sealed; False if it is not what the listener asks for."""
        tls = self._house.tls
        if first[0] == HANDSHAKE_BYTE:
            if tls is not None:
                self._tls = TlsStream(tls.context)
                return True
            self._transport.write(NOT_HERE)
            self.close("TLS on a plain listener")
            return False
        if tls is None or (tls.settings.optional and is_loopback(self._host)):
            return True
        self.close(f"plain text on a TLS listener: first bytes {first[:16].hex()}")
        return False

    def _receive_sealed(self, tls: TlsStream, sealed: bytes) -> None:
        was_open = tls.is_open
        try:
            plain = tls.receive(sealed)
        except TlsRefused as refused:
            self._transport.write(tls.take())
            self.close(f"{'TLS broken' if was_open else 'TLS handshake failed'}: {refused}")
            return
        if answer := tls.take():
            self._counters.bytes_out += len(answer)
            self._transport.write(answer)
        if tls.is_open and not was_open:
            self._counters.opened_with_tls += 1
        if plain:
            self._deliver(plain)
        if tls.is_finished and self._reason is None and not self.eof_received():
            self._transport.close()

    def _deliver(self, data: bytes) -> None:
        if self._session is None:
            data = self._first + data
            self._enter_door(data)
        if self._session is not None and self._reason is None:
            self._received_bytes += len(data)
            self._session.receive(data)
            held_bytes = self._session.held_bytes
            if held_bytes or self._held_bytes:
                self._hold(held_bytes)

    def _hold(self, held_bytes: int) -> None:
        """Keep the sum of unfinished frames; who adds to a large one when there are too many has to go."""
        counters = self._counters
        counters.unfinished_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if counters.unfinished_bytes > self._limits.unfinished_bytes_max and held_bytes > limits.UNFINISHED_BYTES_FREE:
            self.close(f"too many unfinished frames: {counters.unfinished_bytes} bytes of them")

    def _enter_door(self, first: bytes) -> None:
        """Open the session of the door these bytes belong to. A listener with one door asks nobody: its decoder will find out."""
        doors = self._house.doors
        found = doors[0] if len(doors) == 1 else choose(doors, first)
        if isinstance(found, Door):
            self._stop_timer()
            self._first, self._door = b"", found
            self._counters.enter_door(found.name)
            self._session = found.open(self)
            self._expect_login()
        elif found is Sniff.MORE and len(first) < SNIFF_BYTES_MAX:
            self._first = first
        else:
            self.close(f"unknown protocol: first bytes {first[:16].hex()}")

    def _came_too_late(self) -> None:
        if self._first:
            what = "nothing recognisable"
        elif self._tls is not None and not self._tls.is_open:
            what = "TLS handshake not finished"
        else:
            what = "nothing at all"
        self.close(f"no first message in time: {what}")

    def _expect_login(self) -> None:
        """A peer that never logs in must not hold its place for ever. One in the reserve has to be an administrator."""
        seconds = self._limits.login_seconds or (self._limits.handshake_seconds if self._place is Place.RESERVED else 0.0)
        if seconds and not self._is_known and self._reason is None and self._timer is None:
            self._timer = self._loop.call_later(seconds, self._login_is_late)

    def _login_is_late(self) -> None:
        self._timer = None
        if self._place is Place.RESERVED:
            self.close("no login in time: the place is reserved for administrators")
        elif self._door is not None and self._door.needs_login():
            self.close("no login in time: nothing is allowed without one")

    def _may_switch_reading(self) -> bool:
        """Once the peer has finished or we close, reading is no longer the session's to stop."""
        return self._reason is None and not self._peer_finished and not self._transport.is_closing()

    def _abort_after_linger(self) -> None:
        self._stop_timer()
        if self._limits.linger_seconds:
            self._timer = self._loop.call_later(self._limits.linger_seconds, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, reason: str, *, error: bool) -> None:
        """Settle why this connection ends, once."""
        if self._reason is not None:
            return
        self._reason = reason
        self._counters.count_end(reason, error=error)
        door = "none" if self._door is None else self._door.name
        level = logging.WARNING if error else logging.DEBUG
        log.log(level, "connection closed", extra={"peer": self.peer, "door": door, "reason": reason})


def written(name: tuple[str, int]) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def is_loopback(host: str) -> bool:
    """Whether an address (not a name) is this machine's own, also when it is an IPv4 one in IPv6 clothes."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
