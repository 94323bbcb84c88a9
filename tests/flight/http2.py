"""A Flight peer that sends the headers of calls and nothing else."""

from __future__ import annotations

import socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _HEADERS = 4, 1
_END_HEADERS = 4
_SERVICE = "/arrow.flight.protocol.FlightService/"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    """Encode a header without indexing and Huffman coding (RFC 7541, 6.2.2). Both strings have at most 126 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class SilentPeer:
    """A connection to a Flight endpoint."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        self._stream = 1

    def call(self, method: str, **headers: str) -> None:
        """Start a call without its first message."""
        shown = {":method": "POST", ":scheme": "http", ":path": _SERVICE + method, ":authority": "test"}
        shown |= {"content-type": "application/grpc", "te": "trailers", **headers}
        self.socket.sendall(_frame(_HEADERS, _END_HEADERS, self._stream, b"".join(_literal(*pair) for pair in shown.items())))
        self._stream += 2

    def is_open(self) -> bool:
        """Return whether the connection is open."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65_536):
                pass
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        return False

    def close(self) -> None:
        self.socket.close()
