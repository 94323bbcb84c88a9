"""Push delivery: records are delivered as they are written, as fast as the receiver grants credit.

A cursor keeps one number, the next offset, and reads from there when the partition grows or credit arrives. History and live records
use the same path, so there is no gap and no duplicate between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from headrace.broker.health import supervise
from headrace.broker.meters import Meter
from headrace.broker.reading.batches import size_bytes, unexpired
from headrace.broker.settings import Clock
from headrace.engine.contract import Batch, Engine
from headrace.errors import BrokerError, NotAuthorized, OffsetOutOfRange, UnknownTopic

_READ_BYTES_MIN: Final = 256 * 1024
_READ_BYTES_MAX: Final = 1024 * 1024
"""Large enough to amortize the cost of a read, small enough that cursors do not delay each other."""


class Cursor:
    """Position in a partition that advances as records are delivered."""

    def __init__(
        self,
        engine: Engine,
        topic: str,
        partition: int,
        offset: int,
        deliver: Callable[[list[Batch]], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None,
        closed: Callable[[Cursor], None],
        clock: Clock,
        meter: Meter,
    ) -> None:
        self.topic, self.partition = topic, partition
        self._engine = engine
        self._deliver = deliver
        self._failed = failed
        self._closed = closed
        self._clock = clock
        self._meter = meter
        self._read_position = offset
        self._credit = credit_bytes
        self._held: list[Batch] = []
        self._pump: asyncio.Task[None] | None = None
        self._is_open = True
        self._unwatch = engine.watch(topic, partition, self._wake)
        self._wake()

    @property
    def position(self) -> int:
        """The next offset to deliver."""
        return self._held[0].first_offset if self._held else self._read_position

    def grant(self, credit_bytes: int) -> None:
        """Add credit for so many bytes."""
        self._credit += credit_bytes
        self._wake()

    def close(self) -> None:
        """Stop delivery. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._held.clear()
            self._unwatch()
            self._closed(self)

    def _wake(self) -> None:
        if self._is_open and self._pump is None and self._credit > 0:
            self._pump = asyncio.get_running_loop().create_task(self._run())
            supervise(self._engine.health, "delivery to subscribers", self._pump)

    async def _run(self) -> None:
        """Deliver until credit or records are used up. A cursor has at most one such task."""
        try:
            while self._is_open and self._credit > 0:
                if self._held:
                    self._hand_over()
                elif not await self._read():
                    break
        except BrokerError as error:
            self.fail(error)
        except Exception as failure:
            self.fail(BrokerError(f"delivery failed: {failure!r}"))
            raise
        finally:
            self._pump = None

    async def _read(self) -> bool:
        """Fill `_held`. Return False at the end of the partition; the watch wakes the cursor when the end moves."""
        position, end = self._read_position, self._engine.bounds(self.topic, self.partition).end
        if position >= end:
            return False
        wanted = min(max(self._credit, _READ_BYTES_MIN), _READ_BYTES_MAX)
        try:
            batches = await self._engine.read(self.topic, self.partition, position, bytes_max=wanted)
        except OffsetOutOfRange as error:
            # Retention deleted records that this reader had not read. Continue at the first offset.
            self._read_position = max(position, error.first)
            return position < error.first
        # An empty read below the end means that compaction removed these records.
        self._read_position = batches[-1].next_offset if batches else end
        if self._is_open:
            self._held = unexpired(batches, self._clock())
        return True

    def _hand_over(self) -> None:
        """Deliver the held batches while there is credit. The last one may overdraw it."""
        count = 0
        for batch in self._held:
            if self._credit <= 0:
                break
            size = size_bytes(batch)
            self._credit -= size
            self._meter.delivered_records += len(batch)
            self._meter.delivered_bytes += size
            count += 1
        ready, self._held = self._held[:count], self._held[count:]
        self._deliver(ready)

    def fail(self, error: BrokerError) -> None:
        """Stop the cursor and report the error to the receiver, once."""
        if self._is_open:
            self.close()
            if self._failed is not None:
                self._failed(error)


class Cursors:
    """All open cursors. A drain or the deletion of a topic ends them."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._open: dict[Cursor, Callable[[], None]] = {}
        """Each cursor with a check that raises when its reader loses the permission."""

    def start(
        self,
        topic: str,
        partition: int,
        offset: int,
        deliver: Callable[[list[Batch]], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None,
        check: Callable[[], None],
        meter: Meter,
    ) -> Cursor:
        bounds = self._engine.bounds(topic, partition)
        if not bounds.first <= offset <= bounds.end:
            raise OffsetOutOfRange(wanted=offset, first=bounds.first, end=bounds.end)
        cursor = Cursor(
            self._engine,
            topic,
            partition,
            offset,
            deliver,
            credit_bytes=credit_bytes,
            failed=failed,
            closed=self._forget,
            clock=self._clock,
            meter=meter,
        )
        self._open[cursor] = check
        return cursor

    def _forget(self, cursor: Cursor) -> None:
        self._open.pop(cursor, None)

    def recheck(self) -> None:
        """Check the permissions of all cursors again after the rules changed."""
        for cursor, check in list(self._open.items()):
            try:
                check()
            except NotAuthorized as error:
                cursor.fail(error)

    def topic_gone(self, gone: UnknownTopic) -> None:
        for cursor in [cursor for cursor in self._open if cursor.topic == gone.topic]:
            cursor.fail(gone)

    def drain(self) -> None:
        for cursor in list(self._open):
            cursor.close()
