"""Frames: a length and a payload, in both dialects and both directions.

    0          4
    +----------+-----------+
    | length   | payload   |     length counts the payload, 1 to 10,485,760; big-endian
    | u32      |           |
    +----------+-----------+

The length is judged as soon as its four bytes are in; nothing is ever reserved for it. A wrong one ends the stream, because
nobody can know where the next frame begins.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from headrace.limits import RUSTLOG_FRAME_BYTES_MAX

LENGTH = struct.Struct(">I")
assert LENGTH.size == 4, "the drawing says 4"


@dataclass(slots=True)
class BadLength:
    """The length word that ended the stream."""

    length: int


class FrameReader:
    """Cuts a stream into payloads, however it arrives."""

    __slots__ = ("_held", "_needed", "ended")

    def __init__(self) -> None:
        self._held = bytearray()
        self._needed = 0
        self.ended = False

    @property
    def held_bytes(self) -> int:
        """What waits for the rest of its frame."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes | BadLength]:
        """The payloads that are now complete. After a `BadLength`, always the last, there are no more."""
        if self.ended:
            return []
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return []
            data = bytes(self._held)
            self._held.clear()
        payloads: list[bytes | BadLength] = []
        at, end = 0, len(data)
        self._needed = LENGTH.size
        while end - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if not 1 <= length <= RUSTLOG_FRAME_BYTES_MAX:
                self.ended = True
                payloads.append(BadLength(length))
                return payloads
            start = at + LENGTH.size
            if end - start < length:
                self._needed = LENGTH.size + length
                break
            at = start + length
            payloads.append(data[start:at])
        self._held += data[at:]
        return payloads


def frame(payload: bytes) -> bytes:
    """One frame; the payload's size is the caller's promise."""
    assert 1 <= len(payload) <= RUSTLOG_FRAME_BYTES_MAX
    return LENGTH.pack(len(payload)) + payload
