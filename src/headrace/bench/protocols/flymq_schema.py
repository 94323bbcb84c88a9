"""Load for the FlyMQ protocol with JSON values, to a topic with or without a required JSON Schema."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Final

from headrace.bench.protocols.flymq import FlyMqLoad, call
from headrace.wire.flymq import encode_request
from headrace.wire.flymq.advanced_messages import BrokerCall
from headrace.wire.flymq.messages import ProduceBatch
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
    """Values are JSON objects of the requested size, or of the minimum size."""

    def __init__(self, *, required: bool) -> None:
        self._required = required

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        super().open_topic(sock, topic)
        if self._required:
            call(sock, RegisterSchema(_NAME, SchemaWord("json"), json.dumps(_SCHEMA).encode()))
            call(sock, BrokerCall("schema.require", json.dumps({"topic": topic, "name": _NAME}).encode()))

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        return encode_request(ProduceBatch(topic, [_object(first + index, len(value)) for index, value in enumerate(values)]))


def _object(number: int, size: int) -> bytes:
    start = b'{"id":%d,"name":"article %d","price":12.5,"note":"' % (number, number % 1_000)
    return start + b"x" * (size - len(start) - 2) + b'"}'
