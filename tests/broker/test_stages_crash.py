"""Every moment at which the broker of a writer can die: each version is published exactly once and complete.

First a broker on the memory engine dies before and after each request to its engine, once and then again during recovery. Then a broker
works on a simulated disk, whose history is cut at many places. A new broker opens each image that the disk may have left.

HEADRACE_CRASH_CUTS=1000 cuts more often.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NoReturn, TypeVar

import pytest

from headrace.broker import Broker, BrokerSettings
from headrace.broker.settings import SpillSizes
from headrace.engine.contract import Ack, Appended, AppendedEach, Batch, Bounds, Located, Topic, TopicConfig, Write
from headrace.engine.each import append_by_future, append_by_partition
from headrace.engine.embedded import EmbeddedEngine
from headrace.engine.memory import MemoryEngine
from headrace.records import RecordBatch
from headrace.storage.store import StoreOptions
from tests.broker.harness import ANN, HandClock, turns
from tests.conftest import Proof
from tests.storage_faults.power_cut import PowerCuts
from tests.storage_faults.simulated import SimulatedFiles

pytestmark = pytest.mark.crash_images

T = TypeVar("T")

CUTS = int(os.environ.get("HEADRACE_CRASH_CUTS", "30"))
IMAGES_A_CUT = 4
SETTINGS = BrokerSettings(
    stages_memory_bytes=1_500,
    publication_bytes=700,
    spill_sizes=SpillSizes(write_bytes=300, chunk_bytes=150, log_bytes=900, step_bytes=350),
)
SIZES = [3, 14, 1, 20]
"""Batches of the two tasks of each version: some fit into one append, some do not."""


class Mortal:
    """An engine that stops answering after a number of changing requests. `is_late`: the last one is still done."""

    def __init__(self, engine: MemoryEngine, life: int, is_late: bool) -> None:
        self.engine = engine
        self.health = engine.health
        self.capabilities = engine.capabilities
        self.topic_changed = engine.topic_changed
        self.ownership, self.epoch, self.offset_store = engine.ownership, engine.epoch, engine.offset_store
        self.local_file = engine.local_file
        self.life = life
        self.is_late = is_late

    @property
    def is_dead(self) -> bool:
        return self.life < 0

    async def open(self) -> None:
        await self.engine.open()

    async def close(self) -> None:
        await self._never()

    async def create_topic(self, name: str, partitions: int, config: TopicConfig, *, internal: bool = False) -> Topic:
        return await self._asked(lambda: self.engine.create_topic(name, partitions, config, internal=internal))

    async def alter_topic(self, name: str, *, partitions: int | None = None, config: TopicConfig | None = None) -> Topic:
        return await self._asked(lambda: self.engine.alter_topic(name, partitions=partitions, config=config))

    async def delete_topic(self, name: str) -> None:
        await self._asked(lambda: self.engine.delete_topic(name))

    async def _asked(self, act: Callable[[], Awaitable[T]]) -> T:
        self.life -= 1
        if not self.is_dead:
            return await act()
        if self.life == -1 and self.is_late:
            await act()
        await self._never()

    async def _never(self) -> NoReturn:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never")

    def append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        append_by_future(self.append, write, done)

    def append_each(
        self, places: Sequence[tuple[str, int]], values: Sequence[bytes], keys: Sequence[bytes | None] | None = None
    ) -> asyncio.Future[AppendedEach]:
        return append_by_partition(self.append, places, values, keys)

    def append(
        self, writes: Sequence[Write], *, ack: Ack | None = None, urgent: bool = False, owned: bool = False
    ) -> asyncio.Future[list[Appended]]:
        self.life -= 1
        if not self.is_dead:
            return self.engine.append(writes, ack=ack, urgent=urgent, owned=owned)
        if self.life == -1 and self.is_late:
            self.engine.append(writes, ack=ack, urgent=urgent, owned=owned)
        return asyncio.get_running_loop().create_future()

    def topics(self) -> Mapping[str, Topic]:
        return self.engine.topics()

    async def look_for_topic(self, name: str) -> bool:
        return await self.engine.look_for_topic(name)

    async def read(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> list[Batch]:
        return await self.engine.read(topic, partition, offset, bytes_max=bytes_max, records_max=records_max)

    def read_now(self, topic: str, partition: int, offset: int, *, bytes_max: int, records_max: int = 1 << 31) -> Sequence[Batch] | None:
        return self.engine.read_now(topic, partition, offset, bytes_max=bytes_max, records_max=records_max)

    async def locate(self, topic: str, partition: int, offset: int, stop: int) -> Located:
        return await self.engine.locate(topic, partition, offset, stop)

    def bounds(self, topic: str, partition: int) -> Bounds:
        return self.engine.bounds(topic, partition)

    def size_bytes(self, topic: str, partition: int) -> int:
        return self.engine.size_bytes(topic, partition)

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int:
        return await self.engine.offset_for_time(topic, partition, timestamp)

    def watch(self, topic: str, partition: int, wake: Callable[[], None]) -> Callable[[], None]:
        return self.engine.watch(topic, partition, wake)

    async def maintain(self) -> None:
        await self.engine.maintain()


def expected(version: int) -> dict[tuple[str, int], list[str]]:
    """Return what a version adds to each partition."""
    found: dict[tuple[str, int], list[str]] = {("t", 0): [], ("t", 1): [], ("u", 0): []}
    for task in (0, 1):
        for number in range(SIZES[version]):
            found[_place(number)].append(_value(version, task, number))
    return found


def _place(number: int) -> tuple[str, int]:
    return [("u", 0), ("t", 0), ("u", 0), ("t", 1)][number % 4]


def _value(version: int, task: int, number: int) -> str:
    return f"{version}-{task}-{number}".ljust(50, ".")


async def write_all(broker: Broker, attempt: int, acknowledged: Callable[[int], None] = lambda version: None) -> None:
    """Run a writer that has just started: it knows only what the broker knows of it."""
    epoch = f"epoch-{attempt}"
    last = broker.last_version(ANN, "q")
    # Its own notes are one version behind: it died before it noted what it had published.
    for version in range(max(0, -1 if last is None else last), len(SIZES)):
        handles = [f"{attempt}/{version}/{task}" for task in (1, 0)]
        for task, handle in zip((1, 0), handles, strict=True):
            for number in range(SIZES[version]):
                topic, partition = _place(number)
                record_batch = RecordBatch([_value(version, task, number).encode()])
                await broker.stage(ANN, handle, topic, record_batch, writer="q", epoch=epoch, order=task, partition=partition)
            await broker.seal(ANN, handle)
        answer = await broker.publish_staged(ANN, "q", version, handles, epoch=epoch)
        assert attempt or not answer.already
        acknowledged(version)


async def contents(engine: MemoryEngine | EmbeddedEngine) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], list[str]] = {}
    for topic, partition in (("t", 0), ("t", 1), ("u", 0)):
        values = found[topic, partition] = []
        bounds = engine.bounds(topic, partition)
        position = bounds.first
        while position < bounds.end:
            batches = await engine.read(topic, partition, position, bytes_max=1 << 20)
            values += [(value or b"").decode() for batch in batches for value in batch.values()]
            position = batches[-1].next_offset
    return found


def all_of(versions: int) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], list[str]] = {("t", 0): [], ("t", 1): [], ("u", 0): []}
    for version in range(versions):
        for place, values in expected(version).items():
            found[place] += values
    return found


class Lives:
    """Successive brokers on one memory engine."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.engine = MemoryEngine(clock=self.clock)
        self.attempts = 0

    async def live(self, life: int, is_late: bool) -> bool:
        """Open a broker and let the writer write. Return whether the writer finished before the broker died."""
        mortal = Mortal(self.engine, life, is_late)
        broker = Broker(mortal, clock=self.clock, settings=SETTINGS, later=self.clock.later)
        attempt, self.attempts = self.attempts, self.attempts + 1
        others = asyncio.all_tasks()
        task = asyncio.ensure_future(self._write(broker, attempt))
        for _ in range(20_000):
            if task.done() or mortal.is_dead:
                break
            await asyncio.sleep(0)
        await turns(5)
        came_through = task.done() and not mortal.is_dead
        if task.done() and not task.cancelled() and task.exception() is not None and not mortal.is_dead:
            raise AssertionError("the writer failed") from task.exception()
        mortal.life = -2
        await _end(asyncio.all_tasks() - others)
        self.clock.forget_timers()
        return came_through

    async def _write(self, broker: Broker, attempt: int) -> None:
        await broker.open()
        for topic, partitions in (("t", 2), ("u", 1)):
            if topic not in self.engine.topics():
                await broker.create_topic(ANN, topic, partitions=partitions)
        await write_all(broker, attempt)
        for _ in range(50):  # until the space of its stages is freed
            await asyncio.sleep(0)

    async def check(self) -> None:
        assert await contents(self.engine) == all_of(len(SIZES))
        assert [name for name in self.engine.topics() if name.startswith("__stage")] == []


async def _end(tasks: set[asyncio.Task[object]]) -> None:
    """Cancel the tasks of a process that died."""
    while tasks:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)
        tasks = {task for task in tasks if not task.done()}


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_broker_may_die_before_and_after_every_single_step(is_late: bool, proof: Proof) -> None:
    deaths, came_through = 0, False
    while not came_through:
        lives = Lives()
        came_through = await lives.live(deaths, is_late)
        assert await lives.live(100_000, is_late)
        await lives.check()
        deaths += 1
    assert deaths > 40
    proof("deaths of a broker with stages", deaths)


async def test_a_broker_may_die_again_while_it_recovers(proof: Proof) -> None:
    dice = random.Random(6)
    for _ in range(40):
        lives = Lives()
        deaths = [dice.randrange(120) for _ in range(6)]
        for life in deaths:
            await lives.live(life, dice.random() < 0.5)
        assert await lives.live(100_000, False), deaths
        try:
            await lives.check()
        except AssertionError as failure:
            raise AssertionError(f"deaths {deaths}: {failure}") from failure
    proof("deaths of a broker with stages", 240)


# On a disk

OPTIONS = StoreOptions(journal_bytes=1 << 20, headroom_bytes=0)


async def _on_disk(files: SimulatedFiles, attempt: int) -> dict[tuple[str, int], list[str]]:
    """Run a broker from start to clean stop with the same writer. Return what the log holds at the end."""
    clock = HandClock()
    engine = EmbeddedEngine(files, OPTIONS, clock=clock, maintain_interval_seconds=3_600)
    broker = Broker(engine, clock=clock, settings=SETTINGS, later=clock.later)
    await broker.open()
    for topic, partitions in (("t", 2), ("u", 1)):
        if topic not in engine.topics():
            await broker.create_topic(ANN, topic, partitions=partitions)
    await write_all(broker, attempt, files.mark)
    found = await contents(engine)
    await broker.close()
    return found


def _told(files: SimulatedFiles, upto: int) -> int:
    """Return the number of versions that the writer knew to be published."""
    marks = [operation.value for operation in files.operations[:upto] if operation.kind == "mark"]
    return 1 + max((mark for mark in marks if isinstance(mark, int)), default=-1)


async def test_whatever_a_cut_leaves_a_version_is_published_exactly_once(proof: Proof) -> None:
    files = SimulatedFiles()
    assert await _on_disk(files, 0) == all_of(len(SIZES))
    dice, images = random.Random(3), 0
    cuts = PowerCuts(files)
    for upto in sorted(dice.sample(range(len(files.operations) + 1), min(CUTS, len(files.operations)))):
        for label, image in [(f"killed at {upto}", files.killed(upto)), *islice(cuts.images(upto, dice), IMAGES_A_CUT)]:
            try:
                await _verify(image, _told(files, upto))
            except AssertionError as failure:
                raise AssertionError(f"{label}: {failure}") from failure
            images += 1
    proof("broker crash images recovered", images)


async def _verify(image: SimulatedFiles, acknowledged: int) -> None:
    clock = HandClock()
    engine = EmbeddedEngine(image, OPTIONS, clock=clock, maintain_interval_seconds=3_600)
    broker = Broker(engine, clock=clock, settings=SETTINGS, later=clock.later)
    await broker.open()
    while tasks := broker._stages._tasks:
        await asyncio.wait(tasks)
    last = broker.last_version(ANN, "q")
    assert (-1 if last is None else last) + 1 >= acknowledged, "an acknowledged version is lost"
    if all(topic in engine.topics() for topic in ("t", "u")):
        assert await contents(engine) == all_of(0 if last is None else last + 1), "incomplete or duplicated"
    else:
        assert last is None
    await broker.close()
    assert await _on_disk(image, 1) == all_of(len(SIZES))
