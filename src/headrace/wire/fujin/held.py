"""Base of both decoders: stores the bytes of an incomplete message and joins them once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

from headrace.errors import WireError

MessageT = TypeVar("MessageT")
Found: TypeAlias = tuple[MessageT | None, int] | None
"""A message and its end. None instead of the message: a part of one was decoded. None at all: more bytes are needed."""


class Decoder(Generic[MessageT]):
    """Decoder of one direction. Yields every complete message. It cannot be used after a `WireError`."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 1
        self._skip_bytes = 0
        """Remaining bytes of a value that is too large. They are dropped as they arrive."""
        self._failure: WireError | None = None
        self._is_over = False
        """The rest of the stream cannot be decoded, and the peer has the error."""

    @property
    def held_bytes(self) -> int:
        """Bytes received of an incomplete message."""
        return self._held_bytes

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Yield the messages completed by `data`, in order. Exhaust the iterator before the next call."""
        if self._failure is not None:
            raise self._failure
        if self._is_over:
            return
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes < self._wanted_bytes:
            return
        buffer = data if len(self._held) == 1 else b"".join(self._held)
        self._held, self._held_bytes = [], 0
        yield from self._messages(buffer)

    def _messages(self, buffer: bytes) -> Iterator[MessageT]:
        position, end = 0, len(buffer)
        self._wanted_bytes = 1
        try:
            while position < end and not self._is_over:
                found = self._next(buffer, position)
                if found is None:
                    break
                message, position = found
                if position > end:
                    self._skip_bytes, position = position - end, end
                if message is not None:
                    yield message
        except WireError as failure:
            self._failure = failure
            raise
        if position < end and not self._is_over:
            self._held, self._held_bytes = [buffer[position:]], end - position

    def _need(self, size_bytes: int) -> Found[MessageT]:
        """Do not decode again before this many bytes of the message are received."""
        self._wanted_bytes = size_bytes
        return None

    @abstractmethod
    def _next(self, buffer: bytes, position: int) -> Found[MessageT]:
        """Decode the message at `position`. If it ends after the buffer, the rest of it is dropped."""
