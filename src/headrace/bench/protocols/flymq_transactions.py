"""Load for the FlyMQ protocol in transactions: BEGIN, TXN_PRODUCE for each record, COMMIT.

Each record names its transaction, so its records can be sent only after the reply to BEGIN. Therefore a connection has several transactions
in flight: the reply to a BEGIN triggers the records of that transaction, its COMMIT, and the next BEGIN. The records are encoded before
the clock starts, with a placeholder for the transaction id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.bench.errors import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan
from headrace.bench.protocols.flymq import payload_bytes
from headrace.wire.flymq import Opcode, decode_reply, encode_reply, encode_request
from headrace.wire.flymq.advanced_messages import TxnBegin, TxnBegun, TxnCommit, TxnProduceBatch
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import AUTO, Failure, RecordMetadataBatch, ReplyFrame

IN_FLIGHT: Final = 48
"""Transactions of one connection with records sent, and as many begun: together at most the limit of a connection."""
_BEGIN: Final = encode_request(TxnBegin())
_PLACEHOLDER: Final = "\x01"
"""Repeated to the length of an id. It occurs in no value and no length field."""


def transactions(topic: str, values: Sequence[bytes], records: int, size: int) -> ConsumePlan:
    """Plan to publish `records` records in transactions of `size`. The meter sends the records and counts committed ones."""
    meter = Committed(topic, values, records, size)
    return ConsumePlan(_BEGIN * min(IN_FLIGHT, meter.left), meter)


class Committed:
    """Counts the records of committed transactions. The replies to TXN_PRODUCE are skipped by their size, one transaction at a time."""

    def __init__(self, topic: str, values: Sequence[bytes], records: int, size: int) -> None:
        self.count = 0
        self.left = -(-records // size)
        """Transactions that have not been sent."""
        self._topic, self._values, self._size = topic, values, size
        self._last_size = records - (self.left - 1) * size
        self._begins = max(0, self.left - IN_FLIGHT)
        """BEGINs not sent yet."""
        self._sizes: list[int] = []
        """Sizes of the transactions in flight, in order."""
        self._templates: dict[tuple[int, int, int], bytes] = {}
        example = encode_reply(Opcode.TXN_PRODUCE, RecordMetadataBatch(topic, [0], [0], [0], [AUTO], [0]))
        self._metadata_bytes = len(example)
        self._skip = 0
        self._held = b""

    def feed(self, received: bytearray, size: int) -> bytes:
        answers, at = [], min(self._skip, size)
        self._skip -= at
        data = self._held + received[at:size]
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            head = data[at : at + HEADER_BYTES]
            frame_bytes = HEADER_BYTES + payload_bytes(head)
            if head[2] == Opcode.TXN_PRODUCE:
                if frame_bytes != self._metadata_bytes:
                    raise BenchFailed(f"flymq: TXN_PRODUCE reply: expected {self._metadata_bytes} bytes, got {frame_bytes}")
                block = self._metadata_bytes * self._sizes[0]
                self._skip, at = max(0, at + block - end), min(end, at + block)
                continue
            if end - at < frame_bytes:
                break
            answers.append(self._on_reply(head[2], data[at + HEADER_BYTES : at + frame_bytes]))
            at += frame_bytes
        self._held = data[at:]
        return b"".join(answers)

    def _on_reply(self, opcode: int, payload: bytes) -> bytes:
        if opcode == Opcode.TXN_COMMIT:
            self.count += self._sizes.pop(0)
            return b""
        reply = decode_reply(ReplyFrame(opcode, payload))
        if isinstance(reply, TxnBegun):
            return self._transaction(reply.transaction)
        raise BenchFailed(f"flymq: {reply.message}" if isinstance(reply, Failure) else f"flymq: unexpected reply to a transaction: {reply}")

    def _transaction(self, id: str) -> bytes:
        self.left -= 1
        size = self._size if self.left else self._last_size
        self._sizes.append(size)
        frames = self._frames(len(id), size).replace(_PLACEHOLDER.encode() * len(id), id.encode())
        if not self._begins:
            return frames
        self._begins -= 1
        return frames + _BEGIN

    def _frames(self, id_bytes: int, size: int) -> bytes:
        """Encode the records of a transaction whose id has `id_bytes` bytes, and its COMMIT."""
        turns = max(1, len(self._values) // size)
        variant = (id_bytes, size, self.left % turns)
        if variant not in self._templates:
            first, placeholder = variant[2] * size, _PLACEHOLDER * id_bytes
            picked = [self._values[index % len(self._values)] for index in range(first, first + size)]
            produce = TxnProduceBatch(placeholder, self._topic, picked)
            self._templates[variant] = encode_request(produce) + encode_request(TxnCommit(placeholder))
        return self._templates[variant]
