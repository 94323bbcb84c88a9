"""Sample traffic: orders through all five protocols concurrently, each with its own client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import headrace
from headrace.clients.api import Client
from headrace.demo.orders import TOPIC, Maker

TICK_SECONDS: Final = 0.1


@dataclass(slots=True)
class ProtocolTraffic:
    """Acknowledged records of one protocol."""

    url: str
    acknowledged: int = 0
    rate: float = 0.0
    """Recent records per second."""


@dataclass(slots=True)
class Traffic:
    """Traffic by protocol. `values` holds every acknowledged record of this execution, for the verification."""

    protocols: dict[str, ProtocolTraffic]
    values: list[bytes] = field(default_factory=list)

    @property
    def acknowledged(self) -> int:
        return len(self.values)


async def publish(
    addresses: Mapping[str, str], traffic: Traffic, stop: asyncio.Event, *, prefix: str, per_second: float, api_key: str, seed: int
) -> None:
    """Publish through every protocol until `stop` is set. Returns when all records are acknowledged."""
    async with asyncio.TaskGroup() as group:
        for number, (name, url) in enumerate(addresses.items()):
            maker = Maker(f"{prefix}-{name}", random.Random(seed + number))
            pace = per_second / len(addresses)
            group.create_task(_publish_through(url, name, maker, traffic, stop, pace, api_key))


async def _publish_through(
    url: str, name: str, maker: Maker, traffic: Traffic, stop: asyncio.Event, per_second: float, api_key: str
) -> None:
    protocol = traffic.protocols[name]
    async with headrace.connect(url, api_key=api_key if name == "blipmq" else None) as client:
        pacer = Pacer(per_second, time.monotonic)
        while not stop.is_set():
            count = pacer.due()
            if count:
                await _send(client, maker.make(count, time.time_ns() // 1_000_000), traffic, protocol)
                protocol.rate = pacer.rate(count)
            try:
                await asyncio.wait_for(stop.wait(), TICK_SECONDS)
            except TimeoutError:
                pass
        protocol.rate = 0.0


async def _send(client: Client, values: list[bytes], traffic: Traffic, protocol: ProtocolTraffic) -> None:
    await (await client.send_many(TOPIC, values))
    traffic.values += values
    protocol.acknowledged += len(values)


class Pacer:
    """Computes the records due at a constant rate. At most one second of a stall is caught up."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second, self._clock = per_second, clock
        self._before = clock()
        self._owed = 0.0
        self._lately = per_second
        self._sent_at = self._before

    def due(self) -> int:
        now = self._clock()
        self._owed += min(now - self._before, 1.0) * self._per_second
        self._before = now
        count = int(self._owed)
        self._owed -= count
        return count

    def rate(self, count: int) -> float:
        """Return the smoothed rate after sending `count` records."""
        now = self._clock()
        self._lately += 0.3 * (count / max(now - self._sent_at, 1e-3) - self._lately)
        self._sent_at = now
        return self._lately
