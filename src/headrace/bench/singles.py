"""Topics that are filled one record at a time, each record in a batch of its own. The broker joins these batches in its segments."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Final

from headrace.bench.children import Address
from headrace.bench.closed_loop import Requester, exchange
from headrace.bench.exchanges import PUBLISHED
from headrace.bench.load import connected, sample_values
from headrace.bench.protocols import PROTOCOLS
from headrace.bench.protocols.flymq import call
from headrace.bench.traffic import BenchTopic, Traffic, logged_in
from headrace.wire.flymq.advanced_messages import BrokerCall

_FILL_SECONDS_MAX: Final = 3_600.0
_CHECKPOINT_SECONDS: Final = 6.0
"""The broker moves its newest records to segments every five seconds, unless it is configured otherwise."""


def one_at_a_time(address: Address, frames: Iterable[bytes], connections: int) -> int:
    """Send FlyMQ requests, one under way on each connection, and return their number."""
    shared = iter(frames)
    with connected(address, connections) as socks:
        return exchange([Requester(sock, shared, PUBLISHED["flymq"]) for sock in socks], _FILL_SECONDS_MAX, lambda: 0.0).requests


def new_topic(address: Address) -> str:
    """Create a topic that does not sync, to be filled sooner."""
    topic = f"bench-{secrets.token_hex(4)}"
    with connected(address) as (sock,):
        call(sock, BrokerCall("topic.create", json.dumps({"topic": topic, "partitions": 1, "config": {"ack": "written"}}).encode()))
    return topic


def fill(address: Address, topic: str, records: int, value_bytes: int) -> int:
    """Publish the records over one connection, because a group commit joins records. Return their number."""
    values = islice(cycle(sample_values(value_bytes)), records)
    return one_at_a_time(address, (PROTOCOLS["flymq"].publish(topic, [value], 0) for value in values), 1)


def filled_topic(traffic: Traffic, readers: int) -> BenchTopic:
    """Return a topic with all records of `traffic` in segments, and with subscriptions for `readers`."""
    name = new_topic(traffic.address)
    with logged_in(traffic) as (sock,):
        topic = BenchTopic(name, [traffic.load.subscribe(sock, name) for _ in range(readers)])
    fill(traffic.address, name, traffic.records, traffic.value_bytes)
    time.sleep(_CHECKPOINT_SECONDS)
    return topic
