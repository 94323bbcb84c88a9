"""Idempotent producers: a run that is sent twice lands once.

A producer numbers its records from any number it likes, without gaps. It counts within what it addresses: one partition, or the
whole topic where it leaves the choice of the partition to the broker. The last `PRODUCER_EPOCHS_REMEMBERED` runs of each such
scope are remembered with their places. A resend need not be cut as the original was: what is known of it is answered from
memory, or from the run still in flight, and only the rest is appended.

What is remembered is written to the table `__producers` in the same append as the records themselves, so that after a crash the
two agree. Each scope owns a ring of rows, one for each remembered run, so that a row can be written without knowing where the
runs before it, which may still be in flight, will land.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import msgspec

from headrace.broker.names import check_name
from headrace.broker.publishing.publish import Placing, ProducerStamp, Published, Publisher, Route
from headrace.broker.tables import TableLog
from headrace.broker.timers import Clock
from headrace.engine.contract import Ack, Appended, Engine
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, OutOfSequence
from headrace.limits import PRODUCER_EPOCHS_REMEMBERED
from headrace.records import AnyBatch

ANY_PARTITION: Final = -1
"""The scope of a producer that leaves the choice of the partition to the broker."""

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
    """A run that landed, or is about to."""

    sequence: int
    count: int
    slot: int
    outcome: Published | asyncio.Future[Published]

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
        self.next_slot = (batch.slot + 1) % PRODUCER_EPOCHS_REMEMBERED

    def trim(self) -> None:
        """Forget the oldest beyond what the ring holds; a run in flight is never forgotten."""
        while len(self.batches) > PRODUCER_EPOCHS_REMEMBERED and not self.batches[0].is_pending:
            self.batches.popleft()

    def drop(self, failed: _Known) -> None:
        """A run did not land. When nothing is in flight any more, the count goes back to the last run that did."""
        self.batches.remove(failed)
        if self.batches and not any(batch.is_pending for batch in self.batches):
            self.next_sequence = self.batches[-1].next_sequence
            self.next_slot = (self.batches[-1].slot + 1) % PRODUCER_EPOCHS_REMEMBERED

    def pieces(self, sequence: int, count: int) -> list[tuple[_Known, int, int]] | None:
        """The known runs that hold these records, each with the range of its own records; None if any is not remembered."""
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
    """What is remembered of every idempotent producer."""

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
        """Read the table. Rows of topics that are no more, left by a crash in the middle of a deletion, are removed."""
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
        """As `Publisher.publish`. Raises `OutOfSequence` after a gap, and for a resend that is no longer remembered."""
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
        pieces = scope.pieces(stamp.sequence, known) if known > 0 else None
        if pieces is None:
            raise OutOfSequence(producer=stamp.id, wanted=scope.next_sequence, got=stamp.sequence)
        answers = [_part(piece.outcome, start, stop) for piece, start, stop in pieces]
        if known < len(batch):
            rest = batch[known : len(batch)]
            answers.append(self._append(key, scope, route, rest, partition, scope.next_sequence, ack))
        return answers[0] if len(answers) == 1 else _joined(answers)

    def _begin(
        self, key: _ScopeKey, route: Route, batch: AnyBatch, partition: int | None, stamp: ProducerStamp, ack: Ack | None
    ) -> asyncio.Future[Published]:
        """A producer not heard of may start at any number: it may have been forgotten for its silence."""
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
        error = staged.exception()
        if error is None:
            landed = placing.landed(staged.result())
            known.outcome = landed
            scope.trim()
            outcome.set_result(landed)
            return
        scope.drop(known)
        if not scope.batches and self._scopes.get(key) is scope:
            del self._scopes[key]
        outcome.set_exception(error)

    async def expire(self) -> None:
        """Forget the producers that were silent for too long."""
        before = self._clock() - self._idle_ms
        await self._forget(
            [key for key, scope in self._scopes.items() if scope.used_at < before and not any(batch.is_pending for batch in scope.batches)]
        )

    async def topic_gone(self, topic: str) -> None:
        """Forget what was published to the topic. Runs in flight count too: their rows were staged before these tombstones."""
        await self._forget([key for key in self._scopes if key[1] == topic])

    async def _forget(self, keys: list[_ScopeKey]) -> None:
        scopes = {key: self._scopes.pop(key) for key in keys}
        slots = {(*key, batch.slot) for key, scope in scopes.items() for batch in scope.batches}
        try:
            await self._log.put([(row_key, None) for row_key in slots])
        except BrokerError:
            # The rows are still in the table. A producer that began anew now would mix its rows with them.
            for key, scope in scopes.items():
                self._scopes.setdefault(key, scope)
            raise

    def _show(self, key: _RowKey, row: _Row | None) -> None:
        """Only what is read at the start passes here: later, the scopes know better than the log."""
        if row is None:
            self._loading.pop(key, None)
        else:
            self._loading[key] = row


def _part(outcome: Published | asyncio.Future[Published], start: int, stop: int) -> asyncio.Future[Published]:
    """Some records of a run, as a future of its own: a caller that cancels it harms nobody else."""
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
