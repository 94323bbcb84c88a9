"""How staged records reach the log: in one append, or, where they are too many for that, rolled forward.

A publication up to `PUBLICATION_BYTES_MAX` is one append that holds all its records and the writer's row: it is there whole or not at
all, for every reader.

A larger one is made of several appends:

    1. everything that is still in memory goes to the stage logs, durably
    2. one append: the plan (every chunk and where it goes) and the writer's row, which says that it is under way. From here on it will
       happen, whatever else does
    3. appends of some chunks each, every one with the row that says how far it is
    4. the last of them makes the version final, and takes the plan away

Whenever the broker dies, its next start goes on behind the last append that is on disk: no record is lost or written twice. So it is
atomic in its outcome, but not to the eye: readers see the records of step 3 come one append after another. Until step 4 the last
version is the one before. A topic that is deleted meanwhile does not get its records; the rest of the publication goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from headrace.broker.publishing.publish import Publisher
from headrace.broker.publishing.requirements import Divert
from headrace.broker.tables import TableLog
from headrace.broker.timers import Clock
from headrace.broker.writers.progress import Key, Rolling, Writer, WriterRow, WriterTable
from headrace.broker.writers.spill import Spill
from headrace.broker.writers.stage import Held, SpilledBatch, Stage, batch_of
from headrace.engine.contract import Ack, Engine, Write
from headrace.errors import BrokerError, StorageFailed, Unavailable, UnknownTopic
from headrace.limits import MIB
from headrace.records import AnyBatch, ColumnBatch, RecordBatch

_PlanKey: TypeAlias = tuple[str, int]
"""The app, and the number of the row."""
_ROW_PIECES: Final = 10_000
_HEAVY_BYTES: Final = 64 * MIB


class Plans(TableLog[_PlanKey, tuple[SpilledBatch, ...]]):
    """The plans of publications under way."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "__sink_plans", _PlanKey, tuple[SpilledBatch, ...], is_binary=True)  # type: ignore[arg-type]  # see `WriterTable`
        self._rows: dict[_PlanKey, tuple[SpilledBatch, ...]] = {}

    def show(self, key: _PlanKey, value: tuple[SpilledBatch, ...] | None) -> None:
        if value is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = value

    def chunks(self, writer: str, rows: int) -> list[SpilledBatch]:
        return [chunk for row in range(rows) for chunk in self._rows[writer, row]]

    def put_all(self, writer: str, chunks: Sequence[SpilledBatch]) -> list[tuple[_PlanKey, tuple[SpilledBatch, ...] | None]]:
        starts = range(0, len(chunks), _ROW_PIECES)
        return [((writer, row), tuple(chunks[start : start + _ROW_PIECES])) for row, start in enumerate(starts)]

    def remove_all(self, writer: str, rows: int) -> list[tuple[_PlanKey, tuple[SpilledBatch, ...] | None]]:
        return [((writer, row), None) for row in range(rows)]


class Publications:
    """Whoever calls has the app to themselves (`WriterTable.alone`). `whole_bytes` is how much is published in one append."""

    def __init__(self, engine: Engine, publisher: Publisher, writers: WriterTable, spill: Spill, *, clock: Clock, whole_bytes: int) -> None:
        self._engine = engine
        self._publisher = publisher
        self._writers = writers
        self._spill = spill
        self._clock = clock
        self._whole_bytes = whole_bytes
        self._plans = Plans(engine)
        self._heavy = asyncio.Lock()
        """What is read back from disk, or is large, goes one after another: memory holds one such publication, not many."""
        self.is_stopped = False

    async def open(self) -> list[Writer]:
        """Those whose publication is to go on."""
        await self._plans.load()
        under_way = [writer for writer in self._writers.writers.values() if writer.rolling is not None]
        await self._spill.open(chunk for writer in under_way for chunk in self._rest(writer))
        return under_way

    def _rest(self, writer: Writer) -> list[SpilledBatch]:
        rolling = writer.rolling
        return [] if rolling is None else self._plans.chunks(writer.name, rolling.rows)[rolling.done :]

    async def publish(self, writer: Writer, version: int, stages: Sequence[Stage]) -> bool:
        """Returns whether all of it is done; if not, it has been begun, and `roll` does the rest."""
        size_bytes = sum(stage.weight for stage in stages)
        if size_bytes > self._whole_bytes:
            async with self._heavy:
                await self._begin(writer, version, stages)
            return False
        if size_bytes > _HEAVY_BYTES or any(stage.chunks for stage in stages):
            async with self._heavy:
                await self._publish_whole(writer, version, stages)
        else:
            await self._publish_whole(writer, version, stages)
        return True

    async def _publish_whole(self, writer: Writer, version: int, stages: Sequence[Stage]) -> None:
        writes: list[Write] = []
        for stage in stages:
            for chunk in stage.chunks:
                writes += await self._spill.read(chunk)
            writes += [one.write for one in stage.held]
        self._check_rules(stages, writes)
        await self._append(self._stamped(writes), [((writer.name,), writer.row(version, self._clock()))])

    def _check_rules(self, stages: Sequence[Stage], writes: Iterable[Write]) -> None:
        """The rules may be others than they were when the records were staged. Raises `InvalidRecord`."""
        for topic in self._rules_changed(stages):
            rule = self._publisher.own_route(topic).rule
            for write in writes:
                if rule is not None and write.topic == topic:
                    rule.sift(_listed(batch_of(write)), Divert.NEVER)

    def _rules_changed(self, stages: Sequence[Stage]) -> set[str]:
        changed: set[str] = set()
        for stage in stages:
            for topic, then in stage.rules.items():
                now = self._publisher.own_route(topic).rule
                if now is not None and now is not then:
                    changed.add(topic)
        return changed

    def _stamped(self, writes: Iterable[Write]) -> list[Write]:
        """The time to live begins now. Raises `UnknownTopic`."""
        return [Write(write.topic, write.partition, self._publisher.own_route(write.topic).stamped(batch_of(write))) for write in writes]

    async def _append(
        self,
        writes: Sequence[Write],
        rows: list[tuple[Key, WriterRow | None]],
        plan: list[tuple[_PlanKey, tuple[SpilledBatch, ...] | None]] | None = None,
    ) -> None:
        """Records and rows, all or none of them."""
        tables = [self._writers.write(rows), *([self._plans.write(plan)] if plan else ())]
        staged = self._publisher.append([*writes, *tables], Ack.DURABLE)
        if plan:
            self._plans.follow(staged, plan)
        self._writers.follow(staged, rows)
        await asyncio.shield(staged)

    # Too much for one append

    async def _begin(self, writer: Writer, version: int, stages: Sequence[Stage]) -> None:
        """Steps 1 and 2."""
        spilled: list[SpilledBatch] = []
        try:
            chunks = await self._plan(stages, spilled)
            plan = self._plans.put_all(writer.name, chunks)
            rolling = Rolling(version, sum(stage.records for stage in stages), len(plan))
            await self._append([], [((writer.name,), writer.row(writer.version, self._clock(), rolling))], plan)
        except BrokerError as error:
            if not isinstance(error, StorageFailed):  # then nobody knows whether the plan is on disk
                self._spill.release(spilled)
            raise
        for stage in stages:
            stage.chunks = []  # they are the plan's now

    async def _plan(self, stages: Sequence[Stage], spilled: list[SpilledBatch]) -> list[SpilledBatch]:
        """All chunks, in an order that keeps that of each partition. Those written on the way are in `spilled` too."""
        changed = self._rules_changed(stages)
        plan: list[SpilledBatch] = []
        waiting, size = list[Held](), 0

        async def flush() -> None:
            nonlocal waiting, size
            if waiting:
                written = await self._spill.write(waiting)
                spilled.extend(written)
                plan.extend(written)
            waiting, size = [], 0

        for stage in stages:
            if stage.chunks:
                await flush()
                plan += stage.chunks
            for one in stage.held:
                waiting.append(one)
                size += one.memory_bytes
                if size >= self._spill.sizes.write_bytes:
                    await flush()
        await flush()
        if changed:
            for chunk in plan:
                if chunk.topic in changed:
                    self._check_rules(stages, await self._spill.read(chunk))
        return plan

    async def roll(self, writer: Writer) -> None:
        """Steps 3 and 4, from wherever it is. Raises what an append does; then it can be called again."""
        rolling = writer.rolling
        if rolling is None:
            return
        chunks = self._plans.chunks(writer.name, rolling.rows)
        while rolling is not None:
            if self.is_stopped:
                raise Unavailable("the broker is draining; the publication goes on when it is back")
            async with self._heavy:
                done = await self._step(writer, rolling, chunks)
            self._spill.release(chunks[rolling.done : done])
            rolling = writer.rolling

    async def _step(self, writer: Writer, rolling: Rolling, chunks: Sequence[SpilledBatch]) -> int:
        """Publish some more; returns how far it is now."""
        writes: list[Write] = []
        done, size = rolling.done, 0
        while done < len(chunks) and size < self._spill.sizes.step_bytes:
            chunk = chunks[done]
            if self._has(chunk.topic, chunk.partition):
                writes += await self._spill.read(chunk)
                size += chunk.memory_bytes
            done += 1
        writes = [write for write in writes if self._has(write.topic, write.partition)]  # some may have gone while others were read
        now = self._clock()
        if done < len(chunks):
            row, plan = writer.row(writer.version, now, Rolling(rolling.version, rolling.records, rolling.rows, done)), None
        else:
            row, plan = writer.row(rolling.version, now), self._plans.remove_all(writer.name, rolling.rows)
        try:
            await self._append(self._stamped(writes), [((writer.name,), row)], plan)
        except UnknownTopic:
            return rolling.done  # it went this moment, and its records with it
        return done

    def _has(self, topic: str, partition: int) -> bool:
        known = self._engine.topics().get(topic)
        return known is not None and partition < known.partitions

    async def forget(self, writer: Writer) -> None:
        """Give up what is under way, and forget the app."""
        rest, rolling = self._rest(writer), writer.rolling
        await self._append([], [((writer.name,), None)], self._plans.remove_all(writer.name, rolling.rows) if rolling is not None else None)
        self._spill.release(rest)


def _listed(batch: AnyBatch) -> RecordBatch:
    return batch.record_batch() if isinstance(batch, ColumnBatch) else batch
