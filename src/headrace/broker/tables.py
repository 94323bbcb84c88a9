"""Keyed tables, each a compacted internal topic with a view in memory.

A change is an append: it is as durable as a record and can be part of the append it belongs to (`TableLog.write`), so that both happen
or neither. Keys and values are JSON, so that a dump of the topic is readable. A table shows only durable changes: a change appears
after its append has resolved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from headrace.engine.contract import Ack, Appended, Cleanup, Engine, TopicConfig, Write, known, when_known
from headrace.errors import BrokerError
from headrace.records import RecordBatch

K = TypeVar("K", bound=tuple[object, ...])
V = TypeVar("V")

_CONFIG = TopicConfig(ack=Ack.DURABLE, cleanup=Cleanup.COMPACT, segment_bytes=16 * 1024 * 1024, tombstone_retention_ms=3600 * 1000)
_READ_BYTES = 4 * 1024 * 1024
_STEP: Final = "following the tables of the coordinator"
_PAUSE_SECONDS: Final = 0.5

Changes: TypeAlias = Iterable[tuple[K, V | None]]
"""Keys and their new values; None deletes."""
Staged: TypeAlias = asyncio.Future[list[Appended]]


class TableLog(Generic[K, V]):
    """The log of a table. The subclass holds the view in memory: `show` is called for each change, in order.

    `key_type` is a tuple type, `value_type` any type that msgspec can decode. Values that are mostly bytes should use MessagePack
    (`is_binary`): JSON makes them a third larger.
    """

    def __init__(self, engine: Engine, name: str, key_type: type[K], value_type: type[V], *, is_binary: bool = False) -> None:
        self.name = name
        self._engine = engine
        self._pending: set[Staged] = set()
        self._position = 0
        self._encode = msgspec.json.Encoder().encode
        self._encode_value = msgspec.msgpack.Encoder().encode if is_binary else self._encode
        self._decode_key = msgspec.json.Decoder(key_type).decode
        self._decode_value = (msgspec.msgpack.Decoder(value_type) if is_binary else msgspec.json.Decoder(value_type)).decode

    def show(self, key: K, value: V | None) -> None:
        raise NotImplementedError

    def show_all(self, changes: Changes[K, V]) -> None:
        for key, value in changes:
            self.show(key, value)

    async def load(self) -> None:
        """Create the topic if it is missing, and show its records: all, or those since the last call."""
        if self.name not in self._engine.topics():
            await self._engine.create_topic(self.name, 1, _CONFIG, internal=True)
        await self.catch_up()

    async def catch_up(self) -> bool:
        """Show the records since the last call, which another process has written. Returns whether there are any."""
        bounds = self._engine.bounds(self.name, 0)
        begin = position = max(self._position, bounds.first)
        while position < bounds.end:
            batches = await self._engine.read(self.name, 0, position, bytes_max=_READ_BYTES)
            if not batches:
                break
            for batch in batches:
                for key, value in zip(batch.keys() or (), batch.values(), strict=True):
                    assert key is not None, "a table's records all have keys"
                    self.show(self._decode_key(key), None if value is None else self._decode_value(value))
            position = self._position = batches[-1].next_offset
        return position > begin

    def write(self, changes: Changes[K, V] | Callable[[Sequence[Appended]], Changes[K, V]]) -> Write:
        """Return the changes as one write of a larger append. The caller passes the future of that append to `follow`. A callable receives
        the positions of the writes before it. An engine may call it on another thread, so it must not touch shared state."""
        if callable(changes):
            build = changes
            return Write(self.name, 0, lambda appended: self._batch(build(appended)))
        return Write(self.name, 0, self._batch(changes))

    def follow(self, staged: Staged, changes: Changes[K, V]) -> None:
        """Show the changes once the append that carries them is known to be in the log."""
        self.follow_with(staged, lambda: self.show_all(changes))

    def follow_with(self, staged: Staged, show: Callable[[], None]) -> None:
        """Call `show`, which shows the changes, once the append that carries them is known to be in the log."""
        self._pending.add(staged)

        def landed(done: Staged) -> None:
            self._pending.discard(staged)
            if not done.cancelled() and done.exception() is None:
                show()

        when_known(staged, landed)

    async def put(self, changes: Sequence[tuple[K, V | None]]) -> None:
        """Append the changes. They are durable and shown when it returns."""
        if changes:
            await asyncio.shield(self.change(changes))

    def change(self, changes: Sequence[tuple[K, V | None]]) -> Staged:
        """Append the changes, at least one. They are durable and shown when the future resolves."""
        staged = self._engine.append([self.write(changes)])
        self.follow(staged, changes)
        return staged

    async def settled(self) -> None:
        """Wait until every change staged before this call has been shown or has failed."""
        if self._pending:
            await asyncio.wait([known(staged) for staged in self._pending])

    def _batch(self, changes: Changes[K, V]) -> RecordBatch:
        changed, encode, encode_value = list(changes), self._encode, self._encode_value
        values = [None if value is None else encode_value(value) for _, value in changed]
        return RecordBatch(values, [encode(key) for key, _ in changed])


class Table(TableLog[K, V]):
    """A table with a dictionary as its view."""

    def __init__(self, engine: Engine, name: str, key_type: type[K], value_type: type[V]) -> None:
        super().__init__(engine, name, key_type, value_type)
        self._rows: dict[K, V] = {}

    @property
    def rows(self) -> Mapping[K, V]:
        return MappingProxyType(self._rows)

    def show(self, key: K, value: V | None) -> None:
        if value is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = value


class TableFollower:
    """Shows what the owner of the tables writes to some of them. `changed` is called after rows were shown."""

    def __init__(self, engine: Engine, tables: Sequence[TableLog[Any, Any]], changed: Callable[[], None]) -> None:
        self._engine, self._tables, self._changed = engine, tables, changed
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follow the tables, which must be loaded."""
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            self._following = None

    async def _follow(self) -> None:
        grown = asyncio.Event()
        stops = [self._engine.watch(table.name, 0, grown.set) for table in self._tables]
        grown.set()  # a table may have grown since it was loaded
        try:
            while True:
                await grown.wait()
                grown.clear()
                try:
                    has_rows = [await table.catch_up() for table in self._tables]
                except BrokerError as failure:
                    self._engine.health.failed(_STEP, str(failure))
                    await asyncio.sleep(_PAUSE_SECONDS)
                    grown.set()
                    continue
                self._engine.health.succeeded(_STEP)
                if any(has_rows):
                    self._changed()
        finally:
            for stop in stops:
                stop()
