"""Notifications to the supervisor of the process, in the protocol of systemd's `sd_notify`.

    READY=1       every listener is open
    STOPPING=1    the broker drains

Each is one datagram to the socket that `NOTIFY_SOCKET` names. Without that variable nothing is sent.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

_log = logging.getLogger(__name__)


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
        _log.warning("NOTIFY_SOCKET %s: %s", address, failure.strerror or failure)
