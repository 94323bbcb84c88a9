"""The worst known input of every request type: what costs the broker most for the bytes that are sent.

Each table has a row for every request type of its protocol, and a test fails where one is missing. A request type in a `PLAIN` set has no
worse input than the generic ones: very many of them, a payload of garbage, and (FlyMQ) a compressed payload that grows a thousandfold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

from headrace.limits import FLYMQ_PAYLOAD_BYTES_MAX
from headrace.wire import blipmq, figg, fujin
from headrace.wire.flymq import Opcode, encode_request
from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import messages as m
from headrace.wire.flymq import schema_messages as sc
from headrace.wire.flymq.framing import BINARY, GZIP, deflate, frame
from headrace.wire.rustlog import messages as r
from tests.access.test_matrix import FLYMQ, FLYMQ_ADMIN, FLYMQ_FREE
from tests.access.test_protocol_matrix import BLIPMQ, FIGG, FUJIN, RUSTLOG
from tests.sessions.fujin.support import cid

TOPIC: Final = "public"
"""Has a schema of the same name, and `LARGE` beside it."""
LARGE: Final = "team.x"
"""A topic of 300 KB."""
SCHEMA: Final = b'{"items":{"type":"string"}}'
PIPELINED_BYTES: Final = 4 * 1024
GARBAGE_BYTES: Final = 64 * 1024
WRONG_EVERYWHERE: Final = b"[" + b"0," * (1 << 20) + b"0]"
NESTED: Final = b"[" * 100_000
PATTERNS: Final = json.dumps({"allOf": [{"pattern": "(a{1,50}){1,50}" + str(number)} for number in range(300)]}).encode()
ENUMERATION: Final = json.dumps({"enum": list(range(40_000))}).encode()

# FlyMQ

FLYMQ_PLAIN: Final = frozenset(
    [
        *(0x02, 0x03, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0A, 0x11, 0x12, 0x15, 0x20, 0x21, 0x22, 0x30, 0x31, 0x35),
        *(0x40, 0x41, 0x42, 0x43, 0x50, 0x51, 0x52, 0x53),
        *(0x60, 0x61, 0x62, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6A, 0x72, 0x73, 0x74, 0x75),
        *(0x76, 0x77, 0x78, 0x79, 0x7A, 0x7B, 0x7C, 0x7D, 0x80, 0x81, 0xA0, 0xA1),
    ]
)
FLYMQ_WORST: Final[dict[int, list[Callable[[], bytes]]]] = {
    0x01: [
        lambda: encode_request(m.ProduceBatch(TOPIC, [b""] * 5_000)),
        lambda: (encode_request(m.ProduceBatch(TOPIC, [b"x"])) + encode_request(m.ProduceBatch(LARGE, [b"x"]))) * 1_000,
    ],
    0x07: [lambda: encode_request(m.Fetch(LARGE, 0, 0, 1, "n(o|0)thing+x")), lambda: encode_request(m.Fetch(LARGE, 0, 0, 1, "$.a.b.c"))],
    0x0B: [lambda: encode_request(m.FetchBinary(LARGE, 0, 0, 1 << 30))],
    0x10: [
        lambda: encode_request(sc.RegisterSchema("new", sc.SchemaWord("json"), PATTERNS)),
        lambda: encode_request(sc.RegisterSchema("new", sc.SchemaWord("avro"), NESTED)),
    ],
    0x13: [lambda: encode_request(sc.ValidateSchema(TOPIC, WRONG_EVERYWHERE)), lambda: encode_request(sc.ValidateSchema(TOPIC, NESTED))],
    0x14: [lambda: encode_request(sc.ProduceWithSchema(TOPIC, TOPIC, WRONG_EVERYWHERE))],
    0x70: [lambda: encode_request(a.Auth("u" * 60_000, "p" * 60_000))],
    int(Opcode.ACCESS): [lambda: encode_request(a.AccessCall("rule.check", NESTED))],
    int(Opcode.BROKER): [
        lambda: encode_request(v.BrokerCall("schema.check", NESTED)),
        lambda: _check(PATTERNS),
        lambda: _check(ENUMERATION),
        lambda: encode_request(v.BrokerCall("dlq.replay", json.dumps({"topic": TOPIC, "ids": ["0-9"] * 50_000}).encode())),
    ],
}


def _check(definition: bytes) -> bytes:
    body = {"name": TOPIC, "type": "json", "definition": definition.decode()}
    return encode_request(v.BrokerCall("schema.check", json.dumps(body).encode()))


@cache
def _bomb(opcode: int) -> bytes:
    """The largest there can be, where the request may be so large."""
    return deflate(bytes(FLYMQ_PAYLOAD_BYTES_MAX if opcode == Opcode.PRODUCE else 1 << 21))


def _repeated(frames: bytes) -> bytes:
    return frames * max(1, PIPELINED_BYTES // len(frames))


def _flymq_message(opcode: int) -> Any:
    if opcode in FLYMQ:
        return FLYMQ[opcode].request(TOPIC)
    return {**FLYMQ_ADMIN, **FLYMQ_FREE}[opcode]()


def flymq_inputs(opcode: int) -> Iterator[tuple[str, bytes]]:
    for index, make in enumerate(FLYMQ_WORST.get(opcode, ())):
        yield f"worst {index}", make()
    if opcode in FLYMQ_PLAIN:
        yield "many", _repeated(encode_request(_flymq_message(opcode)))
    yield "garbage", frame(opcode, b"\xff" * GARBAGE_BYTES)
    yield "zeros", frame(opcode, bytes(GARBAGE_BYTES))
    yield "bomb", frame(opcode, _bomb(opcode), BINARY | GZIP)


# RustLog: a length, then JSON.


def _json_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


RUSTLOG_PLAIN: Final = frozenset(
    {r.Fetch, r.OffsetCommit, r.OffsetFetch, r.CreateTopic, r.ListTopics, r.DescribeTopic, r.DescribePartition, r.MetricsFetch, r.Ping}
)
RUSTLOG_WORST: Final[dict[type, list[Callable[[], bytes]]]] = {
    r.Produce: [
        lambda: _produce(b"[]," * 100_000 + b"[]"),
        lambda: _produce(b"[" + b"0," * 500_000 + b"0]"),
        lambda: _produce(b'"",' * 100_000 + b"[]"),
    ],
}


def _produce(records: bytes) -> bytes:
    return _json_frame(b'{"Produce":{"topic":"%s","partition":0,"records":[%s]}}' % (TOPIC.encode(), records))


def rustlog_inputs(kind: type) -> Iterator[tuple[str, bytes]]:
    for index, make in enumerate(RUSTLOG_WORST.get(kind, ())):
        yield f"worst {index}", make()
    name = kind.__name__.encode()
    yield "nested", _json_frame(b'{"%s":%s' % (name, NESTED))
    yield "unknown fields", _json_frame(b'{"%s":{%s"z":0}}' % (name, b'"x":[],' * 30_000))


# BlipMQ, Figg, Fujin: many frames, each as small as it can be, and each as large.

BLIPMQ_WORST: Final[dict[int, Callable[[], bytes]]] = {
    blipmq.FrameType.HELLO: lambda: _repeated(blipmq.encoder.hello(1)),
    blipmq.FrameType.AUTH: lambda: _repeated(blipmq.encoder.auth(1, b"k" * 60_000)),
    blipmq.FrameType.PUBLISH: lambda: blipmq.encoder.publishes(1, TOPIC, range(1_000), [b""] * 1_000),
    blipmq.FrameType.SUBSCRIBE: lambda: _repeated(BLIPMQ[blipmq.FrameType.SUBSCRIBE].request(TOPIC)),
    blipmq.FrameType.POLL: lambda: blipmq.encoder.polls(999, range(1_000)),
    blipmq.FrameType.ACK: lambda: blipmq.encoder.acks(999, range(1_000)),
    blipmq.FrameType.NACK: lambda: _repeated(blipmq.encoder.nack(1, 400, "x" * 1_000)),
    blipmq.FrameType.PING: lambda: _repeated(blipmq.encoder.ping(1)),
    blipmq.FrameType.PONG: lambda: _repeated(blipmq.encoder.pong(1)),
}
FIGG_WORST: Final[dict[str, Callable[[], bytes]]] = {
    "publish": lambda: figg.encode.publish(TOPIC, range(1_000), [b""] * 1_000),
    "attach": lambda: figg.encode.attach("x" * 1_000) * 100 + figg.encode.attach(LARGE, 0) * 100,
    "detach": lambda: _repeated(FIGG["detach"].request(TOPIC)),
    "ping": lambda: _repeated(FIGG["ping"].request(TOPIC)),
}
_READER: Final = fujin.encode.connect_reader(fujin.ReaderKind.PULL, False, LARGE)
_WRITER: Final = fujin.encode.connect_writer(b"id")
_WRITES: Final = fujin.encode.writes(TOPIC, [cid(number) for number in range(1_000)], [b""] * 1_000)
FUJIN_WORST: Final[dict[fujin.Request, Callable[[], bytes]]] = {
    fujin.Request.CONNECT_WRITER: lambda: _repeated(FUJIN[fujin.Request.CONNECT_WRITER].request(TOPIC)),
    fujin.Request.CONNECT_READER: lambda: _repeated(FUJIN[fujin.Request.CONNECT_READER].request(LARGE)),
    fujin.Request.WRITE: lambda: _WRITER + _WRITES,
    fujin.Request.BEGIN: lambda: _WRITER + _repeated(fujin.encode.transact(fujin.Request.BEGIN, cid(1))),
    fujin.Request.COMMIT: lambda: (
        _WRITER
        + fujin.encode.transact(fujin.Request.BEGIN, cid(1))
        + _WRITES
        + _repeated(fujin.encode.transact(fujin.Request.COMMIT, cid(2)))
    ),
    fujin.Request.ROLLBACK: lambda: _WRITER + _repeated(fujin.encode.transact(fujin.Request.ROLLBACK, cid(1))),
    fujin.Request.FETCH: lambda: _READER + fujin.encode.fetch(cid(1), 5_000) * 100,
    fujin.Request.ACK: lambda: _READER + fujin.encode.settle(fujin.Request.ACK, cid(1), [b"?"] * 5_000),
    fujin.Request.NACK: lambda: _READER + fujin.encode.settle(fujin.Request.NACK, cid(1), [b"?"] * 5_000),
    fujin.Request.DISCONNECT: lambda: _WRITER + _repeated(fujin.encode.DISCONNECT),
    fujin.Request.PONG: lambda: _repeated(fujin.encode.PONG),
}
__all__ = ["BLIPMQ_WORST", "FIGG_WORST", "FLYMQ_PLAIN", "FLYMQ_WORST", "FUJIN_WORST", "RUSTLOG", "RUSTLOG_PLAIN", "RUSTLOG_WORST"]
