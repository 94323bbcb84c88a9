"""Self-signed certificate of a server without a configured one, created once and stored in the data directory.

No CA signs it. A client can authenticate the server by the fingerprint that the server prints at its start.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from headrace.net.quic.endpoint import ServerTls

_CERTIFICATE_NAME: Final = "quic-certificate.pem"
_KEY_NAME: Final = "quic-key.pem"
_DAYS: Final = 3_650
"""Clients trust the fingerprint, not the date; a renewal would break every client that stores it."""


def self_signed(directory: Path, *, now: datetime.datetime) -> ServerTls:
    """Return the certificate of the directory, created if absent. Raises `OSError`."""
    tls = ServerTls(directory / _CERTIFICATE_NAME, directory / _KEY_NAME)
    if not (tls.certificate_file.exists() and tls.key_file.exists()):
        _make(tls, now)
    return tls


def fingerprint(tls: ServerTls) -> str:
    """Return the SHA-256 of the certificate in hexadecimal. Raises `OSError`, and `ValueError` if the file holds no certificate."""
    certificate = x509.load_pem_x509_certificate(tls.certificate_file.read_bytes())
    return certificate.fingerprint(SHA256()).hex()


def _make(tls: ServerTls, now: datetime.datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "headrace")])
    names = x509.SubjectAlternativeName(
        [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    # The key first: the next start creates both again if one is missing.
    _write(tls.key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write(tls.certificate_file, certificate.public_bytes(Encoding.PEM), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write the file atomically and with `mode` from the start."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)
    beside.replace(path)
