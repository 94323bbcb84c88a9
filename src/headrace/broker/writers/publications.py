"""Publications of staged records: one append, or several that are rolled forward.

A publication up to `PUBLICATION_BYTES_MAX` is one append with all its records and the writer's row. Every reader sees all of it or nothing.

A larger publication takes several appends:

    1. Spill everything that is still in memory to the stage logs, durably.
    2. Append the plan (every chunk and its destination) and the writer's row, which marks the publication as begun. From here on it
       will complete.
    3. Append some chunks at a time, each time with the row that records the progress.
    4. The last append makes the version final and removes the plan.

After a crash the broker continues after the last append on disk: no record is lost or written twice. The outcome is atomic, but readers see
the records of step 3 appear one append after another. Until step 4 the last version is the previous one. If a topic is deleted meanwhile,
its records are skipped; the rest of the publication continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.broker.publishing.publish import Publisher
from headrace.broker.publishing.requirements import Divert
from headrace.broker.settings import Clock
from headrace.broker.tables import TableLog
from headrace.broker.writers.progress import Key, Rolling, Writer, WriterRow, WriterTable
from headrace.broker.writers.spill import Spill
from headrace.broker.writers.stage import Held, SpilledBatch, Stage, batch_of
from headrace.engine.contract import Ack, Engine, Write, known
from headrace.errors import AppendUnknown, BrokerError, StorageFailed, Unavailable, UnknownTopic
from headrace.limits import MIB
from headrace.records import AnyBatch, ColumnBatch, RecordBatch

_PlanKey: TypeAlias = tuple[str, int]
"""Writer name and row number."""
_ROW_CHUNKS: Final = 10_000
_HEAVY_BYTES: Final = 64 * MIB


class Plans(TableLog[_PlanKey, tuple[SpilledBatch, ...]]):
    """Plans of the publications in progress."""

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
        starts = range(0, len(chunks), _ROW_CHUNKS)
        return [((writer, row), tuple(chunks[start : start + _ROW_CHUNKS])) for row, start in enumerate(starts)]

    def remove_all(self, writer: str, rows: int) -> list[tuple[_PlanKey, tuple[SpilledBatch, ...] | None]]:
        return [((writer, row), None) for row in range(rows)]


@dataclass(frozen=True, slots=True)
class _Step:
    """Records of one append of several, and the progress after it."""

    writes: list[Write]
    done: int


class Publications:
    """Callers hold the writer's lock (`WriterTable.locked`). `whole_bytes` is the limit of a publication in one append."""

    def __init__(self, engine: Engine, publisher: Publisher, writers: WriterTable, spill: Spill, *, clock: Clock, whole_bytes: int) -> None:
        self._engine = engine
        self._publisher = publisher
        self._writers = writers
        self._spill = spill
        self._clock = clock
        self._whole_bytes = whole_bytes
        self._plans = Plans(engine)
        self._heavy = asyncio.Lock()
        """Serializes publications that are large or read from disk: memory holds one of them at a time."""
        self._reads_ahead = False
        """Whether a publication of several appends reads the chunks of its next append."""
        self.is_stopped = False

    async def open(self) -> list[Writer]:
        """Load the plans and return the writers whose publication must continue."""
        await self._plans.load()
        under_way = [writer for writer in self._writers.writers.values() if writer.rolling is not None]
        await self._spill.open(chunk for writer in under_way for chunk in self._rest(writer))
        return under_way

    def _rest(self, writer: Writer) -> list[SpilledBatch]:
        rolling = writer.rolling
        return [] if rolling is None else self._plans.chunks(writer.name, rolling.rows)[rolling.done :]

    async def publish(self, writer: Writer, version: int, stages: Sequence[Stage]) -> bool:
        """Return whether the publication is complete. If not, it has begun and `roll` completes it."""
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
        """Check the records of topics whose rules changed since staging. Raises `InvalidRecord`."""
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
        """Set the expiry: the time to live starts now. Raises `UnknownTopic`."""
        return [Write(write.topic, write.partition, self._publisher.own_route(write.topic).stamped(batch_of(write))) for write in writes]

    async def _append(
        self,
        writes: Sequence[Write],
        rows: list[tuple[Key, WriterRow | None]],
        plan: list[tuple[_PlanKey, tuple[SpilledBatch, ...] | None]] | None = None,
    ) -> None:
        """Append records and rows atomically. Returns or raises when the outcome is known: until then the writer must not try again."""
        tables = [self._writers.write(rows), *([self._plans.write(plan)] if plan else ())]
        staged = self._publisher.append([*writes, *tables], Ack.DURABLE)
        if plan:
            self._plans.follow(staged, plan)
        self._writers.follow(staged, rows)
        await known(staged)

    # Publications of several appends

    async def _begin(self, writer: Writer, version: int, stages: Sequence[Stage]) -> None:
        """Run steps 1 and 2."""
        spilled: list[SpilledBatch] = []
        try:
            chunks = await self._plan(stages, spilled)
            plan = self._plans.put_all(writer.name, chunks)
            rolling = Rolling(version, sum(stage.records for stage in stages), len(plan))
            await self._append([], [((writer.name,), writer.row(writer.version, self._clock(), rolling))], plan)
        except BrokerError as error:
            if not isinstance(error, (StorageFailed, AppendUnknown)):  # then it is unknown whether the plan is on disk
                self._spill.release(spilled)
            raise
        for stage in stages:
            stage.chunks = []  # the plan owns them now

    async def _plan(self, stages: Sequence[Stage], spilled: list[SpilledBatch]) -> list[SpilledBatch]:
        """Return all chunks in an order that keeps that of each partition. Adds the chunks it writes to `spilled`."""
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
        """Run steps 3 and 4 from the current progress. Raises what an append does; it can then be called again."""
        rolling = writer.rolling
        if rolling is None:
            return
        chunks = self._plans.chunks(writer.name, rolling.rows)
        ahead: asyncio.Task[_Step] | None = None
        try:
            while rolling is not None:
                if self.is_stopped:
                    raise Unavailable("the broker is draining; the publication continues after the next start")
                async with self._heavy:
                    step = await (self._read_step(chunks, rolling.done) if ahead is None else ahead)
                    ahead = self._read_ahead(chunks, step.done) if ahead is not None or not self._reads_ahead else None
                    done = await self._append_step(writer, rolling, chunks, step)
                if done != step.done and ahead is not None:  # the same chunks again
                    await self._give_up(ahead)
                    ahead = None
                self._spill.release(chunks[rolling.done : done])
                rolling = writer.rolling
        finally:
            if ahead is not None:
                await self._give_up(ahead)

    def _read_ahead(self, chunks: Sequence[SpilledBatch], start: int) -> asyncio.Task[_Step] | None:
        """Start to read the chunks of the next append, while the disk is busy with this one. One publication at a time does so."""
        self._reads_ahead = start < len(chunks)
        return asyncio.get_running_loop().create_task(self._read_step(chunks, start)) if self._reads_ahead else None

    async def _give_up(self, ahead: asyncio.Task[_Step]) -> None:
        self._reads_ahead = False
        ahead.cancel()
        await asyncio.wait([ahead])
        if not ahead.cancelled():
            ahead.exception()  # reading the chunks again raises it again

    async def _read_step(self, chunks: Sequence[SpilledBatch], start: int) -> _Step:
        """Read some chunks from `start` on."""
        writes: list[Write] = []
        done, size = start, 0
        while done < len(chunks) and size < self._spill.sizes.step_bytes:
            chunk = chunks[done]
            if self._has(chunk.topic, chunk.partition):
                writes += await self._spill.read(chunk)
                size += chunk.memory_bytes
            done += 1
        return _Step(writes, done)

    async def _append_step(self, writer: Writer, rolling: Rolling, chunks: Sequence[SpilledBatch], step: _Step) -> int:
        """Publish the chunks of a step and return the new progress."""
        # Topics may have been deleted during the reads.
        writes = [write for write in step.writes if self._has(write.topic, write.partition)]
        now, done = self._clock(), step.done
        if done < len(chunks):
            row, plan = writer.row(writer.version, now, Rolling(rolling.version, rolling.records, rolling.rows, done)), None
        else:
            row, plan = writer.row(rolling.version, now), self._plans.remove_all(writer.name, rolling.rows)
        try:
            await self._append(self._stamped(writes), [((writer.name,), row)], plan)
        except UnknownTopic:
            return rolling.done  # the topic was deleted just now, and its records with it
        return done

    def _has(self, topic: str, partition: int) -> bool:
        known = self._engine.topics().get(topic)
        return known is not None and partition < known.partitions

    async def forget(self, writer: Writer) -> None:
        """Abandon a publication in progress and delete the writer's row."""
        rest, rolling = self._rest(writer), writer.rolling
        await self._append([], [((writer.name,), None)], self._plans.remove_all(writer.name, rolling.rows) if rolling is not None else None)
        self._spill.release(rest)


def _listed(batch: AnyBatch) -> RecordBatch:
    return batch.record_batch() if isinstance(batch, ColumnBatch) else batch
