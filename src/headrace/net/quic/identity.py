"""Client certificates over QUIC, verified by the same rules as on TCP.

aioquic can request a client certificate and verifies that the client holds its key, but not its signature chain. This module verifies
the chain with OpenSSL during the handshake, so a client without a valid certificate never opens a stream.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import crypto

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
