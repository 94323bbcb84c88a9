"""TCP connection: detects the protocol by the first bytes, then passes bytes between the socket and the session.

The first byte distinguishes TLS from plain text. Sessions always see plain text.

    sniffing ──► open ──► closing ──► lost
        │                    ▲
        └────────────────────┘            lost is possible at any time

Closing sends the remaining output, shuts down the sending half of the connection, and discards input until the peer closes too. The
kernel resets a socket that is closed with unread bytes, and a reset drops the last acknowledgements.
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
from headrace.net.counters import AdmissionLimits, NetCounters, Slot, admit, log_in
from headrace.net.protocol import ServedProtocol, Sniff, choose
from headrace.net.relay import PREFACE
from headrace.net.sockets import BorrowedSocket
from headrace.net.tls import HANDSHAKE_BYTE, HANDSHAKE_FAILURE, Tls, TlsRefused, TlsStream
from headrace.sessions.contract import FramedSession

log = logging.getLogger(__name__)

SNIFF_BYTES_MAX: Final = 256
"""The protocol must be known after this many bytes."""
_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)
"""Linux only. The kernel clears the option by itself, so it is set again after each read."""
READ_BYTES_A_TURN: Final = 128 * limits.KIB
"""A connection that delivers this much in one read is read again in the next turn of the loop."""
REST_BYTES_MIN: Final = 4 * limits.KIB
"""A smaller read is a few requests, which may share the flush of those before them."""
REST_SECONDS_MAX: Final = 0.002
"""Longest pause in reading a peer that does not wait for its replies."""


@dataclass(frozen=True, slots=True)
class NetLimits:
    """Limits of one listener. 0 seconds: no deadline."""

    connections_max: int = limits.CONNECTIONS_MAX
    connections_per_ip_max: int = limits.CONNECTIONS_PER_IP_MAX
    connections_per_user_max: int = limits.CONNECTIONS_PER_USER_MAX
    """Per user, administrators excepted; 0: no limit."""
    connections_reserved: int = 0
    """The part of `connections_max` that only administrators may keep."""
    login_seconds: float = 0.0
    """From the detection of the protocol to the login, if one is required."""
    handshake_seconds: float = limits.HANDSHAKE_SECONDS_MAX
    """From the connection to the detection of the protocol."""
    linger_seconds: float = limits.LINGER_SECONDS_MAX
    """From the decision to close to the close."""
    output_high_water_bytes: int = limits.OUTPUT_HIGH_WATER_BYTES
    output_low_water_bytes: int = limits.OUTPUT_LOW_WATER_BYTES
    output_bytes_max: int = limits.OUTPUT_BUFFER_BYTES_MAX
    """Above this the connection stops reading, so that more requests cannot add replies that the peer does not read."""
    output_total_bytes_max: int = limits.OUTPUT_TOTAL_BYTES_MAX
    """Of all connections together."""
    frame_check_seconds: float = limits.FRAME_CHECK_SECONDS
    """Interval of the check for incomplete frames."""
    unfinished_bytes_max: int = limits.UNFINISHED_BYTES_MAX
    """Of all connections together."""

    @property
    def admission(self) -> AdmissionLimits:
        return AdmissionLimits(self.connections_max, self.connections_per_ip_max, self.connections_per_user_max, self.connections_reserved)


class ListenerContext(Protocol):
    """The listener as a connection sees it."""

    @property
    def protocols(self) -> Sequence[ServedProtocol]: ...

    @property
    def limits(self) -> NetLimits: ...

    @property
    def counters(self) -> NetCounters: ...

    @property
    def tls(self) -> Tls | None: ...

    def made(self) -> None: ...

    def entered(self, connection: Connection) -> None: ...

    def left(self, connection: Connection) -> None: ...


class Connection:
    """A `Peer` for its protocol and a `Link` for its session. An `asyncio.Protocol`, but not by inheritance, which mypyc rejects."""

    def __init__(self, listener: ListenerContext) -> None:
        self._listener = listener
        self._limits, self._counters = listener.limits, listener.counters
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._socket: BorrowedSocket | None = None
        """None before the connection is made and after it is lost."""
        self._host = self.peer = self.local = "unknown"
        self._tls: TlsStream | None = None
        self._slot: Slot | None = None
        """None: the connection was rejected."""
        self._user: str | None = None
        """The user for whom the connection is counted."""
        self._is_logged_in = self._is_admin = self._is_draining = False
        self.is_relayed = False
        """Whether another broker relays the connection to this one."""
        self._first = b""
        self._protocol: ServedProtocol | None = None
        self._session: FramedSession | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received_bytes = self._held_bytes = 0
        self._checked: tuple[int, int] | None = None
        """Bytes received and bytes of an incomplete frame at the last `check_frame`; None: no incomplete frame."""
        self._pauses = 0
        self._resting: asyncio.TimerHandle | None = None
        """Ends the pause in reading a peer that does not wait for its replies. It does not count in `_pauses`."""
        self._has_sent = False
        """Whether the session has sent something since the last read."""
        self._largest_unsent = 0
        """The largest write since the output was below its low-water mark."""
        self._is_output_full = False
        """Reading is paused because the peer does not read its replies."""
        self._peer_finished = False
        self._is_pausing = False
        """The connection ends with an error and closes after a pause."""
        self._reason: str | None = None
        """Why this connection closes; set once."""

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by inheritance
        self._transport = transport
        name = transport.get_extra_info("peername")
        if name:
            self._host, self.peer = name[0], written(name)
        self._counters.accepted += 1
        self._listener.made()
        slot = admit(self._limits.admission, self._counters, self._host)
        if isinstance(slot, str):
            self._end(slot, error=True)
            transport.abort()
            return
        self._slot = slot
        if slot is Slot.RESERVED:
            self._counters.enter_reserve(self._host)
        self.local = written(transport.get_extra_info("sockname"))
        self._counters.enter(self._host)
        self._listener.entered(self)
        self._socket = BorrowedSocket.of(transport)
        self._socket.set_options()
        transport.set_write_buffer_limits(self._limits.output_high_water_bytes, self._limits.output_low_water_bytes)
        if self._limits.handshake_seconds:
            self._timer = self._loop.call_later(self._limits.handshake_seconds, self._handshake_timed_out)

    def data_received(self, data: bytes) -> None:
        size_bytes = len(data)
        self._counters.bytes_in += size_bytes
        if self._reason is not None:
            return
        if self._session is None and self._tls is None and not self._first and not self._detect_tls(data):
            return
        if size_bytes >= READ_BYTES_A_TURN and not self._pauses and not self._peer_finished:
            # More is waiting, and libuv reads up to 32 times in a turn. The other connections come first.
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)
        is_stream = REST_BYTES_MIN <= size_bytes < READ_BYTES_A_TURN and self._session is not None and self._session.owes_reply
        self._has_sent = False
        if self._tls is None:
            self._deliver(data)
        else:
            self._receive_encrypted(self._tls, data)
        if not self._has_sent and not self._is_reply_near() and not self._transport.is_closing():
            self._acknowledge()
        if is_stream and not self._has_sent:
            self._rest()

    def _rest(self) -> None:
        """Do not read until the next reply. The peer sends many small writes and does not wait for the replies to earlier ones.

        What it sends meanwhile would only wait for the disk. Read one by one, writes of 10 KB take three times the CPU time of writes that
        are read together, and a loop that takes the interpreter for each of them keeps it from the thread that writes the journal.
        """
        if self._resting is None and not self._pauses and self._may_switch_reading():
            self._transport.pause_reading()
            self._resting = self._loop.call_later(REST_SECONDS_MAX, self._end_rest)

    def _end_rest(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
            self._read_on()

    def _acknowledge(self) -> None:
        """Send the TCP acknowledgement that no reply carries. The kernel would delay it by 40 ms, and a client that leaves Nagle's
        algorithm on sends its next small write only after it. It costs as much as a reply."""
        if _QUICKACK is not None and self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def _is_reply_near(self) -> bool:
        """Return whether the peer gets a reply without sending anything more."""
        return self._session is not None and self._session.owes_reply and not self._session.held_bytes

    def _read_on(self) -> None:
        if not self._pauses and self._may_switch_reading():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Let the session finish: requests may still be on their way to disk, and the peer may still read the replies."""
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

    def pause_writing(self) -> None:
        """Nothing to do: `send` and `unsent_bytes` look at the size of the buffer."""

    def resume_writing(self) -> None:
        self._largest_unsent = 0
        self._counters.output.update(self, self.kept_bytes, self._limits.output_total_bytes_max)
        if self._is_output_full:
            self._is_output_full = False
            self.resume_reading()
        self.feed()

    def connection_lost(self, failure: Exception | None) -> None:
        self._stop_timer()
        self._end_rest()
        if self._socket is not None:
            self._socket.detach()
            self._socket = None
        if self._slot is None:
            return
        self._end("peer closed" if failure is None else f"connection lost: {failure}", error=False)
        self._counters.leave(self._host)
        self._counters.output.left(self)
        if self._slot is Slot.RESERVED:
            self._counters.leave_reserve(self._host)
        if self._user is not None:
            self._counters.leave_user(self._user)
        self._counters.unfinished_bytes -= self._held_bytes
        self._listener.left(self)
        if self._session is not None and self._protocol is not None:
            self._counters.leave_protocol(self._protocol.name)
            session, self._session = self._session, None
            session.lost()

    # `Link`: called by the session.

    def send(self, frames: bytes) -> None:
        transport = self._transport
        if self._reason is not None or transport.is_closing():
            return
        if self._tls is not None:
            frames = self._tls.send(frames)
        self._counters.bytes_out += len(frames)
        transport.write(frames)
        self._has_sent = True
        self._end_rest()
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes > limits.OUTPUT_FREE_BYTES:
            self._largest_unsent = max(self._largest_unsent, len(frames))
            self._counters.output.update(self, self.kept_bytes, self._limits.output_total_bytes_max)
            if not self._is_output_full and unsent_bytes > self._limits.output_bytes_max:
                self._is_output_full = True
                self.pause_reading()

    def close(self, reason: str, *, error: bool = True) -> None:
        if self._reason is not None:
            return
        self._end(reason, error=error)
        if self._transport.is_closing():
            return
        pause = self._pause_seconds() if error else 0.0
        if not pause:
            self._shut_down()
            return
        self._stop_timer()
        self._timer = self._loop.call_later(pause, self._shut_down)
        self._is_pausing = True
        self._transport.resume_reading()  # to see the peer leave; what it sends is dropped

    def _pause_seconds(self) -> float:
        """Return the delay before a close for an error: none if the slot is needed or the peer has left."""
        if self._protocol is None or self._peer_finished or self._counters.open * 2 > self._limits.connections_max:
            return 0.0
        return self._protocol.error_pause_seconds

    def _shut_down(self) -> None:
        """Send the remaining output and close the sending half."""
        self._is_pausing = False
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
        except OSError:  # the peer has reset the connection
            self._transport.abort()
            return
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
        output = self._counters.output
        if output.unsent_bytes and output.must_wait(self, unsent_bytes, self._limits.output_total_bytes_max):
            return limits.OUTPUT_HIGH_WATER_BYTES + 1
        return unsent_bytes

    # `Holder`: called by the output budget.

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
        return self._socket is not None and self._socket.has_peer_left

    # `Peer`: called by the protocol. (`local` is an attribute.)

    def logged_in(self, user: str, *, is_admin: bool) -> str | None:
        if self._slot is None or self._user == user:
            return None
        slot = log_in(self._limits.admission, self._counters, self._host, self._slot, user, is_admin=is_admin)
        if isinstance(slot, str):
            return slot
        if self._slot is Slot.RESERVED and slot is Slot.REGULAR:
            self._counters.leave_reserve(self._host)
        if self._user is not None:
            self._counters.leave_user(self._user)
        self._user = None if is_admin else user
        if self._user is not None:
            self._counters.enter_user(user)
        self._slot, self._is_admin = slot, is_admin
        if not self._is_logged_in:
            self._is_logged_in = True
            if self._reason is None and not self._peer_finished:
                self._stop_timer()
        return None

    @property
    def identity(self) -> str | None:
        return None if self._tls is None else self._tls.identity

    # Called by the listener.

    def drain(self) -> None:
        """Let the session finish its requests and close."""
        self._is_draining = True
        if self._session is None:
            self.close("draining", error=False)
        elif self._reason is None:
            self._session.closing()
        elif self._is_pausing:
            self._shut_down()

    def replace_session(self, session: FramedSession) -> None:
        assert self._session is not None, "a session hands its connection over"
        before, self._session = self._session, session
        before.lost()
        self._count_unfinished(0)
        if self._peer_finished or self._is_draining:
            session.closing()

    def check_frame(self, seconds: float) -> None:
        """Close the connection if the same frame was incomplete at the last check, `seconds` ago, and has grown too slowly."""
        before, self._checked = self._checked, None
        if self._session is None or self._reason is not None or self._pauses or self._peer_finished:
            return
        held_bytes = self._session.held_bytes
        if not held_bytes:
            return
        self._checked = self._received_bytes, held_bytes
        if before is None:
            return
        received_bytes, grown_bytes = self._received_bytes - before[0], held_bytes - before[1]
        # If a frame ended in between, less is held than was received.
        if received_bytes == grown_bytes < seconds * limits.FRAME_BYTES_PER_SECOND_MIN:
            self.close(f"frame too slow: {held_bytes} bytes received, {grown_bytes} of them in {seconds:g} s")

    def abort(self, reason: str) -> None:
        """Close immediately and drop the unsent bytes."""
        self._end(reason, error=False)
        self._transport.abort()

    def _detect_tls(self, first: bytes) -> bool:
        """Detect TLS by the first byte. Return False, after closing, if the listener does not accept it."""
        tls = self._listener.tls
        if first[0] == HANDSHAKE_BYTE:
            if tls is not None:
                self._tls = TlsStream(tls.context)
                return True
            self._transport.write(HANDSHAKE_FAILURE)
            self.close("TLS on a plain listener")
            return False
        if tls is None or (tls.settings.optional and is_loopback(self._host)):
            return True
        self.close(f"plain text on a TLS listener: first bytes {first[:16].hex()}")
        return False

    def _receive_encrypted(self, tls: TlsStream, data: bytes) -> None:
        was_open = tls.is_open
        try:
            plain = tls.receive(data)
        except TlsRefused as failure:
            self._transport.write(tls.take())
            self.close(f"{'TLS broken' if was_open else 'TLS handshake failed'}: {failure}")
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
            data = self._without_preface(self._first + data)
            if data:
                self._enter_protocol(data)
        if self._session is not None and self._reason is None:
            self._received_bytes += len(data)
            self._session.receive(data)
            held_bytes = self._session.held_bytes
            if held_bytes or self._held_bytes:
                self._count_unfinished(held_bytes)

    def _without_preface(self, first: bytes) -> bytes:
        """Return the first bytes of the protocol, none if they are still to come."""
        self._first = b""
        if first.startswith(PREFACE):
            self.is_relayed = True
            return first[len(PREFACE) :]
        if PREFACE.startswith(first):
            self._first = first
            return b""
        return first

    def _count_unfinished(self, held_bytes: int) -> None:
        """Update the sum of incomplete frames. Above the limit, close the connection if it adds to a large one."""
        counters = self._counters
        counters.unfinished_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        if counters.unfinished_bytes > self._limits.unfinished_bytes_max and held_bytes > limits.UNFINISHED_BYTES_FREE:
            self.close(f"too many unfinished frames: {counters.unfinished_bytes} bytes of them")

    def _enter_protocol(self, first: bytes) -> None:
        """Open the session of the detected protocol. A single protocol needs no detection: its decoder rejects other bytes."""
        protocols = self._listener.protocols
        found = protocols[0] if len(protocols) == 1 else choose(protocols, first)
        if isinstance(found, ServedProtocol):
            self._stop_timer()
            self._first, self._protocol = b"", found
            self._counters.enter_protocol(found.name)
            self._session = found.open(self)
            self._start_login_timer()
        elif found is Sniff.MORE and len(first) < SNIFF_BYTES_MAX:
            self._first = first
        else:
            self.close(f"unknown protocol: first bytes {first[:16].hex()}")

    def _handshake_timed_out(self) -> None:
        if self._first:
            what = "nothing recognisable"
        elif self._tls is not None and not self._tls.is_open:
            what = "TLS handshake not finished"
        else:
            what = "nothing at all"
        self.close(f"no first message in time: {what}")

    def _start_login_timer(self) -> None:
        seconds = self._limits.login_seconds or (self._limits.handshake_seconds if self._slot is Slot.RESERVED else 0.0)
        if seconds and not self._is_logged_in and self._reason is None and self._timer is None:
            self._timer = self._loop.call_later(seconds, self._login_timed_out)

    def _login_timed_out(self) -> None:
        self._timer = None
        if self._slot is Slot.RESERVED:
            self.close("no login in time: the connection slot is reserved for administrators")
        elif self._protocol is not None and self._protocol.needs_login():
            self.close("no login in time: nothing is allowed without one")

    def _may_switch_reading(self) -> bool:
        """Return whether pauses apply: not after the peer has finished or while the connection closes."""
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
        """Record and log the reason of the end, once."""
        if self._reason is not None:
            return
        self._reason = reason
        self._counters.count_end(reason, error=error)
        protocol = "none" if self._protocol is None else self._protocol.name
        fields: dict[str, object] = {"peer": self.peer, "protocol": protocol, "reason": reason}
        if not error:
            log.debug("connection closed", extra=fields)
            return
        left_out = self._counters.end_lines.left_out((self._host, protocol, reason.partition(":")[0]), self._loop.time())
        if left_out is not None:
            log.warning("connection closed", extra=fields | ({"left_out": left_out} if left_out else {}))


def written(name: tuple[str, int]) -> str:
    """Format `host:port`, with an IPv6 host in brackets."""
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def is_loopback(host: str) -> bool:
    """Return whether a numeric address is a loopback address, also as an IPv4-mapped IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
