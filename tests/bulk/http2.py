"""A Flight peer that says as little as HTTP/2 allows: headers of calls, and then nothing."""

from __future__ import annotations

import socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _HEADERS = 4, 1
_END_HEADERS = 4
_SERVICE = "/arrow.flight.protocol.FlightService/"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    """A header without indexing and without Huffman (RFC 7541, 6.2.2); neither text is longer than 126 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class SilentPeer:
    """A connection to a Flight endpoint."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
        self._stream = 1

    def call(self, method: str, **headers: str) -> None:
        """Begin a call, and never send its first message."""
        shown = {":method": "POST", ":scheme": "http", ":path": _SERVICE + method, ":authority": "test"}
        shown |= {"content-type": "application/grpc", "te": "trailers", **headers}
        self.socket.sendall(_frame(_HEADERS, _END_HEADERS, self._stream, b"".join(_literal(*pair) for pair in shown.items())))
        self._stream += 2

    def is_open(self) -> bool:
        """Whether the other side has not ended the connection."""
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
