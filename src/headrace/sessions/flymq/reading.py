"""CONSUME and FETCH: read records and build a reply that fits its frame.

A reply holds the requested number of records, up to a few megabytes, or a single larger record. A FETCH below the first offset starts at
the first offset; at the end of the log the reply is empty. Neither request waits. If records are skipped (filtered out or expired), the
search continues until one is found or the log ends, because some clients advance only when they receive a record.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, cast

from headrace.broker import Broker, Principal
from headrace.errors import BrokerError, OffsetOutOfRange
from headrace.limits import FLYMQ_FETCH_BYTES_MAX, FLYMQ_PAYLOAD_BYTES_MAX, FLYMQ_SCAN_BYTES_MAX, KIB, MIB, TURN_BYTES_MIN
from headrace.sessions.flymq.filter import Filter, build, passing, slices
from headrace.sessions.turns import Turns
from headrace.wire.flymq.fetching import FRONT_BYTES, RECORD_OVERHEAD_BYTES
from headrace.wire.flymq.messages import Consume, Consumed, Fetch, Fetched

RECORDS_DEFAULT: Final = 10
"""Default number of records."""
_READ_STEP_BYTES: Final = 512 * KIB
"""Bytes read at a time. Most replies are far smaller than the largest one, and a read returns as much as requested."""
_SCAN_STEP_BYTES: Final = 1 * MIB
_THREAD_BYTES_MIN: Final = 256 * KIB
"""A record from this size on is matched on a thread."""
_NOW_RECORDS_MAX: Final = 1_000
"""Records of a FETCH that is answered at once."""
assert FRONT_BYTES + _READ_STEP_BYTES + _NOW_RECORDS_MAX * RECORD_OVERHEAD_BYTES <= FLYMQ_FETCH_BYTES_MAX, "they fit a reply"
_LENGTHS_BYTES: Final = 8
"""Bytes that CONSUME's reply adds to key and value."""


class MessageGone(BrokerError):
    """The offset is inside the log, but its record is removed."""

    code = "message_gone"


class MessageTooLarge(BrokerError):
    """A record of another protocol that fits no FlyMQ frame."""

    code = "message_too_large"

    def __init__(self, offset: int, size_bytes: int) -> None:
        super().__init__(f"message at offset {offset} is too large for this protocol: {size_bytes} bytes")


def _is_lost() -> bool:
    return True


class ReadHandlers:
    """Handlers of CONSUME and FETCH. `who` returns the current principal.

    `is_over` tells whether the peer has left or the broker drains: a search then ends early.
    """

    def __init__(self, broker: Broker, who: Callable[[], Principal], turns: Turns, is_over: Callable[[], bool]) -> None:
        self._broker, self._who, self._turns, self._is_over = broker, who, turns, is_over

    def end(self) -> None:
        """Release the session: the connection is lost, and its searches end."""
        self._is_over = _is_lost

    def read_now(self, request: Consume | Fetch) -> Consumed | Fetched | None:
        """Return the reply if it can be built from memory. None: the handlers below find the records or the error."""
        if isinstance(request, Fetch):
            return None if request.pattern is not None else self._fetch_now(request)
        batches = self._broker.read_now(self._who(), request.topic, request.partition, request.offset, bytes_max=1, records_max=1)
        if batches is None or batches[0].first_offset != request.offset or batches[0].size_bytes > _READ_STEP_BYTES:
            return None
        keys = batches[0].keys()
        return Consumed((keys[0] if keys else None) or b"", batches[0].values()[0] or b"")

    def _fetch_now(self, request: Fetch) -> Fetched | None:
        wanted = request.records_max if request.records_max > 0 else RECORDS_DEFAULT
        who, topic, partition = self._who(), request.topic, request.partition
        # One more than can be answered at once: a larger page is read by `fetch`, and reading all of it here would be done twice.
        records_max = min(wanted, _NOW_RECORDS_MAX + 1)
        batches = self._broker.read_now(who, topic, partition, request.offset, bytes_max=_READ_STEP_BYTES, records_max=records_max)
        if batches is None or len(batches) != 1:
            return None
        (batch,) = batches
        if len(batch) > _NOW_RECORDS_MAX or batch.size_bytes > _READ_STEP_BYTES:
            return None
        next_offset = batch.next_offset
        if len(batch) < wanted and next_offset < self._broker.bounds(who, topic, partition).end:
            return None
        size, keys = batch.value_size, batch.keys()
        values = _without_tombstones(batch.values()) if size is None else cast(list[bytes], batch.values())
        return Fetched(batch.offsets(), values, next_offset, keys if keys is not None and any(keys) else None, size)

    async def consume(self, request: Consume) -> Consumed:
        """Return the record at exactly this offset. Raises an error that says why it is missing."""
        broker, who = self._broker, self._who()
        bounds = broker.bounds(who, request.topic, request.partition)
        if not bounds.first <= request.offset < bounds.end:
            raise OffsetOutOfRange(wanted=request.offset, first=bounds.first, end=bounds.end)
        found = await broker.fetch(who, request.topic, request.partition, request.offset, bytes_max=1, records_max=1)
        for batch in found.batches:
            if len(batch) and batch.first_offset == request.offset:
                keys = batch.keys()
                key, value = (keys[0] if keys else None) or b"", batch.values()[0] or b""
                if len(key) + len(value) + _LENGTHS_BYTES > FLYMQ_PAYLOAD_BYTES_MAX:
                    raise MessageTooLarge(request.offset, len(key) + len(value))
                return Consumed(key, value)
        raise MessageGone(f"message expired: offset {request.offset}")

    async def fetch(self, request: Fetch) -> Fetched:
        broker, who = self._broker, self._who()
        test = build(request.pattern or "")
        page = _Page(request.records_max if request.records_max > 0 else RECORDS_DEFAULT)
        offset, scanned = request.offset, 0
        while True:
            try:
                bounds = broker.bounds(who, request.topic, request.partition)
                offset = max(offset, bounds.first)
                if offset >= bounds.end:
                    broker.check_reads(who, request.topic)  # a topic may be visible to a principal that may not read it
                    break
                found = await broker.fetch(
                    who,
                    request.topic,
                    request.partition,
                    offset,
                    bytes_max=_READ_STEP_BYTES if test is None else _SCAN_STEP_BYTES,
                    records_max=page.records_left if test is None else 1 << 31,
                )
            except OffsetOutOfRange:
                # Retention has just moved the first offset. Retry.
                continue
            except BrokerError:
                if page.offsets:
                    break
                raise
            offset = found.next_offset
            for batch in found.batches:
                offsets, keys, values = batch.offsets(), batch.keys(), _without_tombstones(batch.values())
                if test is not None:
                    scanned += sum(map(len, values))
                    picked = await self._passing(test, keys, values)
                    offsets, values = [offsets[index] for index in picked], [values[index] for index in picked]
                    keys = None if keys is None else [keys[index] for index in picked]
                if values:
                    page.add(offsets, keys, values, batch.size_bytes if test is None else _size_bytes(keys, values))
                if page.full_at is not None:
                    offset = page.full_at
                    break
            is_enough = page.is_full if test is None else bool(page.offsets)
            if is_enough or scanned > FLYMQ_SCAN_BYTES_MAX or (test is not None and self._is_over()):
                break
        if page.size_bytes >= TURN_BYTES_MIN:
            # Encoding takes as long as reading. Other connections are served in between.
            await self._turns.wait()
        return Fetched(page.offsets, page.values, offset, page.keys if page.keys is not None and any(page.keys) else None)

    async def _passing(self, filter: Filter, keys: list[bytes | None] | None, values: list[bytes]) -> list[int]:
        """Return the indexes of the records that pass. Each turn of the loop runs one slice of one search. A record that takes longer is
        matched on a thread."""
        found: list[int] = []
        for indexes in slices(filter, keys, values):
            if self._is_over():
                break
            async with self._turns.searches:
                if len(indexes) == 1 and len(values[indexes[0]]) > _THREAD_BYTES_MIN:
                    found += await asyncio.to_thread(passing, filter, keys, values, indexes)
                else:
                    found += passing(filter, keys, values, indexes)
                    await asyncio.sleep(0)
        return found


class _Page:
    """Records of one reply."""

    def __init__(self, records_max: int) -> None:
        self.records_max = records_max
        self.offsets: Sequence[int] = range(0)
        """A range as long as they are dense, which costs nothing for a record."""
        self.keys: list[bytes | None] | None = None
        """None if no record so far comes from a batch with keys."""
        self.values: list[bytes] = []
        self.full_at: int | None = None
        """First offset that did not fit."""
        self.size_bytes = FRONT_BYTES

    @property
    def records_left(self) -> int:
        return self.records_max - len(self.offsets)

    @property
    def is_full(self) -> bool:
        return self.full_at is not None or self.records_left == 0 or self.size_bytes >= FLYMQ_FETCH_BYTES_MAX

    def add(self, offsets: Sequence[int], keys: list[bytes | None] | None, values: list[bytes], size_bytes: int) -> None:
        """Add the records that fit. `size_bytes` is the size of all keys and values."""
        size_bytes += self.size_bytes + RECORD_OVERHEAD_BYTES * len(values)
        count = len(values)
        if size_bytes > FLYMQ_FETCH_BYTES_MAX or count > self.records_left:
            count, size_bytes = self._room(offsets, keys, values)
        if count < len(values):
            self.full_at = offsets[count]
        self.size_bytes = size_bytes
        if keys is not None or self.keys is not None:
            before: list[bytes | None] = [None] * len(self.values) if self.keys is None else self.keys
            self.keys = before + ([None] * count if keys is None else keys[:count])
        self.offsets = _joined(self.offsets, offsets[:count])
        self.values += values[:count]

    def _room(self, offsets: Sequence[int], keys: list[bytes | None] | None, values: list[bytes]) -> tuple[int, int]:
        """Return how many records fit, and the size of the reply. The first record may use the whole frame."""
        sizes = [RECORD_OVERHEAD_BYTES + len(value) for value in values]
        if keys is not None:
            sizes = [size + len(key) if key else size for size, key in zip(sizes, keys, strict=True)]
        ends = list(accumulate(sizes, initial=self.size_bytes))
        count = min(bisect_right(ends, FLYMQ_FETCH_BYTES_MAX) - 1, self.records_left)
        if count <= 0 and not self.offsets:
            if ends[1] > FLYMQ_PAYLOAD_BYTES_MAX:
                raise MessageTooLarge(offsets[0], sizes[0] - RECORD_OVERHEAD_BYTES)
            count = 1
        count = max(count, 0)
        return count, ends[count]


def _size_bytes(keys: list[bytes | None] | None, values: list[bytes]) -> int:
    return sum(map(len, values)) + (0 if keys is None else sum(map(len, filter(None, keys))))


def _joined(offsets: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    if not offsets:
        return more
    if isinstance(offsets, range) and isinstance(more, range) and more.start == offsets.stop:
        return range(offsets.start, more.stop)
    return [*offsets, *more]


def _without_tombstones(values: list[bytes | None]) -> list[bytes]:
    """Return the value. FlyMQ cannot express a missing value, so it becomes empty."""
    return cast(list[bytes], values) if all(values) else [value or b"" for value in values]
