"""Publishing and consuming through a protocol over TCP, measured from the first byte to the last reply."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from headrace.bench.children import Address, BenchFailed
from headrace.bench.load import Chunk, LoadConnection, Tick, chunk_records, connected, run, sample_values
from headrace.bench.protocols import ProtocolLoad

WARM_UP_RECORDS = 20_000
WARM_UP_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """Parameters of one measurement."""

    load: ProtocolLoad
    address: Address
    key: bytes
    """BlipMQ API key."""
    records: int
    value_bytes: int = 100
    connections: int = 1
    window: int = 0
    """Maximum unacknowledged records of one connection; 0: limited by TCP only."""

    def __post_init__(self) -> None:
        if 0 < self.window < self.load.batch_records:
            raise BenchFailed(f"--window {self.window} is too small: {self.load.name} publishes {self.load.batch_records} records at once")


@dataclass(frozen=True, slots=True)
class BenchTopic:
    """Topic name and the subscription id of each of its readers."""

    name: str
    subscriptions: Sequence[int] = ()


@contextmanager
def logged_in(traffic: Traffic, count: int = 1) -> Iterator[list[socket.socket]]:
    """Open connections and complete their handshake."""
    with connected(traffic.address, count) as socks:
        for sock in socks:
            traffic.load.handshake(sock, traffic.key)
        yield socks


def new_topic(traffic: Traffic, *, readers: int = 0) -> BenchTopic:
    """Create a new topic with subscriptions for `readers`. The load generator counts from the first record of a topic."""
    topic = f"bench-{secrets.token_hex(4)}"
    with logged_in(traffic) as (sock,):
        traffic.load.open_topic(sock, topic)
        return BenchTopic(topic, [traffic.load.subscribe(sock, topic) for _ in range(readers)])


def publish(traffic: Traffic, topic: BenchTopic, tick: Tick | None = None) -> float:
    """Publish to one topic over all connections and return the seconds until the last record is acknowledged."""
    values = sample_values(traffic.value_bytes)
    counts = records_per_connection(traffic.records, traffic.connections)
    # Connections differ only in their number of records, which has at most two values.
    plans = {count: chunks(traffic, topic.name, values, count) for count in set(counts)}
    with logged_in(traffic, len(counts)) as socks:
        loads = [
            LoadConnection(sock, plans[count], traffic.load.acks(topic.name), count, window=traffic.window)
            for sock, count in zip(socks, counts, strict=True)
        ]
        return run(loads, tick)


def records_per_connection(records: int, connections: int) -> list[int]:
    """Divide the records evenly over the connections, leaving out connections without records."""
    base, extra = divmod(records, connections)
    return [base + (index < extra) for index in range(min(records, connections))]


def chunks(traffic: Traffic, topic: str, values: Sequence[bytes], records: int) -> list[Chunk]:
    frame_bytes = len(traffic.load.publish(topic, values[:1], 0))
    size = chunk_records(frame_bytes, traffic.window, traffic.load.batch_records)
    found = []
    for first in range(0, records, size):
        count = min(size, records - first)
        picked = [values[index % len(values)] for index in range(first, first + count)]
        found.append(Chunk(traffic.load.publish(topic, picked, first), count))
    return found


def consume(traffic: Traffic, topic: BenchTopic, tick: Tick | None = None, *, turn: int = 0) -> float:
    """Return the seconds until every connection has read the whole topic. Each turn uses its own subscriptions."""
    with logged_in(traffic, traffic.connections) as socks:
        loads = []
        for index, sock in enumerate(socks):
            subscription = topic.subscriptions[turn * traffic.connections + index]
            plan = traffic.load.consume(topic.name, traffic.records, traffic.value_bytes, subscription)
            loads.append(LoadConnection(sock, [Chunk(plan.request, 0)], plan.meter, traffic.records))
        return run(loads, tick)


def warm_up(traffic: Traffic) -> None:
    """Publish and read a few records, so that one-time costs of the process are not measured."""
    small = replace(traffic, records=warm_up_records(traffic.records, traffic.value_bytes), connections=1, window=0)
    topic = new_topic(small, readers=1)
    publish(small, topic)
    consume(small, topic)


def warm_up_records(records: int, value_bytes: int) -> int:
    """Return the number of records of a warm-up."""
    return max(1, min(WARM_UP_RECORDS, records, WARM_UP_BYTES // value_bytes))
