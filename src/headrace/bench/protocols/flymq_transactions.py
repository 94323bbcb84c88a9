"""Load for the FlyMQ protocol in transactions: BEGIN, TXN_PRODUCE for each record, COMMIT.

A transaction has to be begun before its records can be sent, since each of them names it. So a connection has several under way, as a
client that does not wait would: the reply to a BEGIN sets off the records of that transaction, its COMMIT, and the BEGIN of a further
one. The records are encoded before the clock starts, with a stand-in where the transaction's name belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.bench.faults import BenchFailed
from headrace.bench.protocols.contract import ConsumePlan
from headrace.bench.protocols.flymq import payload_bytes
from headrace.wire.flymq import Opcode, decode_reply, encode_reply, encode_request
from headrace.wire.flymq.advanced_messages import TxnBegin, TxnBegun, TxnCommit, TxnProduceBatch
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import AUTO, Failure, RecordMetadataBatch, ReplyFrame

UNDER_WAY: Final = 48
"""Transactions of one connection that are sent, and as many begun: together no more than a connection may have open."""
_BEGIN: Final = encode_request(TxnBegin())
_STAND_IN: Final = "\x01"
"""Repeated to the length of a name, it stands in no value and no length."""


def transactions(topic: str, values: Sequence[bytes], records: int, size: int) -> ConsumePlan:
    """How one connection publishes `records` records in transactions of `size`; the meter answers, and counts what is committed."""
    meter = Committed(topic, values, records, size)
    return ConsumePlan(_BEGIN * min(UNDER_WAY, meter.left), meter)


class Committed:
    """Counts the records of committed transactions. The replies to TXN_PRODUCE are passed over by their size, a transaction at a time."""

    def __init__(self, topic: str, values: Sequence[bytes], records: int, size: int) -> None:
        self.count = 0
        self.left = -(-records // size)
        """Transactions that have not been sent."""
        self._topic, self._values, self._size = topic, values, size
        self._last_size = records - (self.left - 1) * size
        self._begins = max(0, self.left - UNDER_WAY)
        """Still to be sent, beyond the first ones."""
        self._sizes: list[int] = []
        """Of the transactions under way, in order."""
        self._templates: dict[tuple[int, int, int], bytes] = {}
        example = encode_reply(Opcode.TXN_PRODUCE, RecordMetadataBatch(topic, [0], [0], [0], [AUTO], [0]))
        self._placed_bytes = len(example)
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
                if frame_bytes != self._placed_bytes:
                    raise BenchFailed(f"flymq: a reply of {frame_bytes} bytes to TXN_PRODUCE, not {self._placed_bytes}")
                block = self._placed_bytes * self._sizes[0]
                self._skip, at = max(0, at + block - end), min(end, at + block)
                continue
            if end - at < frame_bytes:
                break
            answers.append(self._came(head[2], data[at + HEADER_BYTES : at + frame_bytes]))
            at += frame_bytes
        self._held = data[at:]
        return b"".join(answers)

    def _came(self, opcode: int, payload: bytes) -> bytes:
        if opcode == Opcode.TXN_COMMIT:
            self.count += self._sizes.pop(0)
            return b""
        reply = decode_reply(ReplyFrame(opcode, payload))
        if isinstance(reply, TxnBegun):
            return self._transaction(reply.transaction)
        raise BenchFailed(f"flymq: {reply.message}" if isinstance(reply, Failure) else f"flymq: a transaction was answered by {reply}")

    def _transaction(self, id: str) -> bytes:
        self.left -= 1
        size = self._size if self.left else self._last_size
        self._sizes.append(size)
        frames = self._frames(len(id), size).replace(_STAND_IN.encode() * len(id), id.encode())
        if not self._begins:
            return frames
        self._begins -= 1
        return frames + _BEGIN

    def _frames(self, id_bytes: int, size: int) -> bytes:
        """The records of a transaction whose name has so many bytes, and its COMMIT."""
        turns = max(1, len(self._values) // size)
        sort = (id_bytes, size, self.left % turns)
        if sort not in self._templates:
            first, stand_in = sort[2] * size, _STAND_IN * id_bytes
            picked = [self._values[index % len(self._values)] for index in range(first, first + size)]
            run = TxnProduceBatch(stand_in, self._topic, picked)
            self._templates[sort] = encode_request(run) + encode_request(TxnCommit(stand_in))
        return self._templates[sort]
