"""Position in a payload. A module of its own, because it is compiled and `fields.py` cannot be."""

from __future__ import annotations

import struct

from headrace.errors import WireError


class Reader:
    """A position in a payload. Every read checks the remaining bytes first."""

    __slots__ = ("at", "end", "payload")

    def __init__(self, payload: bytes, at: int = 0, end: int | None = None) -> None:
        self.payload = payload
        self.at = at
        self.end = len(payload) if end is None else end

    @property
    def left(self) -> int:
        return self.end - self.at

    def peek(self) -> int:
        """Return the next byte, or -1 at the end."""
        return self.payload[self.at] if self.at < self.end else -1

    def take(self, size: int) -> bytes:
        begin, stop = self.at, self.at + size
        if stop > self.end:
            raise WireError(f"{size} bytes announced, {self.left} left")
        self.at = stop
        return self.payload[begin:stop]

    def unpack(self, layout: struct.Struct) -> int:
        if layout.size > self.left:
            raise WireError(f"{layout.size} bytes expected, {self.left} left")
        (number,) = layout.unpack_from(self.payload, self.at)
        self.at += layout.size
        assert isinstance(number, int)
        return number
