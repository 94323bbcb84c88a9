"""Figg client independent of the code under test: blocking sockets and six structs, written from the specification."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import ClassVar, Final, TypeAlias

ATTACH, ATTACHED, PUBLISH, ACK, DATA, PING, PONG = 1, 2, 5, 6, 7, 8, 9
VERSION: Final = 1
FROM_OFFSET: Final = 0x8000

_FRAME, _LENGTH, _NUMBER, _FLAGS = struct.Struct(">HHI"), struct.Struct(">I"), struct.Struct(">Q"), struct.Struct(">H")


def _frame(kind: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, VERSION, len(payload)) + payload


def _text(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


Numbered: TypeAlias = tuple[str, int, bytes]
"""(topic, number, value) of a message to publish; the client assigns ascending numbers."""


def publish(topic: str, number: int, value: bytes) -> bytes:
    return _frame(PUBLISH, _text(topic.encode()) + _NUMBER.pack(number) + _text(value))


class Peer:
    """One connection. Raises `ConnectionError` when it breaks and `TimeoutError` when the broker is silent."""

    NAME: ClassVar = "figg"
    IS_QUIC: ClassVar = False

    def __init__(self, address: tuple[str, int], *, timeout: float = 10.0) -> None:
        self._socket = socket.create_connection(address, timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def publish(self, values: Sequence[Numbered]) -> None:
        """Publish; the sequence number on the wire is the client's number."""
        self.send(b"".join(publish(*numbered) for numbered in values))

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield (kind, payload) of complete frames, after waiting for some bytes if there is none."""
        while not self._whole():
            self._more()
        position = 0
        while size := self._whole(position):
            kind, _, _ = _FRAME.unpack_from(self._received, position)
            yield kind, bytes(self._received[position + _FRAME.size : position + size])
            position += size
        del self._received[:position]

    def _more(self) -> None:
        received = self._socket.recv(1 << 18)
        if not received:
            raise ConnectionError("the broker closed the connection")
        self._received += received

    def _whole(self, position: int = 0) -> int:
        if len(self._received) - position < _FRAME.size:
            return 0
        _, _, size = _FRAME.unpack_from(self._received, position)
        return _FRAME.size + size if len(self._received) - position >= _FRAME.size + size else 0

    def acknowledged(self) -> int:
        """Wait for acknowledgements and return the highest number received."""
        highest = -1
        while highest < 0:
            for kind, payload in self.frames():
                if kind == ACK:
                    highest = max(highest, _NUMBER.unpack(payload)[0])
        return highest

    def ping(self) -> None:
        """Make a round trip."""
        self.send(_frame(PING, _NUMBER.pack(7)))
        while not any(kind == PONG for kind, _ in self.frames()):
            pass

    def drain(self, topic: str) -> list[bytes]:
        """Read all values of the topic. The offset of a value points to the next one, which reveals gaps."""
        name = topic.encode()
        self.send(_frame(ATTACH, _FLAGS.pack(0) + _text(name) + _NUMBER.pack(0)))
        end = next(_NUMBER.unpack(payload[-8:])[0] for kind, payload in self._until(ATTACHED) if kind == ATTACHED)
        self.send(_frame(ATTACH, _FLAGS.pack(FROM_OFFSET) + _text(name) + _NUMBER.pack(0)))
        values: list[bytes] = []
        while len(values) < end:
            for kind, payload in self.frames():
                if kind == DATA:
                    start = _LENGTH.size + len(name)
                    (offset,) = _NUMBER.unpack_from(payload, start)
                    values.append(payload[start + _NUMBER.size + _LENGTH.size :])
                    if offset != len(values):
                        raise AssertionError(f"{topic}: offset {offset} came where {len(values)} was due")
        return values

    def _until(self, wanted: int) -> list[tuple[int, bytes]]:
        while True:
            found = list(self.frames())
            if any(kind == wanted for kind, _ in found):
                return found
