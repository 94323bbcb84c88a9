"""Idempotent producers: a batch that is sent twice is stored once.

A producer numbers its records without gaps, from any first number. The numbers count within a scope: one partition, or the whole topic
where the broker chooses the partition. The broker remembers the last `PRODUCER_BATCHES_REMEMBERED` batches of each scope with their
offsets. A resend may be split differently from the original: the known records are answered from memory or from the batch still in
flight, and only the rest is appended.

The memory is the table `__producers`. Its rows are part of the same append as the records, so both agree after a crash. Each scope owns
a ring of rows, one per remembered batch. A row can therefore be written before the offsets of earlier batches, which may still be in
flight, are known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import msgspec

from headrace.broker.publishing.publish import Placing, ProducerStamp, Publisher, Route
from headrace.broker.publishing.published import Published
from headrace.broker.settings import Clock
from headrace.broker.tables import TableLog
from headrace.broker.topics import check_name
from headrace.engine.contract import Ack, Appended, Engine
from headrace.errors import AppendUnknown, BrokerError, InvalidRequest, LimitExceeded, OutOfSequence
from headrace.limits import PRODUCER_BATCHES_REMEMBERED
from headrace.records import AnyBatch

ANY_PARTITION: Final = -1
"""Scope of a producer that leaves the choice of the partition to the broker."""

_ScopeKey: TypeAlias = tuple[str, str, int]
"""Producer, topic, partition or `ANY_PARTITION`."""
_RowKey: TypeAlias = tuple[str, str, int, int]
"""A scope and a slot of its ring."""


class _Row(msgspec.Struct, array_like=True):
    sequence: int
    count: int
    timestamp: int
    partition: int
    base_offset: int
    placements: list[tuple[int, int]] | None = None

    @classmethod
    def of(cls, sequence: int, landed: Published) -> _Row:
        return cls(sequence, landed.count, landed.timestamp, landed.partition, landed.base_offset, landed.placements)

    def published(self) -> Published:
        return Published(self.partition, self.base_offset, self.count, self.timestamp, self.placements)


@dataclass(slots=True, eq=False)
class _Known:
    """A batch that is stored or in flight."""

    sequence: int
    count: int
    slot: int
    outcome: Published | asyncio.Future[Published]
    doubt: AppendUnknown | None = None
    """Set while the log has not answered in time: a resend gets the same error until it does."""

    @property
    def next_sequence(self) -> int:
        return self.sequence + self.count

    @property
    def is_pending(self) -> bool:
        return not isinstance(self.outcome, Published)


@dataclass(slots=True)
class _Scope:
    batches: deque[_Known] = field(default_factory=deque)
    next_sequence: int = 0
    next_slot: int = 0
    used_at: int = 0

    def add(self, batch: _Known) -> None:
        self.batches.append(batch)
        self.next_sequence = batch.next_sequence
        self.next_slot = (batch.slot + 1) % PRODUCER_BATCHES_REMEMBERED

    def trim(self) -> None:
        """Forget the oldest batches beyond the size of the ring. A batch in flight is never forgotten."""
        while len(self.batches) > PRODUCER_BATCHES_REMEMBERED and not self.batches[0].is_pending:
            self.batches.popleft()

    def drop(self, failed: _Known) -> None:
        """Remove a batch whose append failed. With nothing left in flight, the sequence returns to the last stored batch."""
        self.batches.remove(failed)
        if self.batches and not any(batch.is_pending for batch in self.batches):
            self.next_sequence = self.batches[-1].next_sequence
            self.next_slot = (self.batches[-1].slot + 1) % PRODUCER_BATCHES_REMEMBERED

    def covered(self, sequence: int, count: int) -> list[tuple[_Known, int, int]] | None:
        """Return the known batches that hold these records, each with the range of its own records; None if any is not remembered."""
        found: list[tuple[_Known, int, int]] = []
        wanted, end = sequence, sequence + count
        for batch in self.batches:
            if batch.sequence <= wanted < batch.next_sequence:
                stop = min(end, batch.next_sequence)
                found.append((batch, wanted - batch.sequence, stop - batch.sequence))
                wanted = stop
        return found if wanted == end else None


class _ProducerLog(TableLog[_RowKey, _Row]):
    def __init__(self, engine: Engine, show: Callable[[_RowKey, _Row | None], None]) -> None:
        super().__init__(engine, "__producers", _RowKey, _Row)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._show = show

    def show(self, key: _RowKey, value: _Row | None) -> None:
        self._show(key, value)


class Producers:
    """Memory of all idempotent producers."""

    def __init__(self, engine: Engine, publisher: Publisher, *, clock: Clock, scopes_max: int, idle_ms: int) -> None:
        self._publisher = publisher
        self._clock = clock
        self._scopes_max = scopes_max
        self._idle_ms = idle_ms
        self._scopes: dict[_ScopeKey, _Scope] = {}
        self._loading: dict[_RowKey, _Row] = {}
        self._log = _ProducerLog(engine, self._show)

    def __len__(self) -> int:
        return len(self._scopes)

    async def load(self, exists: Callable[[str], bool]) -> None:
        """Read the table. Remove rows of topics that no longer exist, left by a crash during a deletion."""
        await self._log.load()
        orphans = [key for key in self._loading if not exists(key[1])]
        for key in orphans:
            del self._loading[key]
        for key, row in sorted(self._loading.items(), key=lambda item: item[1].sequence):
            scope = self._scopes.setdefault(key[:3], _Scope())
            scope.add(_Known(row.sequence, row.count, key[3], row.published()))
            scope.used_at = max(scope.used_at, row.timestamp)
        self._loading.clear()
        await self._log.put([(key, None) for key in orphans])

    def publish(
        self, route: Route, batch: AnyBatch, partition: int | None, stamp: ProducerStamp, ack: Ack | None
    ) -> asyncio.Future[Published]:
        """Publish as `Publisher.publish` does. Raises `OutOfSequence` after a gap, and for a resend that is no longer remembered."""
        if stamp.sequence < 0:
            raise InvalidRequest(f"producer {stamp.id}: sequence {stamp.sequence} is negative")
        key = (stamp.id, route.topic, ANY_PARTITION if partition is None else partition)
        scope = self._scopes.get(key)
        if scope is None:
            return self._begin(key, route, batch, partition, stamp, ack)
        scope.used_at = self._clock()
        if stamp.sequence == scope.next_sequence:
            return self._append(key, scope, route, batch, partition, stamp.sequence, ack)
        known = min(len(batch), scope.next_sequence - stamp.sequence)
        covered = scope.covered(stamp.sequence, known) if known > 0 else None
        if covered is None:
            raise OutOfSequence(producer=stamp.id, wanted=scope.next_sequence, got=stamp.sequence)
        for known_batch, _, _ in covered:
            if known_batch.doubt is not None:
                raise known_batch.doubt
        answers = [_part(known_batch.outcome, start, stop) for known_batch, start, stop in covered]
        if known < len(batch):
            rest = batch[known : len(batch)]
            answers.append(self._append(key, scope, route, rest, partition, scope.next_sequence, ack))
        return answers[0] if len(answers) == 1 else _joined(answers)

    def _begin(
        self, key: _ScopeKey, route: Route, batch: AnyBatch, partition: int | None, stamp: ProducerStamp, ack: Ack | None
    ) -> asyncio.Future[Published]:
        """Accept any first sequence number from an unknown producer: the broker may have forgotten it after a long idle time."""
        check_name("producer", stamp.id)
        if len(self._scopes) >= self._scopes_max:
            raise LimitExceeded(f"{self._scopes_max} idempotent producers are remembered already")
        scope = _Scope(next_sequence=stamp.sequence, used_at=self._clock())
        answer = self._append(key, scope, route, batch, partition, stamp.sequence, ack)
        self._scopes[key] = scope
        return answer

    def _append(
        self, key: _ScopeKey, scope: _Scope, route: Route, batch: AnyBatch, partition: int | None, sequence: int, ack: Ack | None
    ) -> asyncio.Future[Published]:
        placing = Placing(route, batch, partition)
        slot = scope.next_slot

        def row(appended: Sequence[Appended]) -> list[tuple[_RowKey, _Row | None]]:
            return [((*key, slot), _Row.of(sequence, placing.landed(appended)))]

        staged = self._publisher.append([*placing.writes, self._log.write(row)], ack)
        outcome: asyncio.Future[Published] = staged.get_loop().create_future()
        known = _Known(sequence, len(batch), slot, outcome)
        scope.add(known)
        staged.add_done_callback(partial(self._landed, key, scope, known, placing, outcome))
        return _part(outcome, 0, len(batch))

    def _landed(
        self,
        key: _ScopeKey,
        scope: _Scope,
        known: _Known,
        placing: Placing,
        outcome: asyncio.Future[Published],
        staged: asyncio.Future[list[Appended]],
    ) -> None:
        error, known.doubt = staged.exception(), None
        if error is None:
            landed = placing.landed(staged.result())
            known.outcome = landed
            scope.trim()
            outcome.set_result(landed)
            return
        if isinstance(error, AppendUnknown) and error.outcome is not None:
            # The batch keeps its place, so that a resend does not write the records again.
            known.doubt, known.outcome = error, asyncio.get_running_loop().create_future()
            known.outcome.add_done_callback(lambda done: done.exception())
            error.outcome.add_done_callback(partial(self._landed, key, scope, known, placing, known.outcome))
            outcome.set_exception(error)
            return
        scope.drop(known)
        if not scope.batches and self._scopes.get(key) is scope:
            del self._scopes[key]
        outcome.set_exception(error)

    async def expire(self) -> None:
        """Forget producers that have been idle for too long."""
        before = self._clock() - self._idle_ms
        await self._forget(
            [key for key, scope in self._scopes.items() if scope.used_at < before and not any(batch.is_pending for batch in scope.batches)]
        )

    async def topic_gone(self, topic: str) -> None:
        """Forget what was published to the topic, including batches in flight: their rows were staged before these tombstones."""
        await self._forget([key for key in self._scopes if key[1] == topic])

    async def _forget(self, keys: list[_ScopeKey]) -> None:
        scopes = {key: self._scopes.pop(key) for key in keys}
        slots = {(*key, batch.slot) for key, scope in scopes.items() for batch in scope.batches}
        try:
            await self._log.put([(row_key, None) for row_key in slots])
        except BrokerError:
            # The rows are still in the table. A producer that starts over now would mix its rows with them.
            for key, scope in scopes.items():
                self._scopes.setdefault(key, scope)
            raise

    def _show(self, key: _RowKey, row: _Row | None) -> None:
        """Collect the rows read at start. Later changes are already in the scopes."""
        if row is None:
            self._loading.pop(key, None)
        else:
            self._loading[key] = row


def _part(outcome: Published | asyncio.Future[Published], start: int, stop: int) -> asyncio.Future[Published]:
    """Return some records of a batch as a separate future, so that a caller can cancel it without affecting others."""
    answer: asyncio.Future[Published] = asyncio.get_running_loop().create_future()
    if isinstance(outcome, Published):
        answer.set_result(_cut(outcome, start, stop))
        return answer

    def landed(done: asyncio.Future[Published]) -> None:
        error = done.exception()
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(_cut(done.result(), start, stop))

    outcome.add_done_callback(landed)
    return answer


def _joined(answers: Sequence[asyncio.Future[Published]]) -> asyncio.Future[Published]:
    async def wait() -> Published:
        return _join(await asyncio.gather(*answers))

    return asyncio.get_running_loop().create_task(wait())


def _cut(published: Published, start: int, stop: int) -> Published:
    if start == 0 and stop == published.count:
        return published
    partition, offset = published.placement(start)
    placements = None if published.placements is None else published.placements[start:stop]
    return Published(partition, offset, stop - start, published.timestamp, placements)


def _join(parts: Sequence[Published]) -> Published:
    placements = [part.placement(index) for part in parts for index in range(part.count)]
    partition, offset = placements[0]
    whole = placements == [(partition, offset + index) for index in range(len(placements))]
    return Published(partition, offset, len(placements), parts[0].timestamp, None if whole else placements)
