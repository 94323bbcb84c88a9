"""TLS of one connection, without its socket: encrypted bytes in, plain bytes out, and back.

asyncio's TLS transport hides the first byte, which selects TLS or plain text on a shared port, and cannot close one half of a
connection. Here the connection keeps its transport, its back-pressure and its half-close, and passes its bytes through `TlsStream`.

    socket ─► TlsStream.receive ─► session ─► TlsStream.send ─► socket
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import HeadraceError

HANDSHAKE_BYTE: Final = 0x16
"""The first byte of every TLS connection: the record type of a handshake message."""
HANDSHAKE_FAILURE: Final = bytes.fromhex("15 03 03 00 02 02 28")
"""A fatal TLS alert for a peer that tries TLS on a plain listener."""
_PLAIN_BYTES: Final = 64 * 1024


class TlsUnusable(HeadraceError):
    """The certificate files cannot be used. The text is one line for the operator."""


class TlsRefused(HeadraceError):
    """TLS with the peer failed: no common version, no certificate, or an invalid one."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS settings of a listener."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """CAs of client certificates. If set, every peer must present one."""
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    optional: bool = False
    """Peers on loopback may use plain text."""


class Tls:
    """The certificates in use. After a reload, open connections keep the old ones."""

    def __init__(self, settings: TlsSettings) -> None:
        """Load the files. Raises `TlsUnusable`."""
        self.settings = settings
        self._versions = self._file_versions()
        self.context = load(settings)

    def reload(self) -> None:
        """Load the files again. Raises `TlsUnusable`; the old certificates then stay in use."""
        self._versions = self._file_versions()
        self.context = load(self.settings)

    def has_changed(self) -> bool:
        """Return whether the files have changed since the last attempt to load them."""
        return self._file_versions() != self._versions

    def _file_versions(self) -> list[tuple[int, int, int] | None]:
        files = (self.settings.certificate, self.settings.key, self.settings.client_ca)
        return [_file_version(path) for path in files if path is not None]


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load(settings: TlsSettings) -> ssl.SSLContext:
    """Return a context with these files. Raises `TlsUnusable`, which names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = settings.minimum
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # No resumption: each connection presents a certificate that is valid now.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    _require_private(settings.key)
    for path in (settings.certificate, settings.key, settings.client_ca):
        _require_readable(path)
    try:
        # Without a password, OpenSSL would prompt on the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(settings.certificate, settings.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as failure:
        raise TlsUnusable(f"{settings.certificate} and {settings.key}: {_reason(failure)}") from None
    if settings.client_ca is not None:
        try:
            context.load_verify_locations(settings.client_ca)
        except (ssl.SSLError, ValueError) as failure:
            raise TlsUnusable(f"{settings.client_ca}: {_reason(failure)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _require_readable(path: Path | None) -> None:
    if path is not None:
        try:
            path.open("rb").close()
        except OSError as failure:
            raise TlsUnusable(f"{path}: {failure.strerror or failure}") from None


def _require_private(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError as failure:
        raise TlsUnusable(f"{path}: {failure.strerror or failure}") from None
    if stat.S_ISREG(mode) and mode & 0o007:
        raise TlsUnusable(f"{path} can be read by others (mode {mode & 0o777:o}); chmod 600 it")


def _reason(failure: Exception) -> str:
    """Return OpenSSL's error text without its file and line."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"certificate verify failed ({failure.verify_message})"
    if isinstance(failure, ssl.SSLError) and failure.reason:
        return failure.reason.lower().replace("_", " ")
    return str(failure)


class TlsStream:
    """One side of a connection: the server's, or with the name of a server that of its client, which begins with `receive(b"")`. Send the
    result of `take` after each call."""

    def __init__(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_name is None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server, server_hostname=server_name)
        self._certificate_required = is_server and context.verify_mode is ssl.CERT_REQUIRED
        self.is_open = False
        """The handshake is done."""
        self.is_finished = False
        """The peer has closed its sending half."""
        self.identity: str | None = None
        """The name in the client certificate; None without one."""

    def receive(self, data: bytes) -> bytes:
        """Decrypt. Returns no bytes during the handshake. Raises `TlsRefused`."""
        self._incoming.write(data)
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self._finish_handshake()
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as failure:
            raise TlsRefused(_reason(failure)) from None

    def send(self, plain: bytes) -> bytes:
        """Encrypt. Returns no bytes after a failure: the peer could not read them."""
        rest = memoryview(plain)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            return b""
        return self._outgoing.read()

    def take(self) -> bytes:
        """Return the handshake messages or alerts to send."""
        return self._outgoing.read()

    def close(self) -> bytes:
        """Return the message that ends the sending half."""
        if self.is_open:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # the peer has not ended its half yet
        return self._outgoing.read()

    def _read(self) -> bytes:
        chunks: list[bytes] = []
        try:
            while chunk := self._tls.read(_PLAIN_BYTES):
                chunks.append(chunk)
            self.is_finished = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_finished = True
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _finish_handshake(self) -> None:
        self.is_open = True
        if self._certificate_required:
            self.identity = identity_of(self._tls.getpeercert() or {})
            if self.identity is None:
                raise TlsRefused("the certificate contains no client name")


def identity_of(certificate: object) -> str | None:
    """Return the first URI, else the first DNS name, else the common name of a `getpeercert` result; None if it is unprintable."""
    assert isinstance(certificate, dict)
    alternatives = certificate.get("subjectAltName", ())
    common = [pair for names in certificate.get("subject", ()) for pair in names]
    for names, kind in ((alternatives, "URI"), (alternatives, "DNS"), (common, "commonName")):
        for name in (value for found, value in names if found == kind):
            return name if name and name.isprintable() else None
    return None
