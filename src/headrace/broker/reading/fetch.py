"""Fetch: a read that can wait for records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace.broker.reading.batches import unexpired
from headrace.broker.reading.waits import Wait
from headrace.broker.settings import Clock, Later
from headrace.engine.contract import Batch, Bounds, Engine
from headrace.errors import InvalidRequest, Unavailable, UnknownTopic
from headrace.limits import FETCH_BYTES_MAX, KIB

_SKIP_BYTES: Final = 64 * KIB
_SKIP_RECORDS: Final = 10_000
"""Expired records that are skipped in one turn of the event loop."""


@dataclass(slots=True)
class Fetched:
    """Result of a fetch."""

    batches: list[Batch]
    bounds: Bounds
    next_offset: int
    """The offset to continue from: after the last batch and after expired records that were left out."""
    is_cut: bool = False
    """Whether the read ended at a limit: there are more records."""


class Fetcher:
    """Reads partitions and holds the fetches that wait at the end of one."""

    def __init__(self, engine: Engine, *, clock: Clock, later: Later, waiting_max: int) -> None:
        self._engine = engine
        self._clock = clock
        self._later = later
        self._waiting_max = waiting_max
        self._waiting: dict[Wait, str] = {}
        self._is_draining = False

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        bytes_max: int,
        records_max: int,
        wait_ms: int,
        bytes_min: int,
        with_expired: bool = False,
    ) -> Fetched:
        if bytes_max < 1 or records_max < 1:
            raise InvalidRequest("a fetch must ask for at least one byte and one record")
        bytes_max = min(bytes_max, FETCH_BYTES_MAX)
        bytes_min = min(bytes_min, bytes_max)
        if with_expired:
            return await self._read_all(topic, partition, offset, bytes_max, records_max)
        fetched = await self._read(topic, partition, offset, bytes_max, records_max)
        if wait_ms <= 0 or self._is_draining or _is_enough(fetched, bytes_min, records_max):
            return fetched
        with self._waiting_for(topic, partition, wait_ms) as wait:
            while True:
                offset = fetched.batches[0].first_offset if fetched.batches else fetched.next_offset
                fetched = await self._read(topic, partition, offset, bytes_max, records_max)
                if _is_enough(fetched, bytes_min, records_max) or not await wait.for_more():
                    return fetched

    async def _read_all(self, topic: str, partition: int, offset: int, bytes_max: int, records_max: int) -> Fetched:
        """Read from `offset` on, expired records included."""
        end = self._engine.bounds(topic, partition).end
        batches = await self._engine.read(topic, partition, offset, bytes_max=bytes_max, records_max=records_max)
        read_on = batches[-1].next_offset if batches else max(offset, end)
        return Fetched(batches, self._engine.bounds(topic, partition), read_on)

    async def _read(self, topic: str, partition: int, offset: int, bytes_max: int, records_max: int) -> Fetched:
        """Read from `offset` on. Skip expired records until there is one that has not expired."""
        is_skipping = False
        while True:
            end = self._engine.bounds(topic, partition).end
            # Skipping reads more than was asked for: with one record at a time it would take a read for each.
            limits = (_SKIP_BYTES, _SKIP_RECORDS) if is_skipping else (bytes_max, records_max)
            batches = await self._engine.read(topic, partition, offset, bytes_max=limits[0], records_max=limits[1])
            living = unexpired(batches, self._clock())
            if is_skipping and living:
                offset, is_skipping = living[0].first_offset, False
                continue
            # An empty read below the end means that compaction removed these records.
            read_on = batches[-1].next_offset if batches else max(offset, end)
            if living or not batches:
                return Fetched(living, self._engine.bounds(topic, partition), read_on, read_on < end)
            offset, is_skipping = read_on, True
            await asyncio.sleep(0)

    @contextmanager
    def _waiting_for(self, topic: str, partition: int, wait_ms: int) -> Iterator[Wait]:
        if len(self._waiting) >= self._waiting_max:
            raise Unavailable(f"{self._waiting_max} fetches are waiting already")
        wait = Wait(self._later, wait_ms)
        unwatch: Callable[[], None] | None = None
        try:
            unwatch = self._engine.watch(topic, partition, wait.wake)
            self._waiting[wait] = topic
            yield wait
        finally:
            wait.stop()
            self._waiting.pop(wait, None)
            if unwatch is not None:
                unwatch()

    def topic_gone(self, gone: UnknownTopic) -> None:
        for wait, topic in self._waiting.items():
            if topic == gone.topic:
                wait.end(gone)

    def drain(self) -> None:
        """Answer all waiting fetches with the records available now."""
        self._is_draining = True
        for wait in self._waiting:
            wait.end()


def _is_enough(fetched: Fetched, bytes_min: int, records_max: int) -> bool:
    if not fetched.batches:
        return False
    if bytes_min <= 1 or fetched.is_cut or sum(map(len, fetched.batches)) >= records_max:
        return True
    return sum(batch.size_bytes for batch in fetched.batches) >= bytes_min
