"""TLS of one connection, without its socket: sealed bytes in, plain bytes out, and back.

The event loop's own TLS would hide the first byte, by which plain and sealed peers share a port, and cannot close one half of a
connection. Here the connection keeps its transport, its back-pressure and its gentle end, and only passes its bytes through.

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
"""The first byte of every TLS connection: a record that holds a handshake message."""
NOT_HERE: Final = bytes.fromhex("15 03 03 00 02 02 28")
"""A fatal alert (handshake failure), for a peer that tries TLS where there is none: its library then says so, at once."""
_PLAIN_BYTES: Final = 64 * 1024


class TlsUnusable(HeadraceError):
    """The certificate files cannot be used; the text is one line for the operator."""


class TlsRefused(HeadraceError):
    """The peer cannot be talked to: no common version, no certificate, a wrong one."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """What a listener asks of its peers."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Every peer has to show a certificate signed by one of these."""
    minimum: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    optional: bool = False
    """Peers on this machine may do without."""


class Tls:
    """The certificates in use. They may change while connections are open: those keep what they were opened with."""

    def __init__(self, settings: TlsSettings) -> None:
        """Raises `TlsUnusable`."""
        self.settings = settings
        self._marks = self._look()
        self.context = load(settings)

    def reload(self) -> None:
        """Use what the files hold now. Raises `TlsUnusable`, and goes on with what was loaded before."""
        self._marks = self._look()
        self.context = load(self.settings)

    def has_changed(self) -> bool:
        """Whether the files are others than at the last attempt to load them."""
        return self._look() != self._marks

    def _look(self) -> list[tuple[int, int, int] | None]:
        files = (self.settings.certificate, self.settings.key, self.settings.client_ca)
        return [_mark(path) for path in files if path is not None]


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load(settings: TlsSettings) -> ssl.SSLContext:
    """Raises `TlsUnusable`, naming the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = settings.minimum
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    # No resumption: each connection proves anew who it is, with a certificate that is valid now.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    _require_private(settings.key)
    for path in (settings.certificate, settings.key, settings.client_ca):
        _require_readable(path)
    try:
        # Without an answer OpenSSL would ask the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(settings.certificate, settings.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as failure:
        raise TlsUnusable(f"{settings.certificate} and {settings.key}: {_words(failure)}") from None
    if settings.client_ca is not None:
        try:
            context.load_verify_locations(settings.client_ca)
        except (ssl.SSLError, ValueError) as failure:
            raise TlsUnusable(f"{settings.client_ca}: {_words(failure)}") from None
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


def _words(failure: Exception) -> str:
    """What OpenSSL found, without its file and line."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"certificate verify failed ({failure.verify_message})"
    if isinstance(failure, ssl.SSLError) and failure.reason:
        return failure.reason.lower().replace("_", " ")
    return str(failure)


class TlsStream:
    """The server's side of one connection. `take` what it has to say after each call."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._names_required = context.verify_mode is ssl.CERT_REQUIRED
        self.is_open = False
        """The handshake is done."""
        self.is_finished = False
        """The peer has said that it sends no more."""
        self.identity: str | None = None
        """Whom the peer's certificate names; None without one."""

    def receive(self, sealed: bytes) -> bytes:
        """The plain bytes in it, none while the handshake goes on. Raises `TlsRefused`."""
        self._incoming.write(sealed)
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self._greet()
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as failure:
            raise TlsRefused(_words(failure)) from None

    def send(self, plain: bytes) -> bytes:
        """The same, sealed. Nothing after a failure: the peer could not read it."""
        rest = memoryview(plain)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError:
            return b""
        return self._outgoing.read()

    def take(self) -> bytes:
        """What the handshake, or its failure, has to tell the peer."""
        return self._outgoing.read()

    def close(self) -> bytes:
        """The words that end our half."""
        if self.is_open:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # the peer has not ended its half yet, and need not
        return self._outgoing.read()

    def _read(self) -> bytes:
        pieces: list[bytes] = []
        try:
            while piece := self._tls.read(_PLAIN_BYTES):
                pieces.append(piece)
            self.is_finished = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_finished = True
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _greet(self) -> None:
        self.is_open = True
        if self._names_required:
            self.identity = identity_of(self._tls.getpeercert() or {})
            if self.identity is None:
                raise TlsRefused("the certificate names nobody")


def identity_of(certificate: object) -> str | None:
    """The first URI, else the first DNS name, else the common name of what `getpeercert` returns. Taken as it is, or not at all."""
    assert isinstance(certificate, dict)
    alternatives = certificate.get("subjectAltName", ())
    common = [pair for names in certificate.get("subject", ()) for pair in names]
    for names, kind in ((alternatives, "URI"), (alternatives, "DNS"), (common, "commonName")):
        for name in (value for found, value in names if found == kind):
            return name if name and name.isprintable() else None
    return None
