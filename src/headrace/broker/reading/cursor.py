"""Push delivery: records are delivered as they are written, as fast as the receiver grants credit.

A cursor keeps one number, the next offset, and reads from there when the partition grows or credit arrives. History and live records
use the same order of offsets, so there is no gap and no duplicate between them.

    history ── each cursor reads for itself ──▶ end ──▶ LiveCursors: one read for all cursors at the end of the partition

A cursor that has delivered everything is live: it joins the `LiveCursors` of its partition. A batch that is written then is read once, and
the same `Delivered` goes to all of them, so that their receivers can share its encoding too. A cursor without credit leaves them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from headrace.broker.health import supervise
from headrace.broker.meters import Meter
from headrace.broker.reading.batches import STEP_RECORDS_MAX, unexpired
from headrace.broker.settings import Clock
from headrace.engine.contract import Batch, Engine
from headrace.errors import BrokerError, NotAuthorized, OffsetOutOfRange, UnknownTopic

_READ_BYTES_MIN: Final = 256 * 1024
_READ_BYTES_MAX: Final = 1024 * 1024
"""Large enough to amortize the cost of a read, small enough that cursors do not delay each other."""
DELIVERIES_A_TURN: Final = 100
DELIVERED_BYTES_A_TURN: Final = 1024 * 1024
"""Live cursors, and bytes, that are served in one turn of the event loop. Thousands would delay the other connections."""
BATCHES_A_TURN: Final = 250
"""Batches that a cursor delivers in one turn of the event loop. There are many small ones where records have expired."""
_STEP: Final = "delivery to subscribers"


class Delivered(list[Batch]):
    """Batches handed to a receiver, or to many: all live cursors of a partition hand over the same object."""

    __slots__ = ("_encoded", "records", "size_bytes")

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__(batches)
        self.size_bytes = sum(batch.size_bytes for batch in batches)
        self.records = sum(map(len, batches))
        self._encoded: dict[str, bytes] = {}

    def encoded(self, form: str, encode: Callable[[list[Batch]], bytes]) -> bytes:
        """Return `encode(self)`. The first receiver of a protocol encodes for all others."""
        found = self._encoded.get(form)
        if found is None:
            found = self._encoded[form] = encode(self)
        return found


class Cursor:
    """Position in a partition that advances as records are delivered."""

    def __init__(
        self,
        engine: Engine,
        others: LiveCursors,
        offset: int,
        deliver: Callable[[Delivered], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None,
        closed: Callable[[Cursor], None],
        clock: Clock,
        meter: Meter,
    ) -> None:
        self.topic, self.partition = others.topic, others.partition
        self._engine = engine
        self._others = others
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
        self._is_live = False
        self.wake()

    @property
    def position(self) -> int:
        """The next offset to deliver."""
        return self._held[0].first_offset if self._held else self._read_position

    @property
    def is_live(self) -> bool:
        """Whether everything before the end of the partition is delivered."""
        return self._is_live

    def grant(self, credit_bytes: int) -> None:
        """Add credit for so many bytes."""
        self._credit += credit_bytes
        self.wake()

    def close(self) -> None:
        """Stop delivery. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._held.clear()
            self._others.leave(self)
            self._closed(self)

    def wake(self) -> None:
        """Deliver what there is, or become live."""
        if self._is_live or not self._is_open or self._pump is not None or self._credit <= 0:
            return
        if not self._held and self._is_at_end():
            self._is_live = True
            self._others.join(self)
            return
        self._pump = asyncio.get_running_loop().create_task(self._run())
        supervise(self._engine.health, _STEP, self._pump)

    def _is_at_end(self) -> bool:
        try:
            return self._read_position >= self._engine.bounds(self.topic, self.partition).end
        except UnknownTopic:
            return False  # the read reports it

    async def _run(self) -> None:
        """Deliver until credit or records are used up. A cursor has at most one such task."""
        try:
            while self._is_open and self._credit > 0:
                if self._held:
                    if not self._hand_over():
                        await asyncio.sleep(0)
                elif not await self._read():
                    break
        except BrokerError as error:
            self.fail(error)
        except Exception as failure:
            self.fail(BrokerError(f"delivery failed: {failure!r}"))
            raise
        finally:
            self._pump = None
        self.wake()

    async def _read(self) -> bool:
        """Fill `_held`. Return False at the end of the partition."""
        position = self._read_position
        if self._is_at_end():
            return False
        wanted = min(max(self._credit, _READ_BYTES_MIN), _READ_BYTES_MAX)
        batches, self._read_position = await read_from(self._engine, self.topic, self.partition, position, wanted)
        if self._is_open:
            self._held = unexpired(batches, self._clock())
        if not self._held:
            await asyncio.sleep(0)  # there may be millions of expired records
        return True

    def _hand_over(self) -> bool:
        """Deliver the held batches while there is credit. The last one may overdraw it. Return False if some are left for another turn."""
        count = 0
        for batch in self._held[:BATCHES_A_TURN]:
            if self._credit <= 0:
                break
            self._credit -= batch.size_bytes
            count += 1
        ready, self._held = Delivered(self._held[:count]), self._held[count:]
        self._hand(ready)
        return count < BATCHES_A_TURN

    def _hand(self, delivered: Delivered) -> None:
        self._meter.delivered_records += delivered.records
        self._meter.delivered_bytes += delivered.size_bytes
        self._deliver(delivered)

    # Called by `LiveCursors`.

    def continue_alone(self) -> None:
        """Catch up alone: the others have gone on while this cursor was about to join."""
        self._is_live = False
        self.wake()

    def take(self, delivered: Delivered, last_bytes: int, next_offset: int) -> bool:
        """Deliver what was read for all, up to `next_offset`. Return whether the cursor stays live.

        It leaves when its credit is used up, or does not reach beyond the first byte of the last batch, whose size is `last_bytes`.
        """
        self._read_position = next_offset
        if self._credit > delivered.size_bytes - last_bytes:
            self._credit -= delivered.size_bytes
            if delivered:
                self._hand(delivered)  # which may grant credit
            self._is_live = self._credit > 0
        else:
            self._is_live, self._held = False, list(delivered)
            self.wake()
        return self._is_live

    def fail(self, error: BrokerError) -> None:
        """Stop the cursor and report the error to the receiver, once."""
        if self._is_open:
            self.close()
            if self._failed is not None:
                self._failed(error)


async def read_from(engine: Engine, topic: str, partition: int, offset: int, bytes_max: int) -> tuple[list[Batch], int]:
    """Read below the end of a partition. Return the batches and the offset to continue from."""
    end = engine.bounds(topic, partition).end
    try:
        batches = await engine.read(topic, partition, offset, bytes_max=bytes_max, records_max=STEP_RECORDS_MAX)
    except OffsetOutOfRange as error:
        # Retention deleted records that this reader had not read. Continue at the first offset.
        return [], max(offset, error.first)
    # An empty read below the end means that compaction removed these records.
    return batches, batches[-1].next_offset if batches else end


class LiveCursors:
    """Cursors at the end of a partition."""

    def __init__(self, engine: Engine, topic: str, partition: int, clock: Clock) -> None:
        self.topic, self.partition = topic, partition
        self._engine, self._clock = engine, clock
        self._cursors: dict[Cursor, None] = {}
        self._late: dict[Cursor, None] = {}
        """Cursors that came during a delivery, or know a later end. After the delivery they join, or catch up alone."""
        self._position = 0
        """The next offset of every cursor in `_cursors`."""
        self._pump: asyncio.Task[None] | None = None
        self._unwatch: Callable[[], None] | None = None
        self._failure: Exception | None = None
        """Defect of a receiver."""

    def join(self, cursor: Cursor) -> None:
        if self._unwatch is None:
            self._unwatch = self._engine.watch(self.topic, self.partition, self._wake)
        if not self._cursors and self._pump is None:
            self._position = cursor.position
        if self._pump is None and cursor.position == self._position:
            self._cursors[cursor] = None
        else:
            self._late[cursor] = None
            self._wake()

    def leave(self, cursor: Cursor) -> None:
        self._cursors.pop(cursor, None)
        self._late.pop(cursor, None)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._unwatch is not None and self._pump is None and not self._cursors and not self._late:
            self._unwatch()
            self._unwatch = None

    def _wake(self) -> None:
        """Start a delivery: the end of the partition has moved."""
        if self._pump is None and self._cursors:
            self._pump = asyncio.get_running_loop().create_task(self._run())
            supervise(self._engine.health, _STEP, self._pump)

    async def _run(self) -> None:
        try:
            while self._cursors and self._position < self._engine.bounds(self.topic, self.partition).end:
                batches, next_offset = await read_from(self._engine, self.topic, self.partition, self._position, _READ_BYTES_MIN)
                await self._deliver(unexpired(batches, self._clock()), next_offset)
                self._position = next_offset
                self._admit_late()
        except BrokerError as error:
            self._fail(error)
        except Exception as failure:
            self._fail(BrokerError(f"delivery failed: {failure!r}"))
            raise
        finally:
            self._pump = None
            self._admit_late()
            self._end_if_empty()
        if self._failure is not None:
            defect, self._failure = self._failure, None
            raise defect

    async def _deliver(self, batches: list[Batch], next_offset: int) -> None:
        delivered = Delivered(batches)
        last_bytes = batches[-1].size_bytes if batches else 0
        a_turn = max(1, min(DELIVERIES_A_TURN, DELIVERED_BYTES_A_TURN // max(1, delivered.size_bytes)))
        for count, cursor in enumerate(list(self._cursors)):
            if count and count % a_turn == 0:
                await asyncio.sleep(0)
            if cursor in self._cursors and not self._hand_over(cursor, delivered, last_bytes, next_offset):
                self._cursors.pop(cursor, None)

    def _hand_over(self, cursor: Cursor, delivered: Delivered, last_bytes: int, next_offset: int) -> bool:
        try:
            return cursor.take(delivered, last_bytes, next_offset)
        except Exception as failure:
            # One receiver's defect must not end the others.
            self._failure = failure
            cursor.fail(BrokerError(f"delivery failed: {failure!r}"))
            return False

    def _admit_late(self) -> None:
        late, self._late = self._late, {}
        for cursor in late:
            if cursor.position == self._position:
                self._cursors[cursor] = None
            else:
                cursor.continue_alone()

    def _fail(self, error: BrokerError) -> None:
        for cursor in [*self._cursors, *self._late]:
            cursor.fail(error)


class Cursors:
    """All open cursors. A drain or the deletion of a topic ends them."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._open: dict[Cursor, Callable[[], None]] = {}
        """Each cursor with a check that raises when its reader loses the permission."""
        self._live: WeakValueDictionary[tuple[str, int], LiveCursors] = WeakValueDictionary()
        """Each lives as long as a cursor of its partition."""

    def start(
        self,
        topic: str,
        partition: int,
        offset: int,
        deliver: Callable[[Delivered], None],
        *,
        credit_bytes: int,
        failed: Callable[[BrokerError], None] | None,
        check: Callable[[], None],
        meter: Meter,
    ) -> Cursor:
        bounds = self._engine.bounds(topic, partition)
        if not bounds.first <= offset <= bounds.end:
            raise OffsetOutOfRange(wanted=offset, first=bounds.first, end=bounds.end)
        live = self._live.get((topic, partition))
        if live is None:
            live = self._live[topic, partition] = LiveCursors(self._engine, topic, partition, self._clock)
        cursor = Cursor(
            self._engine,
            live,
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
        for place in [place for place in self._live if place[0] == gone.topic]:
            del self._live[place]

    def drain(self) -> None:
        for cursor in list(self._open):
            cursor.close()
