"""TLS as a client chooses it: whom to trust, and who to be."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError


class TlsUnusable(HeadraceError):
    """A certificate file cannot be used; the text names it."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """The files are read for every connection, so a renewed certificate is used by the next one."""

    ca_file: Path | str | None = None
    """Who may have signed the broker's certificate; None: whom the system trusts."""
    certificate_file: Path | str | None = None
    """Our own certificate, where the broker asks for one."""
    key_file: Path | str | None = None
    """The key of it; None: it is in the same file."""
    server_name: str | None = None
    """The name the broker's certificate must hold; None: the host that is connected to."""

    def context(self) -> ssl.SSLContext:
        """Raises `TlsUnusable`."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as failure:
            raise TlsUnusable(f"{self.ca_file}: {_words(failure)}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.certificate_file is not None:
                # Without an answer OpenSSL would ask the terminal for the passphrase of an encrypted key.
                context.load_cert_chain(self.certificate_file, self.key_file, password=lambda: "")
        except (OSError, ValueError) as failure:
            raise TlsUnusable(f"{self.certificate_file} and {self.key_file or 'the key in it'}: {_words(failure)}") from None
        return context


def _words(failure: Exception) -> str:
    if isinstance(failure, ssl.SSLError):
        return (failure.reason or "not a certificate").lower().replace("_", " ")
    return (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
