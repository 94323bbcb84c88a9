"""Load for the FlyMQ protocol in JSON: to a topic that requires a JSON Schema, or, to compare, to one that does not."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Final

from headrace.bench.faults import BenchFailed
from headrace.bench.protocols.contract import receive_exactly
from headrace.bench.protocols.flymq import FlyMqLoad, payload_bytes
from headrace.wire.flymq import decode_reply, encode_request
from headrace.wire.flymq.advanced_messages import BrokerCall
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import Failure, ProduceBatch, ReplyFrame, Request
from headrace.wire.flymq.schema_messages import RegisterSchema, SchemaWord

_NAME: Final = "bench"
_SCHEMA: Final = {
    "type": "object",
    "required": ["id", "name"],
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "maxLength": 40},
        "price": {"type": "number"},
        "note": {"type": "string"},
    },
    "additionalProperties": False,
}


class FlyMqJsonLoad(FlyMqLoad):
    """Values are JSON objects of the size asked for, or of the least there is."""

    def __init__(self, *, required: bool) -> None:
        self._required = required

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        super().open_topic(sock, topic)
        if self._required:
            _ask(sock, RegisterSchema(_NAME, SchemaWord("json"), json.dumps(_SCHEMA).encode()))
            _ask(sock, BrokerCall("schema.require", json.dumps({"topic": topic, "name": _NAME}).encode()))

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        return encode_request(ProduceBatch(topic, [_object(first + index, len(value)) for index, value in enumerate(values)]))


def _object(number: int, size: int) -> bytes:
    start = b'{"id":%d,"name":"article %d","price":12.5,"note":"' % (number, number % 1_000)
    return start + b"x" * (size - len(start) - 2) + b'"}'


def _ask(sock: socket.socket, request: Request) -> None:
    sock.sendall(encode_request(request))
    head = receive_exactly(sock, HEADER_BYTES)
    reply = decode_reply(ReplyFrame(head[2], receive_exactly(sock, payload_bytes(head))))
    if isinstance(reply, Failure):
        raise BenchFailed(f"flymq: {reply.message}")
