"""The broker's TLS: made from the configuration, and renewed while the broker runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from headrace.net.tls import Tls, TlsSettings, TlsUnusable
from headrace.server.config import Config, TlsVersion

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 3.0
"""How often the files are looked at. A renewed certificate is in use after this, without a signal."""
_VERSIONS: Final = {TlsVersion.V1_2: ssl.TLSVersion.TLSv1_2, TlsVersion.V1_3: ssl.TLSVersion.TLSv1_3}


def tls_of(config: Config) -> Tls | None:
    """What the configuration asks for; None: plain text. Raises `TlsUnusable`."""
    chosen = config.tls
    if not chosen.certificate:
        return None
    return Tls(
        TlsSettings(
            certificate=Path(chosen.certificate),
            key=Path(chosen.key),
            client_ca=Path(chosen.client_ca) if chosen.client_ca else None,
            minimum=_VERSIONS[chosen.minimum],
            optional=chosen.optional,
        )
    )


class TlsWatch:
    """Looks at the certificate files now and then. What cannot be used is reported, and the old certificate goes on."""

    def __init__(self, tls: Tls, look_seconds: float = LOOK_SECONDS) -> None:
        self._tls, self._look_seconds = tls, look_seconds
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
            _log.info("certificate reloaded", extra={"certificate": self._tls.settings.certificate})

    def _look(self) -> None:
        if self._tls.has_changed():
            self.reload()
        self.start()
