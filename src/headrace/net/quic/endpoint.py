"""UDP sockets and TLS for QUIC: a server's endpoint, where many connections share a socket, and a client's."""

from __future__ import annotations

import asyncio
import copy
import enum
import logging
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from aioquic._buffer import Buffer
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
from cryptography.hazmat.primitives.hashes import SHA256

from headrace import limits
from headrace.net.quic.connection import INITIAL_DATAGRAM_BYTES, Carrier, NetworkAddress, Windows
from headrace.net.quic.identity import ClientCheck

log = logging.getLogger(__name__)

NO_ERROR: Final = int(QuicErrorCode.NO_ERROR)
_CID_BYTES: Final = 8
_SOCKET_BUFFER_BYTES: Final = 4 * 1024 * 1024
"""A burst of a whole congestion window must find room: what the socket drops has to be sent again."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Who the server is, and who may vouch for its clients; without `client_ca_file` they are not asked."""

    certificate_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def client_check(self) -> ClientCheck | None:
        """Raises `OSError` or `ValueError`."""
        return None if self.client_ca_file is None else ClientCheck(self.client_ca_file)


class Retry(enum.StrEnum):
    """Whether a client has to show that it gets mail at the address it writes from, before anything is kept for it.

    It costs one round trip. Without it, whoever forges addresses fills the table of connections with handshakes that never end.
    """

    AUTO = "auto"
    """Once many handshakes are unfinished."""
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom the client believes: a server with this SHA-256 fingerprint, one vouched for by `ca_file` or the system, or any."""

    ca_file: Path | None = None
    fingerprint: str | None = None
    """Hexadecimal, with or without colons."""
    certificate_file: Path | None = None
    key_file: Path | None = None
    """What the client shows to a server that asks who it is. None: the key is in the same file."""
    server_name: str | None = None
    """The name the server's certificate must hold; None: the host that is connected to."""
    insecure: bool = False
    """Believe any certificate. Whoever is on the way can then read and change everything."""


class ServerEndpoint(asyncio.DatagramProtocol):
    """A socket, and the connections on it. `accept` gets each new connection before its first datagram is looked at."""

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
        self._carriers: dict[bytes, Carrier] = {}
        self._unproven: set[Carrier] = set()
        """Those whose handshake is not done: nobody knows yet whether they exist."""
        self._transport: asyncio.DatagramTransport
        self._is_deaf = False
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
        """`host` is numeric. `accept` returns why the connection is refused, or None. Raises `OSError` when the address cannot be had."""
        configuration = _configuration(alpn, windows, idle_seconds, is_client=False)
        configuration.load_cert_chain(tls.certificate_file, tls.key_file)
        client_check = tls.client_check()
        loop = asyncio.get_running_loop()
        # Bound here: uvloop would hide the reason why an address cannot be had.
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
        """Connections from now on see this certificate. Raises `OSError` or `ValueError` when it cannot be used: the old one stays."""
        renewed = copy.copy(self._configuration)
        renewed.load_cert_chain(tls.certificate_file, tls.key_file)
        self._configuration, self._client_check = renewed, tls.client_check()

    def proven(self, carrier: Carrier) -> None:
        """Its handshake is done."""
        self._unproven.discard(carrier)

    def refuse_new(self) -> None:
        """From now on, connections that are not known are not answered."""
        self._is_deaf = True

    def close(self) -> None:
        self._transport.close()

    async def wait_closed(self) -> None:
        """The address is free again."""
        await self._closed.wait()

    def connection_lost(self, failure: Exception | None) -> None:
        self._closed.set()

    def forget(self, carrier: Carrier) -> None:
        self._unproven.discard(carrier)
        for cid in [cid for cid, known in self._carriers.items() if known is carrier]:
            del self._carriers[cid]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        _widen(transport)

    def datagram_received(self, data: bytes, address: NetworkAddress) -> None:
        # A short header is followed by the connection's id at once: nearly every datagram is found by one slice.
        carrier = self._carriers.get(data[1 : 1 + _CID_BYTES]) if data and not data[0] & 0x80 else self._by_long_header(data, address)
        if carrier is not None:
            carrier.receive_datagram(data, address)

    def error_received(self, failure: Exception) -> None:
        """An unreachable peer, told by the network. Its connection will find out by its own clock."""
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
        if carrier is not None or self._is_deaf or header.packet_type is not QuicPacketType.INITIAL or len(data) < INITIAL_DATAGRAM_BYTES:
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
                return None  # forged, borrowed or too old: its sender may begin anew
        elif self._wants_proof():
            self._ask_for_proof(header, address)
            return None
        retried_cid = cid if header.token else None
        carrier = Carrier(
            self._configuration,
            self._windows,
            self._send,
            original_cid=original_cid,
            retried_cid=retried_cid,
            client_check=self._client_check,
        )
        carrier.address = address
        self._unproven.add(carrier)

        def on_cid(cid: bytes, is_new: bool) -> None:
            if is_new:
                self._carriers[cid] = carrier
            else:
                self._carriers.pop(cid, None)

        carrier.on_cid = on_cid
        refusal = self._accept(carrier, address[0])
        self._carriers[cid] = self._carriers[carrier.host_cid] = carrier
        if refusal is None:
            return carrier
        carrier.receive_datagram(data, address)
        carrier.refuse(refusal)
        return None

    def _wants_proof(self) -> bool:
        if self._retry is Retry.AUTO:
            return len(self._unproven) >= limits.QUIC_UNPROVEN_MAX
        return self._retry is Retry.ALWAYS

    def _ask_for_proof(self, header: QuicHeader, address: NetworkAddress) -> None:
        """A Retry packet: whoever sends its token back is where it says. Nothing is kept until then."""
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


class ClientEndpoint(asyncio.DatagramProtocol):
    """A socket of one connection's own."""

    def __init__(self, configuration: QuicConfiguration, windows: Windows, tls: ClientTls) -> None:
        self._tls = tls
        self._transport: asyncio.DatagramTransport
        self.carrier = Carrier(configuration, windows, self._send)

    @classmethod
    async def open(
        cls, host: str, port: int, *, alpn: str, tls: ClientTls, windows: Windows = Windows(), idle_seconds: float
    ) -> ClientEndpoint:
        """Resolve and bind; `start` then shakes hands. Raises `OSError`."""
        configuration = _configuration(alpn, windows, idle_seconds, is_client=True)
        configuration.server_name = tls.server_name or host
        if tls.certificate_file is not None:
            configuration.load_cert_chain(tls.certificate_file, tls.key_file)
        if tls.insecure or tls.fingerprint is not None:
            configuration.verify_mode = ssl.CERT_NONE
        elif tls.ca_file is not None:
            configuration.load_verify_locations(cafile=str(tls.ca_file))
        loop = asyncio.get_running_loop()
        _, endpoint = await loop.create_datagram_endpoint(lambda: cls(configuration, windows, tls), remote_addr=(host, port))
        return endpoint

    def start(self) -> None:
        self.carrier.connect(self._transport.get_extra_info("peername"))

    def close(self) -> None:
        self._transport.close()

    def distrust(self) -> str | None:
        """After the handshake: why this server is not the one that was meant, if it is not.

        The handshake has proved that the server holds the certificate's key; here the certificate itself is compared.
        """
        if self._tls.fingerprint is None:
            return None
        certificate = self.carrier._quic.tls._peer_certificate
        found = "" if certificate is None else certificate.fingerprint(SHA256()).hex()
        wanted = self._tls.fingerprint.replace(":", "").lower()
        return None if found == wanted else f"the certificate has the fingerprint {found}, not {wanted}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        _widen(transport)

    def datagram_received(self, data: bytes, address: NetworkAddress) -> None:
        self.carrier.receive_datagram(data, address)

    def error_received(self, failure: Exception) -> None:
        """Nobody listens there (any more): no use in waiting for a time-out."""
        if isinstance(failure, ConnectionRefusedError):
            self.carrier.give_up("connection refused")

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


def _widen(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
