"""Requests of `bench requests` on each protocol over TCP: what one request is, and the size of its reply.

| operation | figg | blipmq | flymq | rustlog |
|---|---|---|---|---|
| publish | PUBLISH → ACK | PUBLISH with QoS 1 and PING → PONG | PRODUCE | Produce of one record |
| fetch-N | DETACH and ATTACH → the last N records | N POLLs and the ACKs of the N records before | FETCH of N | Fetch of N |
| consume | – | one POLL and the ACK of the record before | CONSUME | – |

FETCH, CONSUME and Fetch read at random offsets of one topic that was filled in large batches. BlipMQ delivers each record once, so each
connection has a subscription with all records of a new topic, and the measurement ends when one has no more.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.bench import traffic
from headrace.bench.children import BenchFailed
from headrace.bench.closed_loop import Framing
from headrace.bench.load import sample_values
from headrace.bench.protocols.flymq import payload_bytes
from headrace.bench.protocols.rustlog import fetch_bytes
from headrace.wire import blipmq, flymq, rustlog
from headrace.wire.blipmq import encoder as blipmq_encode
from headrace.wire.blipmq.frames import HEAD as BLIPMQ_HEAD
from headrace.wire.figg import Kind as FiggKind
from headrace.wire.figg import encode as figg_encode
from headrace.wire.figg.frames import HEADER as FIGG_HEADER
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import Consume, Fetch
from headrace.wire.rustlog import messages as rustlog_messages
from headrace.wire.rustlog.binary import ERROR as RUSTLOG_ERROR
from headrace.wire.rustlog.codec import LENGTH

PROTOCOLS: Final = ("figg", "blipmq", "flymq", "rustlog")
OFFSETS: Final = 1_000
"""Prepared requests at different offsets."""
BLIPMQ_REQUESTS_MIN: Final = 50
"""Requests that the records of one subscription suffice for."""
_MISSING: Final = {"figg": ("consume",), "rustlog": ("consume",), "fujin": ("consume",), "blipmq": ("fetch-1",)}


@dataclass(frozen=True, slots=True)
class Exchange:
    """Requests of each connection, and the framing of the replies."""

    requests: Sequence[Iterator[bytes]]
    framing: Framing


def operations_of(protocol: str, names: Sequence[str]) -> list[str]:
    """Return those of the operations that the protocol has."""
    return [name for name in names if name not in _MISSING.get(protocol, ())]


def fetch_records(operation: str) -> int:
    """Return the records of one request: N of `fetch-N`, otherwise 1."""
    return int(operation.partition("-")[2] or 1)


def prepare(plan: traffic.Traffic, topic: traffic.BenchTopic, operation: str, connections: int) -> Exchange:
    """Return the requests of an operation on `topic`, which holds `plan.records` records. A publish goes to another topic."""
    protocol = plan.load.name
    if operation == "publish":
        written, values = traffic.new_topic(plan), sample_values(plan.value_bytes)
        frames = [plan.load.publish(written.name, [value], 0) for value in values]
        return Exchange(_cycled(frames, connections), PUBLISHED[protocol])
    return _READS[protocol](plan, topic, operation, connections)


def _cycled(frames: Sequence[bytes], connections: int) -> list[Iterator[bytes]]:
    """Return the endless requests of each connection, which start at different places."""
    starts = [index * len(frames) // connections for index in range(connections)]
    return [itertools.cycle([*frames[start:], *frames[:start]]) for start in starts]


def _offsets(records: int, count: int) -> list[int]:
    dice = random.Random(records)
    return [dice.randrange(max(1, records - count + 1)) for _ in range(OFFSETS)]


def _figg(plan: traffic.Traffic, topic: traffic.BenchTopic, operation: str, connections: int) -> Exchange:
    name, count = topic.name, fetch_records(operation)
    first = max(0, plan.records - count)
    request = figg_encode.detach(name) + figg_encode.attach(name, first)
    front = figg_encode.detached(name)
    reply_bytes = len(front) + len(figg_encode.attached(name, first))
    reply_bytes += (plan.records - first) * len(figg_encode.data(name, [1], [bytes(plan.value_bytes)]))
    return Exchange([itertools.repeat(request)] * connections, _figg_framing(FiggKind.DETACHED, reply_bytes))


def _figg_framing(kind: FiggKind, reply_bytes: int) -> Framing:
    def size(head: bytes) -> int:
        got = FIGG_HEADER.unpack(head)[0]
        if got != kind:
            raise BenchFailed(f"figg: expected {kind.name}, got message type {got}")
        return reply_bytes

    return Framing(FIGG_HEADER.size, size)


def _blipmq(plan: traffic.Traffic, _topic: traffic.BenchTopic, operation: str, connections: int) -> Exchange:
    count = fetch_records(operation)
    records = max(BLIPMQ_REQUESTS_MIN, plan.records // connections // count) * count
    topic = traffic.new_topic(plan, readers=connections)
    traffic.publish(replace(plan, records=records, connections=1), topic)
    frame_bytes = len(blipmq_encode.publishes(1, topic.name, [0], [bytes(plan.value_bytes)]))
    requests = [_polls(subscription, records, count) for subscription in topic.subscriptions]
    return Exchange(requests, _blipmq_framing(blipmq.FrameType.PUBLISH, count * frame_bytes))


def _polls(subscription: int, records: int, count: int) -> Iterator[bytes]:
    polls = blipmq_encode.polls(subscription, range(count))
    acks = [blipmq_encode.acks(subscription, range(first - count, first)) for first in range(count + 1, records + 1, count)]
    return iter([polls, *(each + polls for each in acks)])


def _blipmq_framing(kind: blipmq.FrameType, reply_bytes: int) -> Framing:
    def size(head: bytes) -> int:
        if BLIPMQ_HEAD.unpack(head)[1] != kind:
            raise BenchFailed(f"blipmq: expected {kind.name}, got frame {head.hex()}")
        return reply_bytes

    return Framing(BLIPMQ_HEAD.size, size)


def _flymq(plan: traffic.Traffic, topic: traffic.BenchTopic, operation: str, connections: int) -> Exchange:
    count = fetch_records(operation)
    offsets = _offsets(plan.records, count)
    if operation == "consume":
        frames = [flymq.encode_request(Consume(topic.name, 0, offset)) for offset in offsets]
    else:
        frames = [flymq.encode_request(Fetch(topic.name, 0, offset, count)) for offset in offsets]
    return Exchange(_cycled(frames, connections), _FLYMQ)


def _flymq_size(head: bytes) -> int:
    if head[2] == flymq.Opcode.ERROR:
        raise BenchFailed("flymq: the broker answered a request with an error")
    return HEADER_BYTES + payload_bytes(head)


def _rustlog(plan: traffic.Traffic, topic: traffic.BenchTopic, operation: str, connections: int) -> Exchange:
    count = fetch_records(operation)
    size_bytes = fetch_bytes(rustlog.Dialect.BINARY, count, plan.value_bytes)
    fetches = [rustlog_messages.Fetch(topic.name, 0, offset, size_bytes) for offset in _offsets(plan.records, count)]
    return Exchange(_cycled([rustlog.encode_request(rustlog.Dialect.BINARY, fetch) for fetch in fetches], connections), _RUSTLOG)


def _rustlog_size(head: bytes) -> int:
    if head[LENGTH.size] == RUSTLOG_ERROR:
        raise BenchFailed("rustlog: the broker answered a request with an error")
    return LENGTH.size + int(LENGTH.unpack_from(head)[0])


_FLYMQ: Final = Framing(HEADER_BYTES, _flymq_size)
_RUSTLOG: Final = Framing(LENGTH.size + 1, _rustlog_size)
_READS: Final[dict[str, Callable[[traffic.Traffic, traffic.BenchTopic, str, int], Exchange]]] = {
    "figg": _figg,
    "blipmq": _blipmq,
    "flymq": _flymq,
    "rustlog": _rustlog,
}
PUBLISHED: Final = {
    "figg": _figg_framing(FiggKind.ACK, len(figg_encode.ack(0))),
    "blipmq": _blipmq_framing(blipmq.FrameType.PONG, len(blipmq_encode.pong(0))),
    "flymq": _FLYMQ,
    "rustlog": _RUSTLOG,
}
