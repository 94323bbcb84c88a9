"""QUIC connection over datagrams, an adapter of `aioquic`.

    datagrams ⇄ Carrier ⇄ ConnectionReceiver            a `ConnectionReceiver` is the server's connection or the client's

`aioquic` is a core without I/O. This module adds time, event loop scheduling and flow control:

- Input that arrives in one iteration of the event loop is delivered together, stream by stream, and output is sent together. Batches
  grow with the load, and one acknowledgement covers many datagrams. It travels with the output, or alone when it is due. To build a
  datagram is the largest cost of a connection, so `aioquic` is not asked for one where it would have none.
- `aioquic` grants a peer more credit as soon as its bytes *arrive*. Here credit follows the bytes that the receiver has *taken*: a peer
  stops sending after one window on a stream that is not read. QUIC has no other back-pressure.
- Datagrams start at 1,200 bytes, which every path carries. `aioquic` does not probe for more. On loopback, which carries 64 KiB, they
  grow after the handshake to the size that the peer accepts.

`docs/decisions/quic.md` lists the private names of `aioquic` used here.

Client certificates over QUIC, verified by the same rules as on TCP.

aioquic can request a client certificate and verifies that the client holds its key, but not its signature chain. This module verifies
the chain with OpenSSL during the handshake, so a client without a valid certificate never opens a stream.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # exported without __all__
from aioquic.quic import events
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, pull_quic_transport_parameters
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import AlertDescription, Epoch
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

from headrace import limits
from headrace.net.tls import TlsRefused, identity_of


class ClientCheck:
    """Verifier of client certificates with a set of CAs."""

    def __init__(self, ca_file: Path) -> None:
        """Load the CAs. Raises `OSError`, and `ValueError` if the file holds no certificate."""
        self._store = crypto.X509Store()
        for certificate in x509.load_pem_x509_certificates(ca_file.read_bytes()):
            self._store.add_cert(crypto.X509.from_cryptography(certificate))

    def identity(self, certificate: x509.Certificate | None, chain: list[x509.Certificate]) -> str:
        """Return the client name in the certificate. Raises `TlsRefused`."""
        if certificate is None:
            raise TlsRefused("no client certificate was presented")
        between = [crypto.X509.from_cryptography(one) for one in chain]
        try:
            crypto.X509StoreContext(self._store, crypto.X509.from_cryptography(certificate), between).verify_certificate()
        except crypto.X509StoreContextError as failure:
            raise TlsRefused(f"certificate verify failed ({failure})") from None
        try:
            found = identity_of(_as_on_tcp(certificate)) if _is_for_clients(certificate) else None
        except ValueError:
            raise TlsRefused("the certificate cannot be read") from None
        if found is None:
            raise TlsRefused("the certificate contains no client name")
        return found


_CLIENT: Final = frozenset({ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE})


def _is_for_clients(certificate: x509.Certificate) -> bool:
    """Return whether the certificate is for client authentication or does not restrict its use."""
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return not _CLIENT.isdisjoint(uses)


def _as_on_tcp(certificate: x509.Certificate) -> dict[str, object]:
    """Return the names in the form of `ssl.SSLSocket.getpeercert`."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return {
        "subjectAltName": [
            *(("URI", uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)),
            *(("DNS", name) for name in names.get_values_for_type(x509.DNSName)),
        ],
        "subject": [[("commonName", attribute.value)] for attribute in common],
    }


NetworkAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]
SendDatagram: TypeAlias = Callable[[bytes, NetworkAddress], None]

INITIAL_DATAGRAM_BYTES: Final = SMALLEST_MAX_DATAGRAM_SIZE
_UNSEEN_OUTPUT_SECONDS: Final = 0.01
TURNS_AT_ONCE: Final = 16
_LOOPBACK_DATAGRAM_BYTES: Final = 16_000
"""`aioquic` writes the length of a STREAM frame in 14 bits."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Flow-control windows of a peer and the number of streams it may open."""

    stream_bytes: int = limits.QUIC_STREAM_WINDOW_BYTES
    connection_bytes: int = limits.QUIC_CONNECTION_WINDOW_BYTES
    streams_max: int = limits.QUIC_STREAMS_MAX


class ConnectionReceiver(Protocol):
    """Callbacks of a connection. Every call runs on the event loop; none may raise because of the peer."""

    def connected(self) -> None:
        """The handshake is done."""

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        """Receive bytes of a stream, in order. They use the peer's credit until `Carrier.taken` releases it."""

    def reset(self, stream: int) -> None:
        """The peer has reset the stream or stopped reading it."""

    def progressed(self) -> None:
        """The peer may have acknowledged bytes."""

    def lost(self, reason: str) -> None:
        """The connection has ended. Called once, as the last call."""


class _CreditedConnection(QuicConnection):
    """`QuicConnection` with credit that follows the bytes taken."""

    def __init__(
        self,
        windows: Windows,
        configuration: QuicConfiguration,
        original_cid: bytes | None = None,
        retried_cid: bytes | None = None,
        wants_certificate: bool = False,
        is_loopback: bool = False,
    ) -> None:
        self._wants_certificate = wants_certificate
        if is_loopback:
            # Congestion control and pacing count in datagrams of this size from the start.
            configuration = copy.copy(configuration)
            configuration.max_datagram_size = _LOOPBACK_DATAGRAM_BYTES
        super().__init__(
            configuration=configuration, original_destination_connection_id=original_cid, retry_source_connection_id=retried_cid
        )
        self._windows = windows
        self._datagram_bytes_max = configuration.max_datagram_size
        self._max_datagram_size = INITIAL_DATAGRAM_BYTES
        self._local_max_streams_bidi.value = self._local_max_streams_bidi.sent = windows.streams_max
        # Fujin has no unidirectional streams.
        self._local_max_streams_uni.value = self._local_max_streams_uni.sent = 0
        self.taken: dict[int, int] = {}
        self.taken_total = 0

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = self._wants_certificate

    @property
    def peer_certificate(self) -> x509.Certificate | None:
        """The certificate whose key the peer holds."""
        return self.tls._peer_certificate

    def identity(self, check: ClientCheck) -> str:
        """Return the name in the client certificate, after the handshake. Raises `TlsRefused`."""
        return check.identity(self.peer_certificate, self.tls._peer_certificate_chain)

    def take(self, stream_id: int, size_bytes: int) -> bool:
        """Release the credit of received bytes. Return whether the peer is to be told now."""
        taken = self.taken[stream_id] = self.taken.get(stream_id, 0) + size_bytes
        self.taken_total += size_bytes
        stream, window = self._streams.get(stream_id), self._windows.stream_bytes
        if stream is not None and taken + window - stream.max_stream_data_local >= window // 2:
            return True
        window = self._windows.connection_bytes
        return self.taken_total + window - self._local_max_data.value >= window // 2

    def take_rest(self, stream_id: int) -> None:
        """Release the credit of everything received on a stream that is no longer read."""
        stream = self._streams.get(stream_id)
        taken = self.taken.pop(stream_id, 0)
        if stream is not None:
            self.taken_total += stream.receiver.highest_offset - taken

    def unacknowledged(self, stream_id: int) -> int:
        stream = self._streams.get(stream_id)
        return 0 if stream is None else len(stream.sender._buffer)

    @property
    def has_output(self) -> bool:
        """Whether there may be more to send than acknowledgements."""
        return not self._handshake_confirmed or any(
            not stream.sender.buffer_is_empty or stream.sender.reset_pending for stream in self._streams_queue
        )

    def acknowledge(self, now: float) -> None:
        """Send the acknowledgement that is due soon with the next datagram."""
        space = self._spaces[Epoch.ONE_RTT]
        if space.ack_at is not None and space.ack_at > now:
            space.ack_at = now

    def grow_datagrams(self) -> None:
        """Send datagrams as large as path and peer carry: the handshake is done."""
        self._max_datagram_size = self._datagram_bytes_max

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        size_bytes = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if size_bytes is not None:
            self._datagram_bytes_max = min(self._datagram_bytes_max, size_bytes)

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:
        window, receiver = self._windows.stream_bytes, stream.receiver
        if receiver.is_finished or stream.stream_id is None:
            return
        granted = self.taken.get(stream.stream_id, 0) + window
        if granted - stream.max_stream_data_local >= window // 2:
            stream.max_stream_data_local = granted
        # aioquic doubles a limit once half of it has arrived, so the arrived bytes are hidden from it.
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


class CarrierTurns:
    """Connections of one socket that have something to deliver or to send, in order. A few have their turn in each iteration of the event
    loop.

    libuv reads at most 32 datagrams of a socket in an iteration. If hundreds of connections sent in each, their acknowledgements would wait
    longer and longer.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add(self, turn: Callable[[], None]) -> None:
        self._waiting.append(turn)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        count = min(len(self._waiting), TURNS_AT_ONCE)
        if count < len(self._waiting):
            self._schedule()
        for _ in range(count):
            self._waiting.popleft()()


class Carrier:
    """One connection, created by a server or client endpoint."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        windows: Windows,
        send_datagram: SendDatagram,
        address: NetworkAddress,
        *,
        original_cid: bytes | None = None,
        retried_cid: bytes | None = None,
        client_check: ClientCheck | None = None,
        turns: CarrierTurns | None = None,
    ) -> None:
        """`address` is the peer's. `original_cid` is the connection id in the client's first packet, `retried_cid` the one of a Retry. With
        `client_check`, the peer must present a certificate. `turns` belong to the socket; None: it has no other connection."""
        self._loop = asyncio.get_running_loop()
        self._quic = _CreditedConnection(
            windows, configuration, original_cid, retried_cid, client_check is not None, _is_loopback(address[0])
        )
        self._client_check = client_check
        self.identity: str | None = None
        """The name in the client certificate; None without one."""
        self.address = address
        self._send_datagram = send_datagram
        self._receiver: ConnectionReceiver
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._transmit_at: float | None = None
        """When to look for output that nothing announces."""
        self._turns = CarrierTurns() if turns is None else turns
        self._has_turn = False
        self._sent: list[Callable[[], None]] = []
        self._has_output = False
        """Whether something was put into the connection that it has to send."""
        self._arrived: dict[int, list[bytes]] = {}
        self._finished: set[int] = set()
        self._reset: list[int] = []
        self._is_ending = self._is_lost = False
        self.on_cid: Callable[[bytes, bool], None] = lambda cid, is_new: None
        """Called when the connection gets or retires a connection id."""

    def attach(self, receiver: ConnectionReceiver) -> None:
        self._receiver = receiver

    @property
    def host_cid(self) -> bytes:
        return self._quic.host_cid

    @property
    def host(self) -> str:
        return self.address[0]

    @property
    def peer(self) -> str:
        return f"[{self.address[0]}]:{self.address[1]}" if ":" in self.address[0] else f"{self.address[0]}:{self.address[1]}"

    @property
    def peer_fingerprint(self) -> str:
        """The SHA-256 of the peer's certificate in hexadecimal, after the handshake; empty without one."""
        certificate = self._quic.peer_certificate
        return "" if certificate is None else certificate.fingerprint(SHA256()).hex()

    # Called by the owner.

    def connect(self) -> None:
        self._quic.connect(self.address, now=self._loop.time())
        self._transmit()

    def open_stream(self) -> int:
        """Return a new bidirectional stream. Beyond the peer's stream limit, its output waits."""
        return self._quic.get_next_available_stream_id()

    def send(self, stream: int, data: bytes, *, finish: bool = False) -> None:
        """Queue bytes. They are dropped if the sending side of the stream has ended."""
        if self._is_lost:
            return
        try:
            self._quic.send_stream_data(stream, data, end_stream=finish)
        except (RuntimeError, ValueError):
            return
        self._send_soon()

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call back once, when the connection has sent what it may send."""
        self._sent.append(callback)
        self._send_soon()

    def unacknowledged(self, stream: int) -> int:
        """Return the bytes sent on the stream that the peer has not acknowledged. They stay in memory."""
        return self._quic.unacknowledged(stream)

    def taken(self, stream: int, size_bytes: int) -> None:
        """Release the credit of received bytes: the peer may send as many more."""
        if self._quic.take(stream, size_bytes):
            self._send_soon()

    def ignore(self, stream: int) -> None:
        """Stop reading the stream and release its credit."""
        if not self._is_lost and stream in self._quic._streams:
            self._quic.take_rest(stream)
            if not self._quic._streams[stream].receiver.is_finished:
                self._quic.stop_stream(stream, QuicErrorCode.NO_ERROR)
            self._send_soon()

    def abort(self, stream: int) -> None:
        """Reset the sending side of the stream and drop its unacknowledged bytes."""
        if not self._is_lost:
            self._quic.reset_stream(stream, QuicErrorCode.NO_ERROR)
            self._send_soon()

    def close(self, code: int, reason: str) -> None:
        """Close the connection and send the peer the code and the reason."""
        if not self._is_lost:
            self._quic.close(error_code=code, reason_phrase=reason)
            self._transmit()
            self._process_events()

    def refuse(self, reason: str) -> None:
        """Close a connection before its handshake, with a transport error: only that may carry a reason so early."""
        self._quic.close(error_code=QuicErrorCode.CONNECTION_REFUSED, frame_type=QuicFrameType.PADDING, reason_phrase=reason)
        self._transmit()
        self._process_events()

    def give_up(self, reason: str) -> None:
        """End the connection without notifying the peer."""
        self._end(reason)

    # Input.

    def receive_datagram(self, data: bytes, address: NetworkAddress) -> None:
        self._quic.receive_datagram(data, address, now=self._loop.time())
        self._process_events()
        self._schedule()

    def _process_events(self) -> None:
        """Collect the events of the connection. All but its end are delivered in the next iteration of the loop."""
        while (event := self._quic.next_event()) is not None:
            match event:
                case events.StreamDataReceived(data=data, end_stream=finished, stream_id=stream):
                    self._arrived.setdefault(stream, []).append(data)
                    if finished:
                        self._finished.add(stream)
                case events.StreamReset(stream_id=stream) | events.StopSendingReceived(stream_id=stream):
                    self._reset.append(stream)
                case events.ConnectionIdIssued(connection_id=cid):
                    self.on_cid(cid, True)
                case events.ConnectionIdRetired(connection_id=cid):
                    self.on_cid(cid, False)
                case events.HandshakeCompleted():
                    if self._is_known():
                        self._quic.grow_datagrams()
                        self._receiver.connected()
                case events.ConnectionTerminated(error_code=code, reason_phrase=reason):
                    self._end(f"code {code}: {reason}" if reason else f"code {code}")

    def _is_known(self) -> bool:
        """Verify the client certificate, if one is required. A client without a valid one is closed before it can open a stream."""
        if self._client_check is None:
            return True
        try:
            self.identity = self._quic.identity(self._client_check)
        except TlsRefused as failure:
            code = QuicErrorCode.CRYPTO_ERROR + AlertDescription.bad_certificate
            self._quic.close(error_code=code, frame_type=QuicFrameType.CRYPTO, reason_phrase=str(failure))
            while self._quic.next_event() is not None:
                pass  # streams in the same datagram
            return False
        return True

    def _end(self, reason: str) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        self._deliver()  # input that arrived before the end
        self._is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._receiver.lost(reason)

    # Scheduling.

    def _send_soon(self) -> None:
        self._has_output = True
        self._schedule()

    def _schedule(self) -> None:
        if not self._has_turn and not self._is_lost:
            self._has_turn = True
            self._turns.add(self._run_turn)

    def _run_turn(self) -> None:
        try:
            if not self._is_lost:
                self._deliver()
                self._receiver.progressed()
        finally:
            self._has_turn = False
        if self._is_lost:
            return
        if self._has_output or self._quic.has_output:
            self._transmit()
        else:
            # A lost frame that has to be sent again, or the end of a stream, is not seen from here.
            self._set_timer(self._loop.time() + _UNSEEN_OUTPUT_SECONDS)

    def _deliver(self) -> None:
        arrived, self._arrived = self._arrived, {}
        finished, self._finished = self._finished, set()
        reset, self._reset = self._reset, []
        for stream, chunks in arrived.items():
            self._receiver.received(stream, chunks[0] if len(chunks) == 1 else b"".join(chunks), stream in finished)
        for stream in reset:
            self._receiver.reset(stream)

    def _transmit(self) -> None:
        """Send the datagrams that are due, and set the timer."""
        now, self._has_output, self._transmit_at = self._loop.time(), False, None
        self._quic.acknowledge(now)
        for data, address in self._quic.datagrams_to_send(now=now):
            self._send_datagram(data, address)
        self._set_timer()
        sent, self._sent = self._sent, []
        for callback in sent:
            callback()

    def _set_timer(self, transmit_at: float | None = None) -> None:
        """Set the timer, and transmit not later than at this time. A timer that is set for an earlier time stays: most are moved to a later
        time before they fire."""
        if transmit_at is not None and self._transmit_at is None:
            self._transmit_at = transmit_at
        at = self._quic.get_timer()
        if self._transmit_at is not None and (at is None or self._transmit_at < at):
            at = self._transmit_at
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._handle_timer), at

    def _handle_timer(self) -> None:
        now, self._timer = max(self._timer_at, self._loop.time()), None
        due_at = self._quic.get_timer()
        if due_at is not None and due_at <= now:
            self._quic.handle_timer(now=now)
            self._process_events()
        elif self._transmit_at is None or self._transmit_at > now:
            self._set_timer()
            return
        if not self._is_lost:
            self._transmit()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
