"""Publishing and consuming through a door: one run of each, measured from the first byte to the last answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.children import Address
from headrace.bench.doors import DoorLoad
from headrace.bench.load import Chunk, Lane, Tick, chunk_records, connected, run, sample_values

WARM_UP_RECORDS = 20_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What goes over the wire."""

    load: DoorLoad
    address: Address
    records: int
    value_bytes: int = 100
    connections: int = 1
    window: int = 0
    """Records of one connection that may be unacknowledged; 0 leaves it to TCP."""


def new_topic() -> str:
    """A name that no run has used: the load generator counts from the start of a topic."""
    return f"bench-{secrets.token_hex(4)}"


def publish(traffic: Traffic, topic: str, tick: Tick | None = None) -> float:
    """Seconds until the last of all records is acknowledged, over all connections at once, all to one topic."""
    values = sample_values(traffic.value_bytes)
    shares = _shares(traffic.records, traffic.connections)
    plans = [_chunks(traffic, topic, values, share) for share in shares]
    with connected(traffic.address, len(shares)) as socks:
        for sock in socks:
            traffic.load.handshake(sock)
        lanes = [
            Lane(sock, chunks, traffic.load.acks(), share, window=traffic.window)
            for sock, chunks, share in zip(socks, plans, shares, strict=True)
        ]
        return run(lanes, tick)


def _shares(records: int, connections: int) -> list[int]:
    """The records of each connection: as even as they can be, none empty."""
    base, extra = divmod(records, connections)
    return [base + (index < extra) for index in range(min(records, connections))]


def _chunks(traffic: Traffic, topic: str, values: Sequence[bytes], records: int) -> list[Chunk]:
    frame_bytes = len(traffic.load.publish(topic, values[:1], 0))
    size = chunk_records(frame_bytes, traffic.window)
    chunks = []
    for first in range(0, records, size):
        count = min(size, records - first)
        picked = [values[index % len(values)] for index in range(first, first + count)]
        chunks.append(Chunk(traffic.load.publish(topic, picked, first), count))
    return chunks


def consume(traffic: Traffic, topic: str, tick: Tick | None = None) -> float:
    """Seconds until every connection has read the whole history of the topic."""
    with connected(traffic.address, traffic.connections) as socks:
        lanes = []
        for sock in socks:
            traffic.load.handshake(sock)
            plan = traffic.load.consume(topic, traffic.records, traffic.value_bytes)
            lanes.append(Lane(sock, [Chunk(plan.request, 0)], plan.meter, traffic.records))
        return run(lanes, tick)


def warm_up(traffic: Traffic) -> None:
    """A little of the same, so that no run pays for what happens once per process."""
    topic = new_topic()
    small = Traffic(traffic.load, traffic.address, min(WARM_UP_RECORDS, traffic.records), traffic.value_bytes)
    publish(small, topic)
    consume(small, topic)
