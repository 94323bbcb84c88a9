"""Load for the RustLog protocol: Produce in batches of 500, Fetch page by page, in either dialect.

The original client uses the binary dialect. The JSON of the specification encodes each byte as a number.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Sequence
from typing import Final

from headrace.bench.children import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan, receive_exactly
from headrace.bench.protocols.meters import Pages, Replies, page_records
from headrace.limits import RUSTLOG_FRAME_BYTES_MAX
from headrace.wire.rustlog import Dialect, ReplyDecoder, encode_request
from headrace.wire.rustlog.codec import LENGTH, frame
from headrace.wire.rustlog.messages import CreateTopic, CreateTopicReply, Fetch, Produce, ProduceReply, Reply

BATCH_RECORDS: Final = 500
_ACCOUNTED_OVERHEAD_BYTES: Final = {Dialect.BINARY: 12, Dialect.JSON: 0}
"""Bytes per record that count against the limit of a Fetch."""
_WIRE_FACTOR: Final = {Dialect.BINARY: 1, Dialect.JSON: 4}
"""Approximate bytes on the wire per byte of a value."""
_OFFSET: Final = struct.Struct(">Q")
_BINARY_FETCHED: Final = 2
_JSON_NEXT_OFFSET: Final = re.compile(rb'"next_offset":([0-9]+)\}\}$')


class RustLogLoad:
    """RustLog in one dialect."""

    batch_records = BATCH_RECORDS
    reads_history = True

    def __init__(self, dialect: Dialect) -> None:
        self.name = "rustlog" if dialect is Dialect.BINARY else f"rustlog-{dialect.value}"
        self._dialect = dialect

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        """Do nothing: RustLog has no handshake."""

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        sock.sendall(encode_request(self._dialect, CreateTopic(topic, 1)))
        head = receive_exactly(sock, LENGTH.size)
        reply = _decoded(receive_exactly(sock, _payload_bytes(head)))
        if not isinstance(reply, CreateTopicReply) or not reply.success:
            raise BenchFailed(f"rustlog: CreateTopic failed: {reply}")

    def subscribe(self, sock: socket.socket, topic: str) -> int:
        return 0

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        size = max(1, min(BATCH_RECORDS, RUSTLOG_FRAME_BYTES_MAX // 2 // (_WIRE_FACTOR[self._dialect] * (len(values[0]) + 1))))
        batches = [values[begin : begin + size] for begin in range(0, len(values), size)]
        return b"".join([encode_request(self._dialect, Produce(topic, 0, batch)) for batch in batches])

    def acks(self, topic: str) -> Produced:
        return Produced()

    def consume(self, topic: str, records: int, value_bytes: int, subscription: int) -> ConsumePlan:
        def request(begin: int, count: int) -> bytes:
            return encode_request(self._dialect, Fetch(topic, 0, begin, fetch_bytes(self._dialect, count, value_bytes)))

        size = page_records(value_bytes * _WIRE_FACTOR[self._dialect])
        meter = Pages(records, size, request, _next_offset, head_bytes=LENGTH.size, rest_bytes=_payload_bytes)
        return ConsumePlan(meter.first_requests(), meter)


class Produced(Replies):
    """Counts the records of each Produce reply. One reply covers hundreds of records, so it is decoded."""

    def __init__(self) -> None:
        super().__init__(LENGTH.size, _payload_bytes, end_bytes=RUSTLOG_FRAME_BYTES_MAX)

    def _on_reply(self, head: bytes, end: bytes) -> bytes:
        reply = _decoded(end)
        if not isinstance(reply, ProduceReply):
            raise BenchFailed(f"rustlog: Produce failed: {reply}")
        self.count += len(reply.offsets)
        return b""


def fetch_bytes(dialect: Dialect, records: int, value_bytes: int) -> int:
    """Return the `max_bytes` of a Fetch that returns `records` records."""
    return records * (value_bytes + _ACCOUNTED_OVERHEAD_BYTES[dialect])


def _payload_bytes(head: bytes) -> int:
    return int(LENGTH.unpack(head)[0])


def _decoded(payload: bytes) -> Reply:
    (reply,) = ReplyDecoder().feed(frame(payload))
    return reply


def _next_offset(head: bytes, end: bytes) -> int:
    """Return the next offset, which is at the end of a page in both dialects."""
    found = _JSON_NEXT_OFFSET.search(end)
    if found is not None:
        return int(found[1])
    if len(end) < _payload_bytes(head) or end[0] == _BINARY_FETCHED:
        return int(_OFFSET.unpack(end[-_OFFSET.size :])[0])
    raise BenchFailed(f"rustlog: Fetch failed: {_decoded(end)}")
