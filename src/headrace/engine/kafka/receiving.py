"""Reception of large responses: the frames of a connection of aiokafka, each joined once, and Fetch responses that are not copied.

The library reads a connection through a `StreamReader`, which appends each chunk to one buffer, moves that buffer as it grows, and copies
the response out of it in the end. With responses of megabytes this took a quarter of the CPU time of a read.
"""

from __future__ import annotations

import asyncio
from functools import cache
from io import BytesIO
from typing import Any, Final

from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.types import Array, Bytes, Int32, Schema

_LENGTH_BYTES: Final = 4


class Frames(asyncio.Protocol):
    """Takes the place of the protocol of a connection, which still gets everything except received bytes."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._inner = connection, connection._protocol
        self._chunks: list[bytes] = []
        self._size_bytes = 0
        self._frame_bytes: int | None = None
        """Size of the frame that is being received, without its length; None if it is not known."""

    def data_received(self, received: bytes) -> None:
        self._chunks.append(received)
        self._size_bytes += len(received)
        while self._connection.connected():
            if self._frame_bytes is None:
                if self._size_bytes < _LENGTH_BYTES:
                    return
                start = self._take(_LENGTH_BYTES)
                self._frame_bytes = int.from_bytes(start, "big")
            if self._size_bytes < self._frame_bytes:
                return
            frame_bytes, self._frame_bytes = self._frame_bytes, None
            self._connection._handle_frame(self._take(frame_bytes))

    def _take(self, count: int) -> bytes:
        """Remove the first `count` bytes. Only the last chunk reaches beyond a frame, and only the first one beyond a length."""
        taken: list[bytes] = []
        missing = count
        while missing and len(self._chunks[0]) <= missing:
            missing -= len(self._chunks[0])
            taken.append(self._chunks.pop(0))
        if missing:
            taken.append(self._chunks[0][:missing])
            self._chunks[0] = self._chunks[0][missing:]
        self._size_bytes -= count
        return b"".join(taken)

    def eof_received(self) -> bool | None:
        found: bool | None = self._inner.eof_received()
        return found

    def connection_lost(self, failure: Exception | None) -> None:
        self._inner.connection_lost(failure)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def receive_frames(connection: Any) -> None:
    """Receive the frames of a connection from now on, if it is idle: what is in the buffer of the library belongs to a response."""
    transport = connection._writer.transport
    if not (isinstance(transport.get_protocol(), Frames) or connection._requests or connection._reader._buffer):
        transport.set_protocol(Frames(connection))


class _View(Bytes):  # type: ignore[misc]  # the library has no types
    """Bytes that stay in the response."""

    @classmethod
    def decode(cls, data: BytesIO) -> memoryview | None:
        length, start = Int32.decode(data), data.tell()
        if length < 0:
            return None
        # A view of the bytes that `data` was made of. One of `data` itself would make its end an error that nothing can catch.
        view = memoryview(data.getvalue())[start : start + length]
        if len(view) != length:
            raise ValueError(f"Fetch response: expected {length} bytes of records, got {len(view)}")
        data.seek(start + length)
        return view


class ViewFetchRequest(FetchRequest):  # type: ignore[misc]
    """A Fetch request whose response has views of the records."""

    def build(self, kind: type[Any]) -> Any:
        request = super().build(kind)
        request.RESPONSE_TYPE = _with_views(kind.RESPONSE_TYPE)
        return request


@cache
def _with_views(response: type[Any]) -> type[Any]:
    return type(response.__name__, (response,), {"SCHEMA": _viewing(response.SCHEMA)})


def _viewing(kind: Any) -> Any:
    if isinstance(kind, Schema):
        return Schema(*((name, _viewing(field)) for name, field in zip(kind.names, kind.fields, strict=True)))
    if isinstance(kind, Array):
        return Array(_viewing(kind.array_of))
    return _View if kind is Bytes else kind
