"""Reads of history: fetches from Kafka into the cache of a partition.

Readers at the same place share one fetch, and what a reader will want next is fetched while it takes what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from aiokafka import errors as kafka_errors

from headrace.engine.kafka.cluster import Cluster
from headrace.engine.kafka.codec import Decoded
from headrace.engine.kafka.partition import PartitionLog
from headrace.engine.listed import ListedBatch
from headrace.errors import BrokerError, OffsetOutOfRange, Unavailable, UnknownTopic
from headrace.limits import FETCH_BYTES_MAX, KIB, MIB

_FETCH_BYTES_MIN: Final = 256 * KIB
_AHEAD_BYTES: Final = 4 * MIB
"""Kafka cuts the last record batch of an answer, so several fit."""
_STABLE_WAIT_MS: Final = 100
_RECORD_BYTES: Final = 12
"""Bytes of a Kafka record besides key, value and headers."""


class Fetches:
    """Fetches under way. `refresh_bounds` is called for a partition that ends before the offset of a reader."""

    def __init__(self, cluster: Cluster, refresh_bounds: Callable[[PartitionLog], Awaitable[None]]) -> None:
        self._cluster, self._refresh_bounds = cluster, refresh_bounds
        self._under_way: set[asyncio.Task[int]] = set()

    async def close(self) -> None:
        """End all fetches; their readers get `Unavailable`."""
        fetches = list(self._under_way)
        for fetch in fetches:
            fetch.cancel()
        if fetches:
            await asyncio.wait(fetches)

    async def coming(self, log: PartitionLog, found: list[ListedBatch], bytes_max: int, records_max: int) -> list[ListedBatch]:
        """Return what belongs behind the records in memory, if it is being fetched: a reader of pages gets whole ones."""
        following = found[-1].next_offset
        bytes_max -= sum(batch.size_bytes for batch in found)
        records_max -= sum(map(len, found))
        if following not in log.fetches or bytes_max < 1 or records_max < 1:
            return []
        with contextlib.suppress(BrokerError):  # the next read raises it
            await self.fetched(log, following, bytes_max)
        more = log.cached(following, bytes_max, records_max)
        return more if sum(batch.size_bytes for batch in more) <= bytes_max else []

    def cached(self, log: PartitionLog, offset: int, bytes_max: int, records_max: int) -> list[ListedBatch]:
        """Return records in memory, and fetch what their reader will want next: Kafka works while they are encoded and sent."""
        found = log.cached(offset, bytes_max, records_max)
        ahead = log.ahead_of(found[-1].next_offset) if found else None
        if ahead is not None:
            self._start(log, ahead, _AHEAD_BYTES // min(4, 1 + len(self._under_way)))
        return found

    async def fetched(self, log: PartitionLog, offset: int, bytes_max: int) -> int:
        """Read from Kafka into the cache, or wait for the fetch that does. Return the offset to continue from."""
        under_way = log.fetch_of(offset)
        is_own = under_way is None or log.fetches.get(offset, (None,))[0] is under_way
        fetch = under_way or self._start(log, offset, bytes_max)
        try:
            reached = await asyncio.shield(fetch)
        except asyncio.CancelledError:
            reader = asyncio.current_task()
            if fetch.cancelled() and (reader is None or not reader.cancelling()):
                raise Unavailable("the engine is closing") from None
            raise
        except BrokerError:
            if is_own:
                raise
            return offset  # it was about another offset
        return max(offset, reached)

    def _start(self, log: PartitionLog, offset: int, bytes_max: int) -> asyncio.Task[int]:
        fetch = asyncio.get_running_loop().create_task(self._fetch(log, offset, bytes_max))
        log.fetches[offset] = fetch, bytes_max

        def done(fetch: asyncio.Task[int]) -> None:
            if log.fetches.get(offset, (None,))[0] is fetch:
                del log.fetches[offset]
            self._under_way.discard(fetch)
            if not fetch.cancelled():
                fetch.exception()  # readers that wait get it; a later one asks again

        self._under_way.add(fetch)
        fetch.add_done_callback(done)
        return fetch

    async def _fetch(self, log: PartitionLog, offset: int, bytes_max: int) -> int:
        size = min(max(bytes_max, _FETCH_BYTES_MIN), FETCH_BYTES_MAX)
        answer = await self._cluster.fetch(*log.place, offset, bytes_max=size, wait_ms=_STABLE_WAIT_MS)
        if log.is_gone or answer.error is kafka_errors.UnknownTopicOrPartitionError:
            raise UnknownTopic(log.topic)
        if answer.error is kafka_errors.OffsetOutOfRangeError:
            await self._refresh_bounds(log)
            raise OffsetOutOfRange(wanted=offset, first=log.first, end=log.end)
        if answer.error is not kafka_errors.NoError:
            raise Unavailable(f"Kafka: {answer.error.__name__} while reading {log.topic!r}")
        decoded = await Decoded.in_turns(answer.content, answer.aborted, offset)
        if decoded.batches:
            log.remember_fetched(min(offset, decoded.batches[0].base_offset), decoded.batches)
            count = sum(map(len, decoded.batches))
            log.note_size(count, sum(batch.size_estimate_bytes for batch in decoded.batches) + _RECORD_BYTES * count)
            return offset
        return decoded.next_offset  # markers and aborted records only, or not yet stable
