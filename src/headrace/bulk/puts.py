"""What becomes of the record batches of one put: appended in order, with a window of bytes on their way to the disk."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Iterable

from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.broker.publish import Published
from headrace.bulk.bridge import Bridge
from headrace.bulk.writing import Piece
from headrace.errors import BrokerError
from headrace.limits import BULK_IN_FLIGHT_BYTES_MAX


class Placements:
    """Where records landed, as (partition, base offset, count), joined where they lie side by side."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []
        self._last: dict[int, list[int]] = {}

    def add(self, partition: int, offset: int, count: int) -> None:
        last = self._last.get(partition)
        if last is not None and last[1] + last[2] == offset:
            last[2] += count
        else:
            last = self._last[partition] = [partition, offset, count]
            self.found.append(last)


class AppendPut:
    """Used by one Flight thread. `take` blocks while the window is full: then its connection is not read either."""

    def __init__(self, bridge: Bridge, broker: Broker, who: Principal) -> None:
        self._bridge, self._broker, self._who = bridge, broker, who
        self._flying: deque[tuple[concurrent.futures.Future[list[Published]], int]] = deque()
        self._flying_bytes = 0
        self._records = 0
        self._placements = Placements()

    def take(self, pieces: Iterable[Piece]) -> None:
        """Raises what the broker raises for these or earlier ones."""
        batch = list(pieces)
        if not batch:
            return
        size = sum(piece.run.size_bytes for piece in batch)
        while self._flying and self._flying_bytes + size > BULK_IN_FLIGHT_BYTES_MAX:
            self._land()
        self._flying.append((self._bridge.start(lambda: self._publish(batch)), size))
        self._flying_bytes += size

    async def _publish(self, pieces: list[Piece]) -> list[Published]:
        """All pieces are staged before the first is waited for, so that they keep their order and share a flush."""
        staged = [self._broker.publish(self._who, piece.topic, piece.run, partition=piece.partition) for piece in pieces]
        return list(await asyncio.gather(*staged))

    def finish(self) -> object:
        """Everything is as safe as the topic promises; where it landed."""
        while self._flying:
            self._land()
        return {"records": self._records, "placements": self._placements.found}

    def durable(self) -> int:
        """How many records are safe, after a failure: waits for those on their way."""
        while self._flying:
            try:
                self._land()
            except BrokerError:
                pass  # the first failure is the one that is reported
        return self._records

    def _land(self) -> None:
        future, size = self._flying.popleft()
        self._flying_bytes -= size
        for published in self._bridge.result(future, None):
            self._records += published.count
            if published.placements is None:
                self._placements.add(published.partition, published.base_offset, published.count)
            else:
                for partition, offset in published.placements:
                    self._placements.add(partition, offset, 1)
