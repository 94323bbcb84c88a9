"""The broker's TLS: made from the configuration, and renewed while the broker runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from headrace.net.tls import Tls, TlsSettings, TlsUnusable
from headrace.server.choices import TlsVersion
from headrace.server.config import Config

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 3.0
"""How often the files are looked at. A renewed certificate is in use after this, without a signal."""
EXPIRY_DAYS: Final = 14
"""How long before its end a certificate is spoken of."""
_VERSIONS: Final = {TlsVersion.V1_2: ssl.TLSVersion.TLSv1_2, TlsVersion.V1_3: ssl.TLSVersion.TLSv1_3}


def tls_of(config: Config) -> Tls | None:
    """What the configuration asks for; None: plain text. Raises `TlsUnusable`."""
    chosen = config.tls
    if not chosen.certificate:
        return None
    tls = Tls(
        TlsSettings(
            certificate=Path(chosen.certificate),
            key=Path(chosen.key),
            client_ca=Path(chosen.client_ca) if chosen.client_ca else None,
            minimum=_VERSIONS[chosen.minimum],
            optional=chosen.optional,
        )
    )
    mind_expiry(tls.settings.certificate, datetime.now(UTC))
    return tls


def mind_expiry(path: Path, now: datetime) -> None:
    """Say so in the log if the certificate has expired or soon will: every client would be the first to find out."""
    try:
        end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return  # OpenSSL has just loaded it; what is there now is for the next look
    days = (end - now).days
    if days < EXPIRY_DAYS:
        words = "the certificate has expired" if end <= now else f"the certificate expires in {days} days"
        _log.warning(words, extra={"certificate": path, "end": end.isoformat()})


class TlsWatch:
    """Looks at the certificate files now and then. What cannot be used is reported, and the old certificate goes on."""

    def __init__(self, tls: Tls, look_seconds: float = LOOK_SECONDS, *, renewed: Callable[[], None] = lambda: None) -> None:
        """`renewed` is called after new files were loaded: for listeners that keep a certificate of their own."""
        self._tls, self._look_seconds, self._renewed = tls, look_seconds, renewed
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_seconds, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reload(self) -> None:
        """Load the files whether they have changed or not."""
        try:
            self._tls.reload()
        except TlsUnusable as failure:
            # Renewal writes two files, one after the other: between them they do not fit, and the next look finds both.
            _log.error("certificate not reloaded", extra={"reason": str(failure)})
        else:
            self._renewed()
            _log.info("certificate reloaded", extra={"certificate": self._tls.settings.certificate})
            mind_expiry(self._tls.settings.certificate, datetime.now(UTC))

    def _look(self) -> None:
        if self._tls.has_changed():
            self.reload()
        self.start()
