"""Staged records on disk, in the internal topics `__stage.1`, `__stage.2`, … (stage logs).

All stages share the stage logs. A stage log is filled up to a size, sorted by destination, and deleted when none of its records is
needed. The stages know in memory which records are theirs; a publication in progress has its plan. After a crash, every stage log
without a plan is deleted at start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from headrace.broker.health import supervise
from headrace.broker.publishing.publish import Publisher
from headrace.broker.settings import SpillSizes
from headrace.broker.writers.stage import Held, SpilledBatch, batch_of
from headrace.engine.contract import Ack, Batch, Engine, TopicConfig, Write
from headrace.errors import BrokerError, CorruptData, OffsetOutOfRange, UnknownTopic
from headrace.limits import MIB

_READ_BYTES_MIN: Final = 2 * MIB
"""A chunk is read at once, off the event loop: a shorter read would cut stored batches, and their parts have to be decoded."""
_PREFIX: Final = "__stage."
_CONFIG: Final = TopicConfig(ack=Ack.WRITTEN)
"""Spilled records must not use the disk's reserve. They are written with the stronger acknowledgement all the same."""


class Spill:
    """The stage logs, and the number of needed chunks in each."""

    def __init__(self, engine: Engine, publisher: Publisher, sizes: SpillSizes) -> None:
        self.sizes = sizes
        self._engine = engine
        self.health = engine.health
        self._publisher = publisher
        self._chunks: Counter[int] = Counter()
        self._current: int | None = None
        self._current_bytes = 0
        self._next = 1
        self._making = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()

    async def open(self, planned: Iterable[SpilledBatch]) -> None:
        """Keep the chunks in `planned`, which publications still need. Delete all other stage logs."""
        self.hold(planned)
        for name in [name for name in self._engine.topics() if name.startswith(_PREFIX)]:
            log = int(name.removeprefix(_PREFIX))
            self._next = max(self._next, log + 1)
            if not self._chunks[log]:
                await self._remove(log)

    async def drain(self) -> None:
        while self._removals:
            await asyncio.wait(self._removals)

    def hold(self, chunks: Iterable[SpilledBatch]) -> None:
        self._chunks.update(chunk.log for chunk in chunks)

    def release(self, chunks: Iterable[SpilledBatch]) -> None:
        """Release chunks that are no longer needed."""
        for chunk in chunks:
            self._release_log(chunk.log)

    def _release_log(self, log: int) -> None:
        self._chunks[log] -= 1
        if self._chunks[log] > 0:
            return
        del self._chunks[log]
        if log == self._current:
            self._current = None
        removal = asyncio.get_running_loop().create_task(self._remove(log))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        supervise(self._engine.health, "removal of stage logs", removal)

    async def _remove(self, log: int) -> None:
        try:
            await self._engine.delete_topic(_name(log))
        except BrokerError:
            pass  # the next start deletes it

    # Writing

    async def write(self, held: Sequence[Held]) -> list[SpilledBatch]:
        """Write to a stage log and return the chunks. Durable when it returns. Chunks of a partition keep the order of the writes;
        the caller holds them."""
        log = await self._log(sum(one.memory_bytes for one in held))
        self._chunks[log] += 1  # keeps the log while it is written to
        try:
            drafts = list(_drafts(log, held, self.sizes.chunk_bytes))
            writes = [Write(_name(log), 0, batch_of(one.write)) for _, ones in drafts for one in ones]
            appended = await asyncio.shield(self._publisher.append(writes, Ack.DURABLE))
            chunks, index = list[SpilledBatch](), 0
            for chunk, ones in drafts:
                chunks.append(_at(chunk, appended[index].base_offset))
                index += len(ones)
            self.hold(chunks)
            return chunks
        finally:
            self._release_log(log)

    async def _log(self, size_bytes: int) -> int:
        async with self._making:
            if self._current is None or self._current_bytes >= self.sizes.log_bytes:
                log, self._next = self._next, self._next + 1
                await self._engine.create_topic(_name(log), 1, _CONFIG, internal=True)
                self._current, self._current_bytes = log, 0
            self._current_bytes += size_bytes
            return self._current

    # Reading

    async def read(self, chunk: SpilledBatch) -> list[Write]:
        """Read a chunk back. Raises `CorruptData` if records are missing."""
        position, end = chunk.offset, chunk.offset + chunk.count
        bytes_max = max(chunk.memory_bytes, _READ_BYTES_MIN)
        writes: list[Write] = []
        missing = chunk.count
        while position < end:
            try:
                batches = await self._engine.read(_name(chunk.log), 0, position, bytes_max=bytes_max, records_max=end - position)
            except UnknownTopic:
                break
            except OffsetOutOfRange as error:
                if error.first <= position:
                    break
                position = error.first
                continue
            if not batches:
                break
            for batch in batches:
                part = _until(batch, end)
                if len(part):
                    writes.append(Write(chunk.topic, chunk.partition, part.column_batch(with_times=chunk.is_timed)))
                    missing -= len(part)
                await asyncio.sleep(0)
            position = batches[-1].next_offset
        if missing and not chunk.expires:
            raise CorruptData(f"{missing} of {chunk.count} staged records for {chunk.topic} cannot be read back from {_name(chunk.log)}")
        return writes


def _name(log: int) -> str:
    return f"{_PREFIX}{log}"


def _drafts(log: int, held: Sequence[Held], bytes_max: int) -> Iterator[tuple[SpilledBatch, list[Held]]]:
    """Split into chunks without offsets. Only the order within a partition matters, so the chunks of one partition are adjacent."""
    by_place = sorted(held, key=lambda one: (one.write.topic, one.write.partition))
    for (topic, partition, is_timed), alike in groupby(by_place, key=_kind):
        ones, size = list[Held](), 0
        for one in alike:
            ones.append(one)
            size += one.memory_bytes
            if size >= bytes_max:
                yield _draft(log, topic, partition, is_timed, ones), ones
                ones, size = [], 0
        if ones:
            yield _draft(log, topic, partition, is_timed, ones), ones


def _kind(one: Held) -> tuple[str, int, bool]:
    return one.write.topic, one.write.partition, batch_of(one.write).timestamps is not None


def _draft(log: int, topic: str, partition: int, is_timed: bool, ones: Sequence[Held]) -> SpilledBatch:
    record_batches = [batch_of(one.write) for one in ones]
    memory_bytes, expires = sum(one.memory_bytes for one in ones), any(record_batch.expiries is not None for record_batch in record_batches)
    return SpilledBatch(log, 0, sum(map(len, record_batches)), topic, partition, memory_bytes, is_timed, expires)


def _at(chunk: SpilledBatch, offset: int) -> SpilledBatch:
    return SpilledBatch(chunk.log, offset, chunk.count, chunk.topic, chunk.partition, chunk.memory_bytes, chunk.is_timed, chunk.expires)


def _until(batch: Batch, end: int) -> Batch:
    """Return the part of the batch with offsets below `end`."""
    if batch.next_offset <= end:
        return batch
    return batch.window(0, sum(offset < end for offset in batch.offsets()))
