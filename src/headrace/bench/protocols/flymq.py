"""Load for the FlyMQ protocol: PRODUCE with a reply for each, FETCH page by page.

All replies to PRODUCE have the same size and, except for the numbers at the end, the same bytes. They are counted by their bytes, and the
start of the last one in a read is checked.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from headrace.bench.children import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan, receive_exactly
from headrace.bench.protocols.meters import Acks, Pages, page_records
from headrace.wire.flymq import Opcode, decode_reply, encode_reply, encode_request
from headrace.wire.flymq.fetching import RECORD_OVERHEAD_BYTES
from headrace.wire.flymq.framing import HEADER, HEADER_BYTES
from headrace.wire.flymq.messages import (
    AUTO,
    CreateTopic,
    Done,
    Failure,
    Fetch,
    ProduceBatch,
    RecordMetadataBatch,
    Reply,
    ReplyFrame,
    Request,
)

_OFFSET: Final = struct.Struct(">Q")


class FlyMqLoad:
    """FlyMQ, the dialect of the specification, records without keys."""

    name = "flymq"
    batch_records = 1
    reads_history = True

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        """Do nothing: FlyMQ without a login has no handshake."""

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        reply = call(sock, CreateTopic(topic, 1))
        if not isinstance(reply, Done) or not reply.success:
            raise BenchFailed(f"flymq: CREATE_TOPIC failed: {reply}")

    def subscribe(self, sock: socket.socket, topic: str) -> int:
        return 0

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        return encode_request(ProduceBatch(topic, list(values)))

    def acks(self, topic: str) -> Acks:
        example = encode_reply(Opcode.PRODUCE, RecordMetadataBatch(topic, [0], [0], [0], [AUTO], [0]))
        front = example[: example.index(topic.encode()) + len(topic.encode())]

        def counted(frame: bytes, number: int) -> int:
            if not frame.startswith(front):
                raise BenchFailed(f"flymq: expected RecordMetadata, got {frame!r}")
            return number + 1

        return Acks(len(example), counted)

    def consume(self, topic: str, records: int, value_bytes: int, subscription: int) -> ConsumePlan:
        def request(begin: int, count: int) -> bytes:
            return encode_request(Fetch(topic, 0, begin, count))

        size = page_records(value_bytes + RECORD_OVERHEAD_BYTES)
        meter = Pages(records, size, request, _next_offset, head_bytes=HEADER_BYTES, rest_bytes=payload_bytes)
        return ConsumePlan(meter.first_requests(), meter)


def call(sock: socket.socket, request: Request) -> Reply:
    """Send one request on a blocking socket and return its reply. Raises `BenchFailed` for an error."""
    sock.sendall(encode_request(request))
    head = receive_exactly(sock, HEADER_BYTES)
    reply = decode_reply(ReplyFrame(head[2], receive_exactly(sock, payload_bytes(head))))
    if isinstance(reply, Failure):
        raise BenchFailed(f"flymq: {reply.message}")
    return reply


def payload_bytes(head: bytes) -> int:
    return int(HEADER.unpack(head)[4])


def _next_offset(head: bytes, end: bytes) -> int:
    """Return the next offset, which is the last field of a page."""
    opcode = head[2]
    if opcode == Opcode.FETCH:
        return int(_OFFSET.unpack(end[-_OFFSET.size :])[0])
    reply = decode_reply(ReplyFrame(opcode, end)) if opcode == Opcode.ERROR else None
    raise BenchFailed(
        f"flymq: {reply.message}" if isinstance(reply, Failure) else f"flymq: expected a reply to FETCH, got opcode {opcode:#04x}"
    )
