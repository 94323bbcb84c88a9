"""TLS options of clients."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError


class TlsUnusable(HeadraceError):
    """A certificate file is unusable. The text names the file."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Certificate files. Every connection reads them again and so uses renewed certificates."""

    ca_file: Path | str | None = None
    """CA certificates to trust; None: those of the system."""
    certificate_file: Path | str | None = None
    """Client certificate, if the broker requires one."""
    key_file: Path | str | None = None
    """Private key of the client certificate; None: in the same file."""
    server_name: str | None = None
    """Name that the broker's certificate must contain; None: the host of the connection."""

    def context(self) -> ssl.SSLContext:
        """Return the SSL context. Raises `TlsUnusable`."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as failure:
            raise TlsUnusable(f"{self.ca_file}: {_reason_of(failure)}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.certificate_file is not None:
                # Without a password OpenSSL would prompt on the terminal for that of an encrypted key.
                context.load_cert_chain(self.certificate_file, self.key_file, password=lambda: "")
        except (OSError, ValueError) as failure:
            raise TlsUnusable(f"{self.certificate_file} and {self.key_file or 'the key in it'}: {_reason_of(failure)}") from None
        return context


def _reason_of(failure: Exception) -> str:
    if isinstance(failure, ssl.SSLError):
        return (failure.reason or "not a certificate").lower().replace("_", " ")
    return (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
