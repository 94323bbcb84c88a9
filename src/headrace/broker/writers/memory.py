"""Bounded memory of all stages. When it is full, new batches wait and the largest stages are spilled to disk.

Batches are accepted in order of arrival, so the batches of one handle keep their order. Spilling begins when memory is three quarters
full: records that fit below that are not written to disk before they are published. A writer that has staged too much for one append goes
through the stage logs anyway, so its records are spilled at once: little is left to spill when it publishes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.broker.health import supervise
from headrace.broker.publishing.requirements import Rule
from headrace.broker.writers.spill import Spill
from headrace.broker.writers.stage import Held, Stage, State
from headrace.engine.contract import Write
from headrace.errors import BrokerError, Unavailable, UnknownStage

_WAITING: Final = 4
"""Batches waiting for room may hold this many times the memory bound. A further batch is rejected as retriable."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A batch that waits for room."""

    stage: Stage
    topic: str
    rule: Rule | None
    held: list[Held]
    records: int
    size_bytes: int
    memory_bytes: int
    taken: asyncio.Future[None]


def unspilled_bytes(bytes_max: int) -> int:
    """Return the size above which staged records in memory are spilled. They may have `bytes_max` meanwhile."""
    return bytes_max * 3 // 4


class StageMemory:
    """`stages` are all stages, by handle."""

    def __init__(self, spill: Spill, stages: Mapping[str, Stage], bytes_max: int, whole_bytes: int) -> None:
        self._spill = spill
        self._stages = stages
        self._bytes_max = bytes_max
        self._whole_bytes = whole_bytes
        """Size of a publication up to which it is one append."""
        self._bytes = 0
        self._weights: Counter[str] = Counter()
        """Staged bytes of each writer, in memory and on disk."""
        self._heavy: set[str] = set()
        """Writers that have staged too much for one append."""
        self._arrivals: deque[Arrival] = deque()
        self._arriving_bytes = 0
        self._spilling: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def arrive(
        self, stage: Stage, topic: str, rule: Rule | None, writes: Sequence[Write], records: int, size_bytes: int
    ) -> asyncio.Future[None]:
        """Queue a batch. The future resolves when the batch is accepted and fails if it cannot be."""
        held = [Held.of(write) for write in writes]
        memory_bytes = sum(one.memory_bytes for one in held)
        if self._arrivals and self._arriving_bytes + memory_bytes > _WAITING * self._bytes_max:
            raise Unavailable("too many batches are waiting to be staged: try again")
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stage.arriving += 1
        self._arriving_bytes += memory_bytes
        self._arrivals.append(Arrival(stage, topic, rule, held, records, size_bytes, memory_bytes, taken))
        self.consider()
        return taken

    def consider(self) -> None:
        """Accept waiting batches that fit, and start spilling if memory is short."""
        while self._arrivals and (self._arrivals[0].taken.done() or self._has_room(self._arrivals[0])):
            arrival = self._arrivals.popleft()
            self._arriving_bytes -= arrival.memory_bytes
            arrival.stage.arriving -= 1
            if not arrival.taken.done():
                self._take(arrival)
                arrival.taken.set_result(None)
        if self._spilling is None and not self._is_stopped and self._next() is not None:
            self._spilling = asyncio.get_running_loop().create_task(self._spill_some())
            supervise(self._spill.health, "spilling stages to disk", self._spilling)

    def leave(self, stage: Stage) -> None:
        """Release the memory and chunks of a stage that is removed."""
        self._bytes -= stage.memory_bytes
        self._weigh(stage, -stage.weight)
        self._spill.release(stage.chunks)
        stage.held, stage.chunks, stage.memory_bytes, stage.disk_bytes = [], [], 0, 0
        for arrival in self._arrivals if stage.arriving else ():  # thousands of stages may be removed while thousands of batches wait
            if arrival.stage is stage and not arrival.taken.done():
                arrival.taken.set_exception(UnknownStage(stage.handle))
        self.consider()

    async def drain(self) -> None:
        self._is_stopped = True
        self._fail_arrivals(Unavailable("the broker is draining"))
        if self._spilling is not None:
            await asyncio.wait([self._spilling])

    @property
    def _is_tight(self) -> bool:
        return bool(self._arrivals) or self._bytes > unspilled_bytes(self._bytes_max)

    def _has_room(self, arrival: Arrival) -> bool:
        return not self._bytes or self._bytes + arrival.memory_bytes <= self._bytes_max

    def _take(self, arrival: Arrival) -> None:
        stage = arrival.stage
        stage.held += arrival.held
        stage.records += arrival.records
        stage.size_bytes += arrival.size_bytes
        stage.memory_bytes += arrival.memory_bytes
        stage.by_topic[arrival.topic] = stage.by_topic.get(arrival.topic, 0) + arrival.records
        if stage.rules.setdefault(arrival.topic, arrival.rule) is not arrival.rule:
            stage.rules[arrival.topic] = None  # checked against different rules: check all again
        self._bytes += arrival.memory_bytes
        self._weigh(stage, arrival.memory_bytes)

    def _weigh(self, stage: Stage, change: int) -> None:
        name = stage.writer.name
        self._weights[name] += change
        if self._weights[name] > self._whole_bytes:
            self._heavy.add(name)
        else:
            self._heavy.discard(name)
        if not self._weights[name]:
            del self._weights[name]

    def _next(self) -> Stage | None:
        """Return the stage to spill next, the largest one; None if nothing has to be spilled now."""
        is_tight = self._is_tight
        if not is_tight and not self._heavy:
            return None
        least = 1 if is_tight else self._spill.sizes.write_bytes
        movable = (
            stage
            for stage in self._stages.values()
            if stage.memory_bytes >= least and stage.state is not State.PUBLISHING and (is_tight or stage.writer.name in self._heavy)
        )
        return max(movable, key=lambda stage: stage.memory_bytes, default=None)

    async def _spill_some(self) -> None:
        try:
            while not self._is_stopped and (stage := self._next()) is not None:
                await self._spill_one(stage)
                self.consider()
        except BrokerError as error:
            self._fail_arrivals(error)
        except Exception as failure:
            self._fail_arrivals(Unavailable(f"stages cannot be spilled to disk: {failure!r}"))
            raise
        finally:
            self._spilling = None

    async def _spill_one(self, stage: Stage) -> None:
        """Spill the stage's oldest records, up to the size of one write."""
        count, size = 0, 0
        while count < len(stage.held) and size < self._spill.sizes.write_bytes:
            size += stage.held[count].memory_bytes
            count += 1
        stage.spilling = asyncio.get_running_loop().create_future()
        try:
            chunks = await self._spill.write(stage.held[:count])
            if stage.state is State.GONE:
                self._spill.release(chunks)
                return
            del stage.held[:count]
            stage.chunks += chunks
            stage.memory_bytes -= size
            stage.disk_bytes += size
            self._bytes -= size
        finally:
            stage.spilling.set_result(None)
            stage.spilling = None

    def _fail_arrivals(self, error: BrokerError) -> None:
        """Fail all waiting batches: spilling does not work."""
        for arrival in self._arrivals:
            if not arrival.taken.done():
                arrival.taken.set_exception(error)
        self._arrivals_done()

    def _arrivals_done(self) -> None:
        for arrival in self._arrivals:
            arrival.stage.arriving -= 1
        self._arrivals.clear()
        self._arriving_bytes = 0
