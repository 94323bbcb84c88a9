"""Publishing and consuming through a protocol: one run of each, measured from the first byte to the last answer."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from headrace.bench.children import Address
from headrace.bench.faults import BenchFailed
from headrace.bench.load import Chunk, LoadConnection, Tick, chunk_records, connected, run, sample_values
from headrace.bench.protocols import ProtocolLoad

WARM_UP_RECORDS = 20_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What goes over the wire."""

    load: ProtocolLoad
    address: Address
    key: bytes
    """For a protocol that asks for one."""
    records: int
    value_bytes: int = 100
    connections: int = 1
    window: int = 0
    """Records of one connection that may be unacknowledged; 0 leaves it to TCP."""

    def __post_init__(self) -> None:
        if 0 < self.window < self.load.batch_records:
            raise BenchFailed(f"{self.load.name} publishes {self.load.batch_records} records at once: the window is too small")


@dataclass(frozen=True, slots=True)
class Place:
    """A topic, and for each reader to come the number it has to know."""

    topic: str
    subscriptions: Sequence[int] = ()


@contextmanager
def entered(traffic: Traffic, count: int = 1) -> Iterator[list[socket.socket]]:
    """Connections past their handshake."""
    with connected(traffic.address, count) as socks:
        for sock in socks:
            traffic.load.handshake(sock, traffic.key)
        yield socks


def new_topic(traffic: Traffic, *, readers: int = 0) -> Place:
    """A topic that no run has used: the load generator counts from the start of a topic."""
    topic = f"bench-{secrets.token_hex(4)}"
    with entered(traffic) as (sock,):
        traffic.load.open_topic(sock, topic)
        return Place(topic, [traffic.load.subscribe(sock, topic) for _ in range(readers)])


def publish(traffic: Traffic, place: Place, tick: Tick | None = None) -> float:
    """Seconds until the last of all records is acknowledged, over all connections at once, all to one topic."""
    values = sample_values(traffic.value_bytes)
    portions = shares(traffic.records, traffic.connections)
    # Connections differ in nothing but how many records they have, so two plans serve any number of them.
    plans = {share: _chunks(traffic, place.topic, values, share) for share in set(portions)}
    with entered(traffic, len(portions)) as socks:
        lanes = [
            LoadConnection(sock, plans[share], traffic.load.acks(place.topic), share, window=traffic.window)
            for sock, share in zip(socks, portions, strict=True)
        ]
        return run(lanes, tick)


def shares(records: int, connections: int) -> list[int]:
    """The records of each connection: as even as they can be, none empty."""
    base, extra = divmod(records, connections)
    return [base + (index < extra) for index in range(min(records, connections))]


def _chunks(traffic: Traffic, topic: str, values: Sequence[bytes], records: int) -> list[Chunk]:
    frame_bytes = len(traffic.load.publish(topic, values[:1], 0))
    size = chunk_records(frame_bytes, traffic.window, traffic.load.batch_records)
    chunks = []
    for first in range(0, records, size):
        count = min(size, records - first)
        picked = [values[index % len(values)] for index in range(first, first + count)]
        chunks.append(Chunk(traffic.load.publish(topic, picked, first), count))
    return chunks


def consume(traffic: Traffic, place: Place, tick: Tick | None = None, *, turn: int = 0) -> float:
    """Seconds until every connection has read the whole topic. Each turn has readers of its own, where readers have a number."""
    with entered(traffic, traffic.connections) as socks:
        lanes = []
        for index, sock in enumerate(socks):
            subscription = place.subscriptions[turn * traffic.connections + index]
            plan = traffic.load.consume(place.topic, traffic.records, traffic.value_bytes, subscription)
            lanes.append(LoadConnection(sock, [Chunk(plan.request, 0)], plan.meter, traffic.records))
        return run(lanes, tick)


def warm_up(traffic: Traffic) -> None:
    """A little of the same, so that no run pays for what happens once per process."""
    small = replace(traffic, records=min(WARM_UP_RECORDS, traffic.records), connections=1, window=0)
    place = new_topic(small, readers=1)
    publish(small, place)
    consume(small, place)
