"""Readiness: the ready file, and notifications to the supervisor of the process.

The ready file tells a supervisor, a test or a script that every listener is open, and its address:

    {"pid": 4711, "protocols": {"tcp": ["127.0.0.1:41123"]}}

The file appears atomically (written under another name, then renamed) and is removed when the broker exits.

Notifications follow systemd's `sd_notify`: `READY=1` when every listener is open, `STOPPING=1` when the broker drains. Each is one
datagram to the socket that `NOTIFY_SOCKET` names. Without that variable nothing is sent.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import ConfigError

_log = logging.getLogger(__name__)


class ReadyFile:
    """One ready file. Every call is idempotent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = False

    def clear(self) -> None:
        """Remove the file of an earlier process, which would report readiness too early."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as failure:
            raise self._failed(failure) from None

    def write(self, protocols: Mapping[str, Sequence[str]]) -> None:
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        content = json.dumps({"pid": os.getpid(), "protocols": {kind: list(addresses) for kind, addresses in protocols.items()}})
        try:
            beside.write_text(content + "\n", encoding="utf-8")
            beside.replace(self._path)
        except OSError as failure:
            raise self._failed(failure) from None
        self._written = True

    def remove(self) -> None:
        """Remove the file that this process wrote. A failure does not stop the exit."""
        if self._written:
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                pass
            self._written = False

    def _failed(self, failure: OSError) -> ConfigError:
        return ConfigError(f"--ready-file {self._path}: {failure.strerror or failure}")


def notify(state: str, environment: Mapping[str, str]) -> None:
    """Send one state. A failure is logged and does not stop the broker."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A leading @ stands for the NUL byte of an abstract address.
    path = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), path)
    except OSError as failure:
        _log.warning("supervisor not notified", extra={"NOTIFY_SOCKET": address, "reason": failure.strerror or failure})
