"""What both decoders do alike: keep the bytes of a message that is not whole, and join them once, when it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

from headrace.errors import WireError

MessageT = TypeVar("MessageT")
Found: TypeAlias = tuple[MessageT | None, int] | None
"""A message and where it ends; None instead of the message: a part of one was taken; None at all: more bytes are needed."""


class Decoder(Generic[MessageT]):
    """Feed it what the stream gave; it yields every message that is whole. After a `WireError` it refuses to go on."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 1
        self._skip_bytes = 0
        """Of a value that was refused: they are dropped as they come."""
        self._failure: WireError | None = None
        self._is_over = False
        """Nothing that follows can be understood, and the peer has been told."""

    @property
    def held_bytes(self) -> int:
        """What waits for the rest of its message."""
        return self._held_bytes

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """The messages completed by `data`, in order. To be exhausted before the next call."""
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
        """The message at hand takes at least so many bytes: do not look again before they are there."""
        self._wanted_bytes = size_bytes
        return None

    @abstractmethod
    def _next(self, buffer: bytes, position: int) -> Found[MessageT]:
        """The message at `position`. One that ends behind the buffer was refused: the rest of it is dropped."""
