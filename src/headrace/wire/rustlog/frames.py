"""Frames: a length and a payload, in both dialects and both directions.

    0          4
    +----------+-----------+
    | length   | payload   |     length counts the payload, 1 to 10,485,760; big-endian
    | u32      |           |
    +----------+-----------+

The reader checks the length as soon as its four bytes are received and allocates nothing for it. A wrong length ends the stream, because
the start of the next frame is unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from headrace.limits import RUSTLOG_FRAME_BYTES_MAX, RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX

LENGTH = struct.Struct(">I")
assert LENGTH.size == 4, "the drawing says 4"


@dataclass(slots=True)
class BadLength:
    """The length word that ended the stream, and the largest length the peer may send."""

    length: int
    length_max: int = RUSTLOG_FRAME_BYTES_MAX


class FrameReader:
    """Splits a stream into payloads. `has_rights` is called for every frame above `RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX`."""

    __slots__ = ("_has_rights", "_held", "_needed", "ended")

    def __init__(self, has_rights: Callable[[], bool] = lambda: True) -> None:
        self._has_rights = has_rights
        self._held = bytearray()
        self._needed = 0
        self.ended = False

    @property
    def held_bytes(self) -> int:
        """Bytes received of a frame that is not complete."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes | BadLength]:
        """Return the payloads that are complete. A `BadLength` is always the last one."""
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
            length_max = self._length_max(length)
            if not 1 <= length <= length_max:
                self.ended = True
                payloads.append(BadLength(length, length_max))
                return payloads
            start = at + LENGTH.size
            if end - start < length:
                self._needed = LENGTH.size + length
                break
            at = start + length
            payloads.append(data[start:at])
        self._held += data[at:]
        return payloads

    def _length_max(self, length: int) -> int:
        if length <= RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX or self._has_rights():
            return RUSTLOG_FRAME_BYTES_MAX
        return RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX


def frame(payload: bytes) -> bytes:
    """Return one frame. The caller guarantees the size of the payload."""
    assert 1 <= len(payload) <= RUSTLOG_FRAME_BYTES_MAX
    return LENGTH.pack(len(payload)) + payload
