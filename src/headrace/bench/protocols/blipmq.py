"""Load for the BlipMQ protocol: PUBLISH with QoS 1, confirmed by PONGs; POLLs answered by deliveries, which are ACKed.

BlipMQ does not acknowledge a PUBLISH. A PING is answered when all publishes before it are durable, so each chunk ends with a PING whose
id is the number of records before it. A subscription receives records published after it. Its delivery tags count from 1, so all ACKs
are built beforehand, and a redelivery shows in the tags.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from headrace.bench.children import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan, receive_exactly
from headrace.bench.protocols.meters import Acks, Stream
from headrace.wire.blipmq import Decoder, FrameType, Nack, encoder
from headrace.wire.blipmq.frames import HEAD, HEAD_BYTES

POLLS: Final = 1_000
"""POLLs sent together. Twice as many are in flight; the broker allows 5,000 unacknowledged deliveries."""
_REPLY = struct.Struct(">IBQQ")
assert len(encoder.ack(0, 0)) == _REPLY.size


class BlipMqLoad:
    """BlipMQ, QoS 1."""

    name = "blipmq"
    batch_records = 1
    reads_history = False

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        if not key:
            raise BenchFailed("blipmq needs an API key: --blipmq-key file:PATH")
        sock.sendall(encoder.hello(1) + encoder.auth(2, key))
        _accepted(sock)
        _accepted(sock)

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        """Create the topic by subscribing with QoS 0."""
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
    """Counts deliveries. Every `POLLS` deliveries it sends their ACKs and as many POLLs."""

    def __init__(self, records: int, frame_bytes: int, subscription: int) -> None:
        super().__init__(records, frame_bytes, HEAD_BYTES, _check_tag)
        self.polls = encoder.polls(subscription, range(POLLS))
        self._acks = [encoder.acks(subscription, range(first, min(first + POLLS, records + 1))) for first in range(1, records + 1, POLLS)]
        self._acknowledged = 0
        """Chunks of `_acks` that were sent."""
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
    """Return the subscription of an ACK. Raises `BenchFailed` with the text of a NACK."""
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
        raise BenchFailed(f"blipmq: delivery {number + 1} has tag {tag}: a message was redelivered or lost")


def _unexpected(frame: bytes) -> BenchFailed:
    for message in Decoder().feed(frame):
        if isinstance(message, Nack):
            return BenchFailed(f"blipmq: error {message.code}: {message.text}")
    return BenchFailed(f"blipmq: unexpected frame {frame[:HEAD_BYTES].hex()}")
