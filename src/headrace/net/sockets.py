"""The socket of a TCP connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Final, Self

_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # The kernel detects a dead peer machine within two minutes.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_TCP_ESTABLISHED, _TCP_SYN_RECEIVED = 1, 3
"""Linux TCP states in which the peer may still send."""


class BorrowedSocket(socket.socket):
    """A socket object for the descriptor of a transport, which alone closes it. That of uvloop takes 8 µs to set an option, because it
    creates a socket object each time."""

    @classmethod
    def of(cls, transport: asyncio.Transport) -> Self:
        own = transport.get_extra_info("socket")
        return cls(own.family, own.type, own.proto, fileno=own.fileno())

    def __del__(self) -> None:
        self.detach()

    def set_options(self) -> None:
        for level, option, value in _OPTIONS:
            self.setsockopt(level, option, value)

    @property
    def has_peer_left(self) -> bool:
        """Whether the peer has closed its side. False where the system cannot tell."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        try:
            state = self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state not in (_TCP_ESTABLISHED, _TCP_SYN_RECEIVED)
