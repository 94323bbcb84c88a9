"""Load for the Figg door: PUBLISH answered by cumulative ACKs, ATTACH answered by a stream of DATA.

An ACK covers every sequence number up to its own, so only the last one of a read is looked at. All DATA frames of a run have the
same size, so a consumer only counts bytes, and looks at the offset of the last frame to see that nothing was left out.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from headrace.bench.doors.contract import ConsumePlan
from headrace.bench.faults import BenchFailed
from headrace.wire.figg import encode
from headrace.wire.figg.frames import NUMBER, SIZE, Kind

_ACK_FRAME = struct.Struct(">HHIQ")
assert len(encode.ack(0)) == _ACK_FRAME.size


class FiggLoad:
    """Figg: no handshake, one sequence of numbers per connection."""

    name = "figg"

    def handshake(self, sock: socket.socket) -> None:
        """Figg has none."""

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        return encode.publish(topic, range(first, first + len(values)), values)

    def acks(self) -> AckMeter:
        return AckMeter()

    def consume(self, topic: str, records: int, value_bytes: int) -> ConsumePlan:
        frame_bytes = len(encode.data(topic, [0], [bytes(value_bytes)]))
        meter = StreamMeter(records, value_bytes, frame_bytes, skipped_bytes=len(encode.attached(topic, 0)))
        return ConsumePlan(encode.attach(topic, 0), meter)


class AckMeter:
    """Counts by the sequence number in the last whole ACK."""

    def __init__(self) -> None:
        self.count = 0
        self._tail = b""
        self._odd_bytes = 0
        """Of an ACK that has not come whole yet."""

    def feed(self, received: bytearray, size: int) -> bytes:
        frame = _ACK_FRAME.size
        self._odd_bytes = (self._odd_bytes + size) % frame
        self._tail = (self._tail + received[max(0, size - 2 * frame) : size])[-2 * frame :]
        end = len(self._tail) - self._odd_bytes
        if end >= frame:
            kind, _version, _size, seq = _ACK_FRAME.unpack_from(self._tail, end - frame)
            if kind != Kind.ACK:
                raise BenchFailed(f"figg: message type {kind} where an ACK was expected")
            self.count = seq + 1
        return b""


class StreamMeter:
    """Counts DATA by bytes, after the ATTACHED that goes before it."""

    def __init__(self, records: int, value_bytes: int, frame_bytes: int, *, skipped_bytes: int) -> None:
        self._records, self._frame_bytes, self._skipped_bytes = records, frame_bytes, skipped_bytes
        self._offset_at = value_bytes + SIZE.size + NUMBER.size
        """Where the offset stands, counted from the end of a frame."""
        self._bytes = 0
        self._tail = b""

    @property
    def count(self) -> int:
        return max(0, self._bytes - self._skipped_bytes) // self._frame_bytes

    def feed(self, received: bytearray, size: int) -> bytes:
        self._bytes += size
        left = self._skipped_bytes + self._records * self._frame_bytes - self._bytes
        if left <= self._frame_bytes:
            self._tail = (self._tail + received[max(0, size - self._frame_bytes) : size])[-self._frame_bytes :]
        if left < 0:
            raise BenchFailed(f"figg: {-left} bytes more than {self._records} records")
        if left == 0:
            self._check_last()
        return b""

    def _check_last(self) -> None:
        """Figg names the offset *after* a record: the last of n records from the start carries n."""
        (offset,) = NUMBER.unpack_from(self._tail, len(self._tail) - self._offset_at)
        if offset != self._records:
            raise BenchFailed(f"figg: the last of {self._records} records carries offset {offset}")
