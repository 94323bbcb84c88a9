"""TLS of the broker: loaded from the configuration, reloaded while the broker runs."""

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
from headrace.server.config import Config
from headrace.server.settings import TlsVersion

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 3.0
"""Interval of the check for new files. A renewed certificate is in use after this time, without a signal."""
EXPIRY_DAYS: Final = 14
"""Time before its expiry at which a certificate causes a warning."""
_VERSIONS: Final = {TlsVersion.V1_2: ssl.TLSVersion.TLSv1_2, TlsVersion.V1_3: ssl.TLSVersion.TLSv1_3}


def tls_of(config: Config) -> Tls | None:
    """Return the configured TLS, or None for plain text. Raises `TlsUnusable`."""
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
    warn_of_expiry(tls.settings.certificate, datetime.now(UTC))
    return tls


def coordinator_context(config: Config) -> ssl.SSLContext:
    """Return the TLS settings for connections to the coordinator. Raises `TlsUnusable`."""
    try:
        return ssl.create_default_context(cafile=config.tls.ca or None)
    except OSError as failure:  # includes ssl.SSLError
        raise TlsUnusable(f"tls.ca: {config.tls.ca}: {failure.strerror or failure}") from None


def warn_of_expiry(path: Path, now: datetime) -> None:
    """Log a warning if the certificate has expired or expires within `EXPIRY_DAYS`."""
    try:
        end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return  # OpenSSL has just loaded it; the next check reads a file replaced meanwhile
    days = (end - now).days
    if days < EXPIRY_DAYS:
        fields = {"certificate": path, "end": end.isoformat()}
        if end <= now:
            _log.warning("the certificate has expired", extra=fields)
        else:
            _log.warning("the certificate expires soon", extra={**fields, "days": days})


class TlsWatch:
    """Periodic check of the certificate files. Files that cannot be loaded are logged, and the old certificate stays in use."""

    def __init__(self, tls: Tls, look_seconds: float = LOOK_SECONDS, *, renewed: Callable[[], None] = lambda: None) -> None:
        """`renewed` is called after new files were loaded, for listeners that hold their own copy."""
        self._tls, self._look_seconds, self._renewed = tls, look_seconds, renewed
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_seconds, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reload(self) -> None:
        """Load the files even if they have not changed."""
        try:
            self._tls.reload()
        except TlsUnusable as failure:
            # Renewal writes two files in turn. Between the writes they do not match; the next check finds both.
            _log.error("certificate not reloaded", extra={"reason": str(failure)})
        else:
            self._renewed()
            _log.info("certificate reloaded", extra={"certificate": self._tls.settings.certificate})
            warn_of_expiry(self._tls.settings.certificate, datetime.now(UTC))

    def _look(self) -> None:
        if self._tls.has_changed():
            self.reload()
        self.start()
