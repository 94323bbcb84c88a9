"""UDP sockets and TLS for QUIC: server endpoints, where connections share a socket, and client endpoints."""

from __future__ import annotations

import asyncio
import copy
import enum
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # exported without __all__
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from headrace import limits
from headrace.net.quic.connection import INITIAL_DATAGRAM_BYTES, Carrier, CarrierTurns, ClientCheck, NetworkAddress, Windows

log = logging.getLogger(__name__)
T = TypeVar("T")

NO_ERROR: Final = int(QuicErrorCode.NO_ERROR)
_CID_BYTES: Final = 8
_SOCKET_BUFFER_BYTES: Final = 4 * 1024 * 1024
"""Room for a burst of a whole congestion window: datagrams that the socket drops are sent again."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's certificate, and the CAs of its clients. Without `client_ca_file`, clients need no certificate."""

    certificate_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def client_check(self) -> ClientCheck | None:
        """Return the verifier of client certificates, if required. Raises `OSError` or `ValueError`."""
        return None if self.client_ca_file is None else ClientCheck(self.client_ca_file)


def fingerprint(tls: ServerTls) -> str:
    """Return the SHA-256 of the certificate in hexadecimal. Raises `OSError`, and `ValueError` if the file holds no certificate."""
    return x509.load_pem_x509_certificate(tls.certificate_file.read_bytes()).fingerprint(SHA256()).hex()


class Retry(enum.StrEnum):
    """Whether a client must confirm its address before the server keeps state for it.

    A Retry costs one round trip. Without it, forged addresses can fill the connection table with handshakes that never end.
    """

    AUTO = "auto"
    """While many handshakes are unfinished."""
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Trusted servers: one with this SHA-256 fingerprint, one signed by `ca_file` or a system CA, or any."""

    ca_file: Path | None = None
    fingerprint: str | None = None
    """Hexadecimal, with or without colons."""
    certificate_file: Path | None = None
    key_file: Path | None = None
    """The client certificate. A `key_file` of None: the key is in the same file."""
    server_name: str | None = None
    """The name that the server's certificate must contain; None: the host of the connection."""
    insecure: bool = False
    """Accept any certificate. An attacker on the network can then read and change everything."""


class ServerEndpoint(asyncio.DatagramProtocol):
    """A socket and its connections. `accept` gets each new connection before its first datagram is processed."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        windows: Windows,
        retry: Retry,
        client_check: ClientCheck | None,
        accept: Callable[[Carrier, str], str | None],
    ) -> None:
        self._configuration, self._windows, self._accept = configuration, windows, accept
        self._client_check = client_check
        self._retry, self._tokens = retry, QuicRetryTokenHandler()
        self._turns = CarrierTurns()
        self._carriers: dict[bytes, Carrier] = {}
        self._unproven: set[Carrier] = set()
        """Connections with an unfinished handshake, whose addresses are not confirmed."""
        self._transport: asyncio.DatagramTransport
        self._accepts_new = True
        self._closed = asyncio.Event()

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        alpn: str,
        tls: ServerTls,
        windows: Windows,
        idle_seconds: float,
        accept: Callable[[Carrier, str], str | None],
        retry: Retry = Retry.AUTO,
    ) -> ServerEndpoint:
        """Bind a numeric `host`. `accept` returns the reason for rejecting a connection, or None. Raises `OSError` if it cannot bind."""
        configuration = _configuration(alpn, windows, idle_seconds, is_client=False)
        configuration.load_cert_chain(tls.certificate_file, tls.key_file)
        client_check = tls.client_check()
        loop = asyncio.get_running_loop()
        # Bound here: uvloop hides the reason of a failed bind.
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.bind((host, port))
            _, endpoint = await loop.create_datagram_endpoint(lambda: cls(configuration, windows, retry, client_check, accept), sock=sock)
        except BaseException:
            sock.close()
            raise
        return endpoint

    @property
    def bound(self) -> tuple[str, int]:
        host, port = self._transport.get_extra_info("sockname")[:2]
        return host, port

    def renew(self, tls: ServerTls) -> None:
        """Use this certificate for new connections. Raises `OSError` or `ValueError`; the old one then stays in use."""
        renewed = copy.copy(self._configuration)
        renewed.load_cert_chain(tls.certificate_file, tls.key_file)
        self._configuration, self._client_check = renewed, tls.client_check()

    def proven(self, carrier: Carrier) -> None:
        """Record that the handshake is done."""
        self._unproven.discard(carrier)

    def refuse_new(self) -> None:
        """Ignore new connections."""
        self._accepts_new = False

    def close(self) -> None:
        self._transport.close()

    async def wait_closed(self) -> None:
        """Wait until the address is free."""
        await self._closed.wait()

    def connection_lost(self, failure: Exception | None) -> None:
        self._closed.set()

    def forget(self, carrier: Carrier) -> None:
        self._unproven.discard(carrier)
        for cid in [cid for cid, known in self._carriers.items() if known is carrier]:
            del self._carriers[cid]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        _set_buffer_sizes(transport)

    def datagram_received(self, data: bytes, address: NetworkAddress) -> None:
        # The connection id follows a short header byte, so one slice finds the connection of nearly every datagram.
        carrier = self._carriers.get(data[1 : 1 + _CID_BYTES]) if data and not data[0] & 0x80 else self._by_long_header(data, address)
        if carrier is not None:
            carrier.receive_datagram(data, address)

    def error_received(self, failure: Exception) -> None:
        """Ignore an unreachable peer: its connection times out."""
        log.debug("datagram not delivered", extra={"reason": str(failure)})

    def _by_long_header(self, data: bytes, address: NetworkAddress) -> Carrier | None:
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=_CID_BYTES)
        except ValueError:
            return None
        known = self._configuration.supported_versions
        if header.version is not None and header.version not in known:
            if header.packet_type is not QuicPacketType.VERSION_NEGOTIATION and len(data) >= INITIAL_DATAGRAM_BYTES:
                self._send(
                    encode_quic_version_negotiation(
                        source_cid=header.destination_cid, destination_cid=header.source_cid, supported_versions=known
                    ),
                    address,
                )
            return None
        carrier = self._carriers.get(header.destination_cid)
        if (
            carrier is not None
            or not self._accepts_new
            or header.packet_type is not QuicPacketType.INITIAL
            or len(data) < INITIAL_DATAGRAM_BYTES
        ):
            return carrier
        return self._new(header, data, address)

    def _new(self, header: QuicHeader, data: bytes, address: NetworkAddress) -> Carrier | None:
        cid = original_cid = header.destination_cid
        if header.token:
            try:
                original_cid = self._tokens.validate_token(
                    address=address, destination_cid=cid, token=header.token, now=asyncio.get_running_loop().time()
                )
            except ValueError:
                return None  # forged, of another address, or expired
        elif self._needs_retry():
            self._send_retry(header, address)
            return None
        retried_cid = cid if header.token else None
        carrier = Carrier(
            self._configuration,
            self._windows,
            self._send,
            address,
            original_cid=original_cid,
            retried_cid=retried_cid,
            client_check=self._client_check,
            turns=self._turns,
        )
        self._unproven.add(carrier)

        def on_cid(cid: bytes, is_new: bool) -> None:
            if is_new:
                self._carriers[cid] = carrier
            else:
                self._carriers.pop(cid, None)

        carrier.on_cid = on_cid
        reason = self._accept(carrier, address[0])
        self._carriers[cid] = self._carriers[carrier.host_cid] = carrier
        if reason is None:
            return carrier
        carrier.receive_datagram(data, address)
        carrier.refuse(reason)
        return None

    def _needs_retry(self) -> bool:
        if self._retry is Retry.AUTO:
            return len(self._unproven) >= limits.QUIC_UNPROVEN_MAX
        return self._retry is Retry.ALWAYS

    def _send_retry(self, header: QuicHeader, address: NetworkAddress) -> None:
        """Send a Retry packet. A client that returns its token has confirmed its address; no state is kept until then."""
        assert header.version is not None, "an Initial packet has a version"
        cid = os.urandom(_CID_BYTES)
        token = self._tokens.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=cid,
            now=asyncio.get_running_loop().time(),
        )
        self._send(
            encode_quic_retry(
                version=header.version,
                source_cid=cid,
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=token,
            ),
            address,
        )

    def _send(self, data: bytes, address: NetworkAddress) -> None:
        if not self._transport.is_closing():
            self._transport.sendto(data, address)


REFUSED: Final = "connection refused"
"""Reason of a connection to a closed port."""


class ClientEndpoint(asyncio.DatagramProtocol):
    """A client's socket with one connection."""

    def __init__(self, configuration: QuicConfiguration, windows: Windows, tls: ClientTls) -> None:
        self._configuration, self._windows, self._tls = configuration, windows, tls
        self._transport: asyncio.DatagramTransport
        self.carrier: Carrier

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        alpn: str,
        tls: ClientTls,
        windows: Windows = Windows(),
        idle_seconds: float,
        address: str | None = None,
    ) -> ClientEndpoint:
        """Bind a socket for the host, or for one of its addresses; `start` begins the handshake. Raises `OSError`."""
        configuration = _configuration(alpn, windows, idle_seconds, is_client=True)
        configuration.server_name = tls.server_name or host
        if tls.certificate_file is not None:
            configuration.load_cert_chain(tls.certificate_file, tls.key_file)
        if tls.insecure or tls.fingerprint is not None:
            configuration.verify_mode = ssl.CERT_NONE
        elif tls.ca_file is not None:
            configuration.load_verify_locations(cafile=str(tls.ca_file))
        loop = asyncio.get_running_loop()
        _, endpoint = await loop.create_datagram_endpoint(lambda: cls(configuration, windows, tls), remote_addr=(address or host, port))
        return endpoint

    def start(self) -> None:
        self.carrier.connect()

    def close(self) -> None:
        self._transport.close()

    def distrust(self) -> str | None:
        """Return, after the handshake, why the server is not trusted, or None.

        The handshake has verified that the server holds the certificate's key; this compares the fingerprint of the certificate.
        """
        if self._tls.fingerprint is None:
            return None
        found = self.carrier.peer_fingerprint
        wanted = self._tls.fingerprint.replace(":", "").lower()
        return None if found == wanted else f"the certificate has the fingerprint {found}; expected {wanted}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        _set_buffer_sizes(transport)
        self.carrier = Carrier(self._configuration, self._windows, self._send, transport.get_extra_info("peername"))

    def datagram_received(self, data: bytes, address: NetworkAddress) -> None:
        self.carrier.receive_datagram(data, address)

    def error_received(self, failure: Exception) -> None:
        """End the connection if the port is closed, without waiting for a timeout."""
        if isinstance(failure, ConnectionRefusedError):
            self.carrier.give_up(REFUSED)

    def _send(self, data: bytes, address: NetworkAddress) -> None:
        if not self._transport.is_closing():
            self._transport.sendto(data)


def _configuration(alpn: str, windows: Windows, idle_seconds: float, *, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        alpn_protocols=[alpn],
        is_client=is_client,
        connection_id_length=_CID_BYTES,
        idle_timeout=idle_seconds,
        max_data=windows.connection_bytes,
        max_stream_data=windows.stream_bytes,
        max_datagram_size=INITIAL_DATAGRAM_BYTES,
    )


def _set_buffer_sizes(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


async def first_to_answer(host: str, port: int, attempt: Callable[[str], Awaitable[T]], *, seconds: float) -> T:
    """Attempt the addresses of the host in turn until one answers, in a fair part of the time each. Raises `OSError`, also
    `TimeoutError`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    async with asyncio.timeout_at(deadline):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        *others, last = dict.fromkeys(str(entry[4][0]) for entry in found)
        for index, address in enumerate(others):
            try:
                async with asyncio.timeout((deadline - loop.time()) / (len(others) + 1 - index)):
                    return await attempt(address)
            except ConnectionRefusedError:
                continue
            except ConnectionError:
                raise  # the server has answered
            except OSError:  # also a timeout
                continue
        return await attempt(last)
