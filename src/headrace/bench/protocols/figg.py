"""Load for the Figg protocol: PUBLISH answered by cumulative ACKs, ATTACH answered by a stream of DATA.

An ACK covers every sequence number up to its own, so only the last one of a read is decoded. All DATA frames have the same size, so a
consumer only counts bytes and checks the offset of the last frame.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from headrace.bench.children import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan, receive_exactly
from headrace.bench.protocols.meters import Acks, Stream
from headrace.wire.figg import encode
from headrace.wire.figg.frames import NUMBER, SIZE, Kind

_ACK_FRAME = struct.Struct(">HHIQ")
assert len(encode.ack(0)) == _ACK_FRAME.size


class FiggLoad:
    """Figg: no handshake, one sequence of numbers per connection."""

    name = "figg"
    batch_records = 1
    reads_history = True

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        """Do nothing: Figg has no handshake."""

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        """Create the topic by attaching to it."""
        sock.sendall(encode.attach(topic, 0))
        receive_exactly(sock, len(encode.attached(topic, 0)))
        sock.sendall(encode.detach(topic))
        receive_exactly(sock, len(encode.detached(topic)))

    def subscribe(self, sock: socket.socket, topic: str) -> int:
        return 0

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        return encode.publish(topic, range(first, first + len(values)), values)

    def acks(self, topic: str) -> Acks:
        return Acks(_ACK_FRAME.size, _acknowledged)

    def consume(self, topic: str, records: int, value_bytes: int, subscription: int) -> ConsumePlan:
        frame_bytes = len(encode.data(topic, [0], [bytes(value_bytes)]))
        head_bytes = frame_bytes - value_bytes - SIZE.size
        meter = Stream(records, frame_bytes, head_bytes, _check_offset, skipped_bytes=len(encode.attached(topic, 0)))
        return ConsumePlan(encode.attach(topic, 0), meter)


def _acknowledged(frame: bytes, _number: int) -> int:
    kind, _version, _size, seq = _ACK_FRAME.unpack(frame)
    if kind != Kind.ACK:
        raise BenchFailed(f"figg: expected an ACK, got message type {kind}")
    return int(seq) + 1


def _check_offset(head: bytes, number: int) -> None:
    """Check the offset of a record. Figg sends the offset *after* a record: the first record has 1."""
    (offset,) = NUMBER.unpack(head[-NUMBER.size :])
    if offset != number + 1:
        raise BenchFailed(f"figg: expected offset {number + 1}, got {offset}")
