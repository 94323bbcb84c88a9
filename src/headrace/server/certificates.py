"""Certificates that Headrace creates: for development a CA, a server certificate and one for each client, and a self-signed one for QUIC.

    DIR/ca.pem      DIR/ca.key          trusted by both sides; signs the others
    DIR/server.pem  DIR/server.key      tls.certificate and tls.key
    DIR/NAME.pem    DIR/NAME.key        client certificate; NAME is the user name

Only their owner can read the keys. Existing files are never overwritten: a second CA would invalidate every certificate that the
first one signed.

No CA signs the self-signed certificate. A client can authenticate the server by its fingerprint, which the server prints at its start.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.errors import ConfigError

CA_DAYS: Final = 3_650
LEAF_DAYS: Final = 825
"""The maximum that strict verifiers accept."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_RESERVED: Final = ("ca", "server")
_CLOCK_SLACK: Final = timedelta(hours=1)


def init(directory: Path, names: Sequence[str], now: datetime) -> list[Path]:
    """Create a CA and a server certificate for these host names and addresses, and return the files. Raises `ConfigError`."""
    subjects = [_host(name) for name in names]
    if not subjects:
        raise ConfigError("a server certificate needs at least one name")
    _make_directory(directory)
    _require_absent(directory, "ca", "server")
    key = ec.generate_private_key(ec.SECP256R1())
    ca = _ca("Headrace development CA", key, now).add_extension(_usage(signs_certificates=True), critical=True).sign(key, hashes.SHA256())
    return [
        *_write(directory, "ca", ca, key),
        *_issue(directory, "server", names[0], subjects, ExtendedKeyUsageOID.SERVER_AUTH, (ca, key), now),
    ]


def client(directory: Path, name: str, now: datetime) -> list[Path]:
    """Create a client certificate signed by the CA of the directory, and return its files. Raises `ConfigError`."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigError(f"{name!r} is not a client name; expected letters, digits, '.', '_' and '-', and not {' or '.join(_RESERVED)}")
    _require_absent(directory, name)
    return _issue(directory, name, name, [x509.DNSName(name)], ExtendedKeyUsageOID.CLIENT_AUTH, _read_ca(directory), now)


def self_signed(certificate_file: Path, key_file: Path, now: datetime) -> None:
    """Create the certificate of a server on this machine, unless both files exist. Raises `OSError`.

    Clients trust the fingerprint, not the date: a renewal would break every client that stores it.
    """
    if certificate_file.exists() and key_file.exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([_host(name) for name in ("localhost", "127.0.0.1", "::1")])
    certificate = _ca("headrace", key, now).add_extension(names, critical=False).sign(key, hashes.SHA256())
    _store(certificate_file, certificate, key_file, key)


def _ca(common_name: str, key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.CertificateBuilder:
    subject = _named(common_name)
    builder = _builder(subject, subject, key.public_key(), key.public_key(), now, CA_DAYS)
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)


def _issue(
    directory: Path,
    stem: str,
    common_name: str,
    names: Sequence[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
    signer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    now: datetime,
) -> list[Path]:
    ca, ca_key = signer
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_named(common_name), ca.subject, key.public_key(), ca_key.public_key(), now, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return _write(directory, stem, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # The clock of a client may be slow.
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        encoded = name.encode("idna").decode("ascii")
    except UnicodeError:
        encoded = ""
    if not _HOST.fullmatch(encoded):
        raise ConfigError(f"{name!r} is neither a host name nor an address")
    return x509.DNSName(encoded)


def _read_ca(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
    except OSError as failure:
        raise ConfigError(f"{failure.filename}: {failure.strerror}; create a CA with headrace certs init {directory}") from None
    except (ValueError, TypeError) as failure:
        raise ConfigError(f"{directory}: the CA cannot be read: {failure}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{directory / 'ca.key'} is not an elliptic-curve key; expected the key that headrace certs init creates")
    return certificate, key


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"{directory}: {failure.strerror or failure}") from None


def _require_absent(directory: Path, *stems: str) -> None:
    for path in (directory / f"{stem}.{ending}" for stem in stems for ending in ("pem", "key")):
        if path.exists():
            raise ConfigError(f"{path} already exists and is not overwritten; remove it or choose another directory")


def _write(directory: Path, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    files = [directory / f"{stem}.pem", directory / f"{stem}.key"]
    try:
        _store(files[0], certificate, files[1], key)
    except OSError as failure:
        raise ConfigError(f"{failure.filename}: {failure.strerror or failure}") from None
    return files


def _store(certificate_file: Path, certificate: x509.Certificate, key_file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write both files atomically, the key first: a server creates both again if one is missing."""
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, content, mode in ((key_file, secret, 0o600), (certificate_file, certificate.public_bytes(pem), 0o644)):
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
