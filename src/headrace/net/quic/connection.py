"""One QUIC connection over datagrams: the one home of the library that does it.

    datagrams ⇄ Carrier ⇄ ConnectionReceiver            a `ConnectionReceiver` is the server's connection or the client's

The library (`aioquic`) is a core without I/O; what is added here is time, the turns of the loop, and credit:

- What arrives in one turn of the loop is handed over together, stream by stream, and what is to be sent leaves together: runs grow
  with the load, and one acknowledgement serves many datagrams.
- The library grants a peer more credit as soon as its bytes have *arrived*. Here credit follows what was *taken*: a stream that nobody
  reads from stops being sent to after one window. That is the only back-pressure QUIC has.
- Datagrams start at the 1,200 bytes that every path carries. The library does not probe for more; on loopback, where every path is
  known to carry 64 KiB, they grow after the handshake to what the peer accepts.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from aioquic._buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, pull_quic_transport_parameters
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import AlertBadCertificate

from headrace import limits
from headrace.net.quic.identity import ClientCheck
from headrace.net.tls import TlsRefused

NetworkAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]
SendDatagram: TypeAlias = Callable[[bytes, NetworkAddress], None]

INITIAL_DATAGRAM_BYTES: Final = SMALLEST_MAX_DATAGRAM_SIZE
_LOOPBACK_DATAGRAM_BYTES: Final = 16_000
"""The library writes the length of a STREAM frame in 14 bits."""


@dataclass(frozen=True, slots=True)
class Windows:
    """What a peer may have sent and not yet seen taken, and how many streams it may have open."""

    stream_bytes: int = limits.QUIC_STREAM_WINDOW_BYTES
    connection_bytes: int = limits.QUIC_CONNECTION_WINDOW_BYTES
    streams_max: int = limits.QUIC_STREAMS_MAX


class ConnectionReceiver(Protocol):
    """Who hears of what a connection does. Every call comes on the loop; none may raise because of the peer."""

    def connected(self) -> None:
        """The handshake is done."""

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        """Bytes of a stream, in order. They count against the peer's credit until `Carrier.taken` says that they were used."""

    def reset(self, stream: int) -> None:
        """The peer gives the stream up: it sends no more, or reads no more."""

    def progressed(self) -> None:
        """The peer has acknowledged something: less may be waiting for it now."""

    def lost(self, reason: str) -> None:
        """The connection is over. Called once, and last."""


class _CreditedConnection(QuicConnection):
    """The library's connection, with credit that follows what was taken."""

    def __init__(
        self,
        windows: Windows,
        configuration: QuicConfiguration,
        original_cid: bytes | None = None,
        retried_cid: bytes | None = None,
        client_check: ClientCheck | None = None,
    ) -> None:
        self._client_check = client_check
        self.identity: str | None = None
        """Whom the client's certificate names, once it is checked."""
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retried_cid,
        )
        self._windows = windows
        self._local_max_streams_bidi.value = self._local_max_streams_bidi.sent = windows.streams_max
        # Fujin has no unidirectional streams, so a peer may not open any.
        self._local_max_streams_uni.value = self._local_max_streams_uni.sent = 0
        self.taken: dict[int, int] = {}
        self.taken_total = 0
        self.peer_datagram_bytes_max = 65_527

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        check, tls = self._client_check, self.tls
        if check is None:
            return
        tls._request_client_certificate = True
        finish = tls._server_handle_finished

        def finish_if_known(input_buf: Buffer, output_buf: Buffer) -> None:
            """The last word of the client: by now it has shown that it holds the key of the certificate it sent, if it sent one."""
            try:
                self.identity = check.identity(tls._peer_certificate, tls._peer_certificate_chain)
            except TlsRefused as refusal:
                raise AlertBadCertificate(str(refusal)) from None
            finish(input_buf, output_buf)

        tls._server_handle_finished = finish_if_known  # type: ignore[method-assign]  # one instance's, not the class's

    def take(self, stream_id: int, size_bytes: int) -> None:
        self.taken[stream_id] = self.taken.get(stream_id, 0) + size_bytes
        self.taken_total += size_bytes

    def take_rest(self, stream_id: int) -> None:
        """Nobody will ask for the rest of this stream: the connection must not be charged for it for ever."""
        stream = self._streams.get(stream_id)
        taken = self.taken.pop(stream_id, 0)
        if stream is not None:
            self.taken_total += stream.receiver.highest_offset - taken

    def may_send(self, stream_id: int) -> bool:
        """Not on a stream that has ended on this side, also because the peer asked for that."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return not self._stream_is_discarded(stream_id)
        return stream.sender._buffer_fin is None and stream.sender._reset_error_code is None

    def unacknowledged(self, stream_id: int) -> int:
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender._buffer_start

    def grow_datagrams(self, size_bytes: int) -> None:
        size_bytes = min(size_bytes, self.peer_datagram_bytes_max)
        if size_bytes > self._max_datagram_size:
            grown = size_bytes / self._max_datagram_size
            self._max_datagram_size = size_bytes
            self._loss._pacer._max_datagram_size = size_bytes
            congestion = self._loss._cc
            assert isinstance(congestion, RenoCongestionControl), "the library's default"
            congestion._max_datagram_size = size_bytes
            congestion.congestion_window = int(congestion.congestion_window * grown)

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        said = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if said is not None:
            self.peer_datagram_bytes_max = said

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        window, receiver = self._windows.stream_bytes, stream.receiver
        if receiver.is_finished or stream.stream_id is None:
            return
        granted = self.taken.get(stream.stream_id, 0) + window
        if granted - stream.max_stream_data_local >= window // 2:
            stream.max_stream_data_local = granted
        # The library doubles a limit once half of it has arrived. It must not see what has.
        arrived, receiver.highest_offset = receiver.highest_offset, 0
        try:
            super()._write_stream_limits(builder, space, stream)
        finally:
            receiver.highest_offset = arrived

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        window, limit = self._windows.connection_bytes, self._local_max_data
        granted = self.taken_total + window
        if granted - limit.value >= window // 2:
            limit.value = granted
        arrived, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = arrived


class Carrier:
    """One connection. Made by a server's endpoint or a client's."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        windows: Windows,
        send_datagram: SendDatagram,
        *,
        original_cid: bytes | None = None,
        retried_cid: bytes | None = None,
        client_check: ClientCheck | None = None,
    ) -> None:
        """`original_cid` is what a server's peer called it first, `retried_cid` what it was told to call it by a Retry; with
        `client_check` the peer has to show a certificate."""
        self._loop = asyncio.get_running_loop()
        self._quic = _CreditedConnection(windows, configuration, original_cid, retried_cid, client_check)
        self._send_datagram = send_datagram
        self._hearer: ConnectionReceiver
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._turn: asyncio.Handle | None = None
        self._arrived: dict[int, list[bytes]] = {}
        self._finished: set[int] = set()
        self._given_up: list[int] = []
        self._is_ending = self._is_lost = False
        self.address: NetworkAddress | None = None
        self.on_cid: Callable[[bytes, bool], None] = lambda cid, is_new: None
        """The connection is to be found under this id, or no longer."""

    def attach(self, hearer: ConnectionReceiver) -> None:
        self._hearer = hearer

    @property
    def host_cid(self) -> bytes:
        return self._quic.host_cid

    @property
    def identity(self) -> str | None:
        """Whom the peer's certificate names; None without one."""
        return self._quic.identity

    @property
    def host(self) -> str:
        return "unknown" if self.address is None else self.address[0]

    @property
    def peer(self) -> str:
        if self.address is None:
            return "unknown"
        return f"[{self.address[0]}]:{self.address[1]}" if ":" in self.address[0] else f"{self.address[0]}:{self.address[1]}"

    # What its owner asks.

    def connect(self, address: NetworkAddress) -> None:
        self.address = address
        self._quic.connect(address, now=self._loop.time())
        self._transmit()

    def open_stream(self) -> int:
        """A new bidirectional one. Where the peer allows no more, what is sent on it waits."""
        return self._quic.get_next_available_stream_id()

    def send(self, stream: int, data: bytes, *, finish: bool = False) -> None:
        """Queue; on a stream that has ended on this side the bytes are dropped."""
        if not self._is_lost and self._quic.may_send(stream):
            self._quic.send_stream_data(stream, data, end_stream=finish)
            self._soon()

    def unacknowledged(self, stream: int) -> int:
        """Bytes sent on the stream that the peer has not acknowledged: they are kept here."""
        return self._quic.unacknowledged(stream)

    def taken(self, stream: int, size_bytes: int) -> None:
        """So many received bytes are used: the peer may send as many more."""
        self._quic.take(stream, size_bytes)
        self._soon()

    def ignore(self, stream: int) -> None:
        """What the peer has sent or will send on the stream is of no interest any more."""
        if not self._is_lost and stream in self._quic._streams:
            self._quic.take_rest(stream)
            if not self._quic._streams[stream].receiver.is_finished:
                self._quic.stop_stream(stream, QuicErrorCode.NO_ERROR)
            self._soon()

    def abort(self, stream: int) -> None:
        """Send no more on the stream; what is unacknowledged is forgotten."""
        if not self._is_lost:
            self._quic.reset_stream(stream, QuicErrorCode.NO_ERROR)
            self._soon()

    def close(self, code: int, reason: str) -> None:
        """End the connection now. The peer is told the code and the reason."""
        if not self._is_lost:
            self._quic.close(error_code=code, reason_phrase=reason)
            self._transmit()
            self._hear()

    def refuse(self, reason: str) -> None:
        """End a connection whose handshake has not begun: an error of the transport, since only that may carry a reason so early."""
        self._quic.close(error_code=QuicErrorCode.CONNECTION_REFUSED, frame_type=QuicFrameType.PADDING, reason_phrase=reason)
        self._transmit()
        self._hear()

    def give_up(self, reason: str) -> None:
        """The connection is of no use any more, and the peer cannot be told."""
        self._end(reason)

    # What the network brings.

    def receive_datagram(self, data: bytes, address: NetworkAddress) -> None:
        if self.address is None:
            self.address = address
        self._quic.receive_datagram(data, address, now=self._loop.time())
        self._hear()
        self._soon()

    def _hear(self) -> None:
        """Note what has happened; all but the end of the connection is told in the next turn."""
        while (event := self._quic.next_event()) is not None:
            match event:
                case events.StreamDataReceived(data=data, end_stream=finished, stream_id=stream):
                    self._arrived.setdefault(stream, []).append(data)
                    if finished:
                        self._finished.add(stream)
                case events.StreamReset(stream_id=stream) | events.StopSendingReceived(stream_id=stream):
                    self._given_up.append(stream)
                case events.ConnectionIdIssued(connection_id=cid):
                    self.on_cid(cid, True)
                case events.ConnectionIdRetired(connection_id=cid):
                    self.on_cid(cid, False)
                case events.HandshakeCompleted():
                    if _is_loopback(self.host):
                        self._quic.grow_datagrams(_LOOPBACK_DATAGRAM_BYTES)
                    self._hearer.connected()
                case events.ConnectionTerminated(error_code=code, reason_phrase=reason):
                    self._end(f"code {code}: {reason}" if reason else f"code {code}")

    def _end(self, reason: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        self._tell()  # what came before the end is not lost by it
        self._is_lost = True
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._hearer.lost(reason)

    # Turns.

    def _soon(self) -> None:
        if self._turn is None and not self._is_lost:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        self._tell()
        self._hearer.progressed()
        self._transmit()

    def _tell(self) -> None:
        arrived, self._arrived = self._arrived, {}
        finished, self._finished = self._finished, set()
        given_up, self._given_up = self._given_up, []
        for stream, pieces in arrived.items():
            self._hearer.received(stream, pieces[0] if len(pieces) == 1 else b"".join(pieces), stream in finished)
        for stream in given_up:
            self._hearer.reset(stream)

    def _transmit(self) -> None:
        """Send what may be sent now, and set the timer for the rest."""
        for data, address in self._quic.datagrams_to_send(now=self._loop.time()):
            self._send_datagram(data, address)
        at = self._quic.get_timer()
        if at != self._timer_at or self._timer is None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if at is None else self._loop.call_at(at, self._ring)
            self._timer_at = at

    def _ring(self) -> None:
        assert self._timer_at is not None
        now, self._timer, self._timer_at = max(self._timer_at, self._loop.time()), None, None
        self._quic.handle_timer(now=now)
        self._hear()
        if not self._is_lost:
            self._transmit()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
