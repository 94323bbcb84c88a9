"""What becomes of the record batches of one put: handed to the broker in order, with a window of bytes on their way to the disk.

Each runs on the thread of its call. `take` blocks while the window is full, and then the connection is not read either.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa

from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.broker.publish import Published
from headrace.broker.schema_checks import settled
from headrace.bulk import request
from headrace.bulk.arrays import cast, checked
from headrace.bulk.bridge import Bridge
from headrace.bulk.fault import flight_error
from headrace.bulk.writing import Cutter, Piece, Target, check_rows, column_names
from headrace.errors import BrokerError, InvalidRequest, Unavailable
from headrace.limits import (
    BULK_IN_FLIGHT_BYTES_MAX,
    BULK_IN_FLIGHT_BYTES_MIN,
    BULK_IN_FLIGHT_BYTES_TOTAL,
    DEAD_LETTER_ERROR_BYTES_MAX,
    DEAD_LETTERS_MOVED_MAX,
)

Window: TypeAlias = Callable[[], int]
"""How many bytes of a put may be on their way now."""


def share(puts: int) -> int:
    """The window of each of so many."""
    return max(BULK_IN_FLIGHT_BYTES_MIN, min(BULK_IN_FLIGHT_BYTES_MAX, BULK_IN_FLIGHT_BYTES_TOTAL // max(1, puts)))


class Put(ABC):
    """One put. As a context it is given up by whatever is raised inside; what the broker raised leaves as a Flight error."""

    def __enter__(self) -> Put:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if failure is not None:
            self.abandon()
        if isinstance(failure, BrokerError):
            raise flight_error(failure, self.durable()) from None

    @abstractmethod
    def take(self, batch: pa.RecordBatch) -> None:
        """Raises what the broker raises for this batch or an earlier one."""

    @abstractmethod
    def finish(self) -> object:
        """The answer, once everything is safe."""

    @abstractmethod
    def abandon(self) -> None:
        """It has failed, or whoever sent it has gone: nothing is left behind that nobody will ask for."""

    def durable(self) -> int | None:
        """How many records are safe although the put was given up; None where nothing is unless all is."""
        return None


class Placements:
    """Where records landed, as (partition, base offset, count), joined where they lie side by side."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []
        self.records = 0
        self._last: dict[int, list[int]] = {}

    def add(self, partition: int, offset: int, count: int) -> None:
        if partition < 0:
            return  # among the dead letters: the topic requires a schema that it does not fit
        self.records += count
        last = self._last.get(partition)
        if last is not None and last[1] + last[2] == offset:
            last[2] += count
        else:
            last = self._last[partition] = [partition, offset, count]
            self.found.append(last)


class _Flown(Put):
    """Cuts record batches into pieces and keeps a window of them in flight."""

    def __init__(self, bridge: Bridge, cutter: Cutter, window: Window) -> None:
        self._bridge, self._cutter, self._window = bridge, cutter, window
        self._flying: deque[tuple[concurrent.futures.Future[list[Any]], int]] = deque()
        self._flying_bytes = 0
        self._turn = asyncio.Lock()
        """Held while pieces are handed over: one whose schema check takes longer must not be overtaken."""

    @abstractmethod
    def _hand_over(self, piece: Piece) -> Awaitable[Any]:
        """To the broker, on its loop."""

    @abstractmethod
    def _landed(self, answer: Any) -> None:
        """One piece is safe."""

    async def _send(self, pieces: list[Piece]) -> list[Any]:
        """Hand over all pieces before waiting for the first, so that they keep their order and share a flush. What becomes of each is in
        the answer, up to the first that was refused: a failure of one does not make the others unwritten."""
        handed: list[Awaitable[Any]] = []
        refused: list[BrokerError] = []
        async with self._turn:
            for piece in pieces:
                try:
                    handed.append(await settled(partial(self._hand_over, piece)))
                except BrokerError as error:
                    refused.append(error)
                    break
        return [*await asyncio.gather(*handed, return_exceptions=True), *refused]

    def take(self, batch: pa.RecordBatch) -> None:
        pieces: list[Piece] = []
        size = 0
        for piece in self._cutter.pieces(batch):
            pieces.append(piece)
            size += piece.run.size_bytes
            if size >= self._window() // 4:
                self._fly(pieces, size)
                pieces, size = [], 0
        if pieces:
            self._fly(pieces, size)

    def _fly(self, pieces: list[Piece], size: int) -> None:
        while self._flying and self._flying_bytes + size > self._window():
            self._land()
        self._flying.append((self._bridge.start(lambda: self._send(pieces)), size))
        self._flying_bytes += size

    def _land(self) -> None:
        future, size = self._flying.popleft()
        self._flying_bytes -= size
        failures: list[BaseException] = []
        for outcome in self._bridge.result(future, None):
            if isinstance(outcome, asyncio.CancelledError):
                failures.append(Unavailable("the broker is draining"))
            elif isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                self._landed(outcome)
        if failures:
            raise failures[0]

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def abandon(self) -> None:
        """Wait for what is on its way; the first failure is the one that is reported."""
        while self._flying:
            try:
                self._land()
            except BrokerError:
                pass


class AppendPut(_Flown):
    """Records for everybody to see."""

    def __init__(self, bridge: Bridge, broker: Broker, who: Principal, schema: pa.Schema, target: Target, window: Window) -> None:
        super().__init__(bridge, Cutter(schema, target, lambda topic: bridge.call(lambda: broker.topic(who, topic).partitions)), window)
        self._broker, self._who = broker, who
        self._placements = Placements()

    def _hand_over(self, piece: Piece) -> Awaitable[Published]:
        return self._broker.publish(self._who, piece.topic, piece.run, partition=piece.partition)

    def _landed(self, answer: Published) -> None:
        if answer.placements is None:
            self._placements.add(answer.partition, answer.base_offset, answer.count)
            return
        for partition, offset in answer.placements:
            self._placements.add(partition, offset, 1)

    def finish(self) -> object:
        self._land_all()
        return {"records": self._placements.records, "placements": self._placements.found}

    def durable(self) -> int:
        return self._placements.records


class Handles:
    """The handles that are being written to. Used by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def take(self, handle: str) -> None:
        """Raises `InvalidRequest` if another put has it: the rows of both would be published as one."""
        with self._lock:
            if handle in self._taken:
                raise InvalidRequest(f"stage {handle!r} is being written by another put")
            self._taken.add(handle)

    def leave(self, handle: str) -> None:
        with self._lock:
            self._taken.discard(handle)


class StagePut(_Flown):
    """Records that nobody sees before their handle is published."""

    def __init__(
        self,
        bridge: Bridge,
        broker: Broker,
        who: Principal,
        schema: pa.Schema,
        target: Target,
        window: Window,
        asked: request.Stage,
        handles: Handles,
    ) -> None:
        super().__init__(bridge, Cutter(schema, target, lambda topic: bridge.call(lambda: broker.topic(who, topic).partitions)), window)
        self._broker, self._who, self._asked = broker, who, asked
        self._has_staged = False
        self._handles = handles
        handles.take(asked.handle)

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, failure, trace)
        finally:
            self._handles.leave(self._asked.handle)

    def _hand_over(self, piece: Piece) -> Awaitable[None]:
        asked = self._asked
        staged = self._broker.stage(
            self._who,
            asked.handle,
            piece.topic,
            piece.run,
            app=asked.app,
            run_id=asked.run_id,
            order=asked.order,
            partition=piece.partition,
        )
        self._has_staged = True
        return staged

    def _landed(self, answer: Any) -> None:
        pass

    def abandon(self) -> None:
        """Half of a task is of no use to anybody, and a handle is used once."""
        try:
            self._bridge.wait(self._drop)
        except BrokerError:
            pass  # the broker is draining, or the caller may not any more: it goes with the broker, or expires
        super().abandon()

    async def _drop(self) -> None:
        """Not what another put has staged under the handle: then this one was refused."""
        if self._has_staged:
            await self._broker.drop_staged(self._who, [self._asked.handle])

    def finish(self) -> object:
        self._land_all()
        asked = self._asked
        size = self._bridge.wait(lambda: self._broker.seal(self._who, asked.handle, app=asked.app, run_id=asked.run_id, order=asked.order))
        return {"records": size.records, "size_bytes": size.size_bytes}


class LettersPut(Put):
    """Records that somebody could not read, by their places: they go to the dead letters of their topic, each of them once."""

    _TYPES = (("partition", pa.int64()), ("offset", pa.int64()), ("error", pa.string()), ("reason", pa.string()))

    def __init__(self, bridge: Bridge, broker: Broker, who: Principal, schema: pa.Schema, topic: str) -> None:
        self._bridge, self._broker, self._who, self._topic = bridge, broker, who, topic
        self._moved = 0
        names = [name for name, _ in self._TYPES]
        given = column_names(schema)
        if sorted(given) != sorted(names):
            raise InvalidRequest(f"the columns of dead letters are {', '.join(names)}, not {', '.join(given)[:200]}")

    def take(self, batch: pa.RecordBatch) -> None:
        check_rows(batch)
        columns: dict[str, pa.Array] = {}
        for name, kind in self._TYPES:
            columns[name] = cast(checked(batch.column(name), name), kind, name)
            if name != "error" and columns[name].null_count:
                raise InvalidRequest(f"column {name!r} is null in a row")
        for start in range(0, batch.num_rows, DEAD_LETTERS_MOVED_MAX):
            self._move([array.slice(start, DEAD_LETTERS_MOVED_MAX).to_pylist() for array in columns.values()])

    def _move(self, columns: list[list[Any]]) -> None:
        wanted: dict[str, list[tuple[int, int, str]]] = {}
        for partition, offset, error, reason in zip(*columns, strict=True):
            wanted.setdefault(reason, []).append((partition, offset, (error or "")[:DEAD_LETTER_ERROR_BYTES_MAX]))
        for reason, entries in wanted.items():
            self._moved += self._bridge.wait(self._mover(entries, reason))

    def _mover(self, entries: list[tuple[int, int, str]], reason: str) -> Callable[[], Awaitable[int]]:
        return lambda: self._broker.move_many_to_dead_letters(self._who, self._topic, entries, reason=reason)

    def finish(self) -> object:
        return {"moved": self._moved}

    def abandon(self) -> None:
        """What has been moved stays where it is, and is left alone when it comes again."""
