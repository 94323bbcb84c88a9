"""DoPut: the record batches of one put go to the broker in order, with a window of unacknowledged bytes.

Each put runs on the thread of its call. `take` blocks while the window is full, which stops reading the connection.
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

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.published import Published
from headrace.broker.schema_checks import settled
from headrace.errors import BrokerError, InvalidRequest, Unavailable
from headrace.flight import request
from headrace.flight.arrays import cast, checked
from headrace.flight.bridge import Bridge
from headrace.flight.errors import flight_error
from headrace.flight.put_schema import column_names
from headrace.flight.writing import Chunk, Splitter, Target, check_rows
from headrace.limits import (
    DEAD_LETTER_ERROR_BYTES_MAX,
    DEAD_LETTERS_MOVED_MAX,
    FLIGHT_IN_FLIGHT_BYTES_MAX,
    FLIGHT_IN_FLIGHT_BYTES_MIN,
    FLIGHT_IN_FLIGHT_BYTES_TOTAL,
)

Window: TypeAlias = Callable[[], int]
"""Returns the unacknowledged bytes that a put may have now."""


def window_bytes(puts: int) -> int:
    """Return the window of each of `puts` concurrent puts."""
    return max(FLIGHT_IN_FLIGHT_BYTES_MIN, min(FLIGHT_IN_FLIGHT_BYTES_MAX, FLIGHT_IN_FLIGHT_BYTES_TOTAL // max(1, puts)))


class Put(ABC):
    """One put. As a context manager, an exception abandons it, and a `BrokerError` becomes a Flight error."""

    def __enter__(self) -> Put:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if failure is not None:
            self.abandon()
        if isinstance(failure, BrokerError):
            raise flight_error(failure, self.durable()) from None

    @abstractmethod
    def take(self, batch: pa.RecordBatch) -> None:
        """Add a record batch. Raises the error of this batch or an earlier one."""

    @abstractmethod
    def finish(self) -> object:
        """Return the reply once everything is durable."""

    @abstractmethod
    def abandon(self) -> None:
        """Clean up after a failure or a lost peer."""

    def durable(self) -> int | None:
        """Return the durable records of an abandoned put; None if a put is all or nothing."""
        return None


class Placements:
    """Positions of the written records as (partition, base offset, count), with adjacent ones merged."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []
        self.records = 0
        self._last: dict[int, list[int]] = {}

    def add(self, partition: int, offset: int, count: int) -> None:
        if partition < 0:
            return  # a dead letter: the record does not match the schema of the topic
        self.records += count
        last = self._last.get(partition)
        if last is not None and last[1] + last[2] == offset:
            last[2] += count
        else:
            last = self._last[partition] = [partition, offset, count]
            self.found.append(last)


class _PipelinedPut(Put):
    """Splits record batches into chunks and keeps a window of them in flight."""

    def __init__(self, bridge: Bridge, splitter: Splitter, window: Window) -> None:
        self._bridge, self._splitter, self._window = bridge, splitter, window
        self._in_flight: deque[tuple[concurrent.futures.Future[list[Any]], int]] = deque()
        self._in_flight_bytes = 0
        self._turn = asyncio.Lock()
        """Held while chunks go to the broker: a slow schema check must not change their order."""

    @abstractmethod
    def _hand_over(self, chunk: Chunk) -> Awaitable[Any]:
        """Pass a chunk to the broker, on its event loop."""

    @abstractmethod
    def _written(self, answer: Any) -> None:
        """Record that a chunk is durable."""

    async def _send(self, chunks: list[Chunk]) -> list[Any]:
        """Pass all chunks to the broker before waiting for the first, so that they keep their order and share a flush. Return the outcome
        of each chunk up to the first rejected one: a failure does not undo the others."""
        handed: list[Awaitable[Any]] = []
        rejected: list[BrokerError] = []
        async with self._turn:
            for chunk in chunks:
                try:
                    handed.append(await settled(partial(self._hand_over, chunk)))
                except BrokerError as error:
                    rejected.append(error)
                    break
        return [*await asyncio.gather(*handed, return_exceptions=True), *rejected]

    def take(self, batch: pa.RecordBatch) -> None:
        chunks: list[Chunk] = []
        size = 0
        for chunk in self._splitter.chunks(batch):
            chunks.append(chunk)
            size += chunk.batch.size_bytes
            if size >= self._window() // 4:
                self._start(chunks, size)
                chunks, size = [], 0
        if chunks:
            self._start(chunks, size)

    def _start(self, chunks: list[Chunk], size: int) -> None:
        while self._in_flight and self._in_flight_bytes + size > self._window():
            self._wait_oldest()
        self._in_flight.append((self._bridge.start(lambda: self._send(chunks)), size))
        self._in_flight_bytes += size

    def _wait_oldest(self) -> None:
        future, size = self._in_flight.popleft()
        self._in_flight_bytes -= size
        failures: list[BaseException] = []
        for outcome in self._bridge.result(future, None):
            if isinstance(outcome, asyncio.CancelledError):
                failures.append(Unavailable("the broker is draining"))
            elif isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                self._written(outcome)
        if failures:
            raise failures[0]

    def _wait_all(self) -> None:
        while self._in_flight:
            self._wait_oldest()

    def abandon(self) -> None:
        """Wait for the chunks in flight and ignore further failures: the first one is reported."""
        while self._in_flight:
            try:
                self._wait_oldest()
            except BrokerError:
                pass


class AppendPut(_PipelinedPut):
    """Put of records that are visible immediately."""

    def __init__(self, bridge: Bridge, broker: Broker, who: Principal, schema: pa.Schema, target: Target, window: Window) -> None:
        super().__init__(
            bridge,
            Splitter(schema, target, lambda topic: bridge.find(broker, lambda: broker.topic(who, topic).partitions), broker.placement),
            window,
        )
        self._broker, self._who = broker, who
        self._placements = Placements()

    def _hand_over(self, chunk: Chunk) -> Awaitable[Published]:
        return self._broker.publish(self._who, chunk.topic, chunk.batch, partition=chunk.partition)

    def _written(self, answer: Published) -> None:
        if answer.placements is None:
            self._placements.add(answer.partition, answer.base_offset, answer.count)
            return
        for partition, offset in answer.placements:
            self._placements.add(partition, offset, 1)

    def finish(self) -> object:
        self._wait_all()
        return {"records": self._placements.records, "placements": self._placements.found}

    def durable(self) -> int:
        return self._placements.records


class Handles:
    """Handles with a put in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def take(self, handle: str) -> None:
        """Reserve a handle. Raises `InvalidRequest` if another put uses it: publishing would mix the rows of both."""
        with self._lock:
            if handle in self._taken:
                raise InvalidRequest(f"stage {handle!r} is being written by another put")
            self._taken.add(handle)

    def leave(self, handle: str) -> None:
        with self._lock:
            self._taken.discard(handle)


class StagePut(_PipelinedPut):
    """Put of records that become visible when their handle is published."""

    def __init__(
        self,
        bridge: Bridge,
        broker: Broker,
        who: Principal,
        schema: pa.Schema,
        target: Target,
        window: Window,
        stage: request.Stage,
        handles: Handles,
    ) -> None:
        super().__init__(
            bridge,
            Splitter(schema, target, lambda topic: bridge.find(broker, lambda: broker.topic(who, topic).partitions), broker.placement),
            window,
        )
        self._broker, self._who, self._stage = broker, who, stage
        self._has_staged = False
        self._handles = handles
        handles.take(stage.handle)

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        try:
            super().__exit__(kind, failure, trace)
        finally:
            self._handles.leave(self._stage.handle)

    def _hand_over(self, chunk: Chunk) -> Awaitable[None]:
        stage = self._stage
        staged = self._broker.stage(
            self._who,
            stage.handle,
            chunk.topic,
            chunk.batch,
            writer=stage.writer,
            epoch=stage.epoch,
            order=stage.order,
            partition=chunk.partition,
        )
        self._has_staged = True
        return staged

    def _written(self, answer: Any) -> None:
        pass

    def abandon(self) -> None:
        """Drop the staged records: a handle is used once."""
        try:
            self._bridge.wait(self._drop)
        except BrokerError:
            pass  # the broker is draining or the caller has lost the permission; the stage expires
        super().abandon()

    async def _drop(self) -> None:
        """Drop only what this put has staged: the broker may have rejected it because of another put."""
        if self._has_staged:
            await self._broker.drop_staged(self._who, [self._stage.handle])

    def finish(self) -> object:
        self._wait_all()
        stage = self._stage
        size = self._bridge.wait(
            lambda: self._broker.seal(self._who, stage.handle, writer=stage.writer, epoch=stage.epoch, order=stage.order)
        )
        return {"records": size.records, "size_bytes": size.size_bytes}


class LettersPut(Put):
    """Put of the positions of unreadable records, which move to the dead letters of their topic, each once."""

    _TYPES = (("partition", pa.int64()), ("offset", pa.int64()), ("error", pa.string()), ("reason", pa.string()))

    def __init__(self, bridge: Bridge, broker: Broker, who: Principal, schema: pa.Schema, topic: str) -> None:
        self._bridge, self._broker, self._who, self._topic = bridge, broker, who, topic
        self._moved = 0
        names = [name for name, _ in self._TYPES]
        given = column_names(schema)
        if sorted(given) != sorted(names):
            raise InvalidRequest(f"dead letters: expected the columns {', '.join(names)}, got {', '.join(given)[:200]}")

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
        """Keep the moved records: moving them again has no effect."""
