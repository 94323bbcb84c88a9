"""Load for the BlipMQ protocol: PUBLISH with QoS 1, confirmed by PONGs; POLLs answered by deliveries, which are ACKed.

BlipMQ does not answer a PUBLISH. A PING is answered when all publishes before it are durable, so each piece that is sent ends with
one, whose id is the number of records before it. A subscription sees what is published after it. Its delivery tags count from 1, so
all ACKs are built beforehand, and a delivery that came twice would show in the tags.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from headrace.bench.faults import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan, receive_exactly
from headrace.bench.protocols.meters import Acks, Stream
from headrace.wire.blipmq import Decoder, FrameType, Nack, encoder
from headrace.wire.blipmq.frames import HEAD, HEAD_BYTES

POLLS: Final = 1_000
"""POLLs sent in one go; twice as many are under way, of the 5,000 deliveries that may wait for their ACK."""
_REPLY = struct.Struct(">IBQQ")
assert len(encoder.ack(0, 0)) == _REPLY.size


class BlipMqLoad:
    """BlipMQ, QoS 1."""

    name = "blipmq"
    batch_records = 1
    reads_history = False

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        if not key:
            raise BenchFailed("blipmq asks for an API key: --blipmq-key file:PATH")
        sock.sendall(encoder.hello(1) + encoder.auth(2, key))
        _accepted(sock)
        _accepted(sock)

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        """Subscribing makes a topic, too. With QoS 0 it costs the broker a number."""
        sock.sendall(encoder.subscribe(3, topic, 0))
        _accepted(sock)

    def subscribe(self, sock: socket.socket, topic: str) -> int:
        sock.sendall(encoder.subscribe(4, topic, 1))
        return _accepted(sock)

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        end = first + len(values)
        return encoder.publishes(1, topic, range(first, end), values) + encoder.ping(end)

    def acks(self, topic: str) -> Acks:
        return Acks(HEAD_BYTES, _confirmed)

    def consume(self, topic: str, records: int, value_bytes: int, subscription: int) -> ConsumePlan:
        frame_bytes = len(encoder.publishes(1, topic, [0], [bytes(value_bytes)]))
        meter = Polls(records, frame_bytes, subscription)
        return ConsumePlan(meter.polls * 2, meter)


class Polls(Stream):
    """Counts deliveries. When as many have come as are polled for in one go, they are acknowledged and as many POLLs follow."""

    def __init__(self, records: int, frame_bytes: int, subscription: int) -> None:
        super().__init__(records, frame_bytes, HEAD_BYTES, _check_tag)
        self.polls = encoder.polls(subscription, range(POLLS))
        self._acks = [encoder.acks(subscription, range(first, min(first + POLLS, records + 1))) for first in range(1, records + 1, POLLS)]
        self._acknowledged = 0
        """Of the pieces in `_acks`."""
        self._polled = 2 * POLLS

    def feed(self, received: bytearray, size: int) -> bytes:
        super().feed(received, size)
        whole = self.count // POLLS if self.count < self._records else len(self._acks)
        answers = []
        for acks in self._acks[self._acknowledged : whole]:
            answers.append(acks)
            if self._polled < self._records:
                answers.append(self.polls)
                self._polled += POLLS
        self._acknowledged = whole
        return b"".join(answers)


def _accepted(sock: socket.socket) -> int:
    """The subscription in an ACK; a NACK ends the run in its own words."""
    head = receive_exactly(sock, HEAD_BYTES)
    length, kind, _cid = HEAD.unpack(head)
    reply = head + receive_exactly(sock, length + 4 - HEAD_BYTES)
    if kind != FrameType.ACK:
        raise _unexpected(reply)
    return int(_REPLY.unpack(reply)[3])


def _confirmed(frame: bytes, _number: int) -> int:
    _length, kind, cid = HEAD.unpack(frame)
    if kind != FrameType.PONG:
        raise _unexpected(frame)
    return int(cid)


def _check_tag(head: bytes, number: int) -> None:
    _length, kind, tag = HEAD.unpack(head)
    if kind != FrameType.PUBLISH:
        raise _unexpected(head)
    if tag != number + 1:
        raise BenchFailed(f"blipmq: delivery {number + 1} carries tag {tag}: a message came again, or was left out")


def _unexpected(frame: bytes) -> BenchFailed:
    for message in Decoder().feed(frame):
        if isinstance(message, Nack):
            return BenchFailed(f"blipmq: refused with {message.code}: {message.text}")
    return BenchFailed(f"blipmq: a frame that was not expected begins with {frame[:HEAD_BYTES].hex()}")
