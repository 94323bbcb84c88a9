"""The log itself, without a network: appends, reads, recovery, and what touching many partitions costs.

The figures made of these measurements are in `headrace.bench.logfigures`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.bench.children import child
from headrace.bench.faults import BenchFailed
from headrace.bench.load import Tick, sample_values
from headrace.engine.contract import Appended, TopicConfig, Write
from headrace.engine.embedded import EmbeddedEngine
from headrace.limits import BATCH_BYTES_TARGET
from headrace.programs import last_line
from headrace.records import AnyBatch, ColumnBatch, RecordBatch
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions

TOPIC = "bench"
READ_BYTES_MAX = 8 * 1024 * 1024
RUNS_IN_FLIGHT = 64
"""Runs that wait for their flush at once: what one busy connection, or many small ones, keep staged."""
RUN_POOL = 64
"""Distinct runs that are appended in turn, so that the values do not all sit in the processor's cache."""
COLUMN_RUN_POOL = 16
"""The same for runs of columns, each of which is a whole batch."""
FLUSH_ROUNDS = 30
FILL_SECONDS_MAX = 1_200.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Sizes of a run of `bench log`."""

    records: int
    value_bytes: int
    run_records: int
    log_bytes: int
    partitions: int


def clock() -> int:
    return time.time_ns() // 1_000_000


def on_loop(main: Coroutine[Any, Any, T]) -> T:
    """On the loop that the broker uses."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def open_engine(directory: Path, options: StoreOptions | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(DiskFiles(directory), options or StoreOptions(), clock=clock)


def run_pool(value_bytes: int, run_records: int) -> list[RecordBatch]:
    values = sample_values(value_bytes)
    fresh = [bytes(bytearray(values[index % len(values)])) for index in range(RUN_POOL * run_records)]
    return [RecordBatch(fresh[first : first + run_records]) for first in range(0, len(fresh), run_records)]


def column_run_records(value_bytes: int) -> int:
    """How many records fill a batch."""
    return max(BATCH_BYTES_TARGET // value_bytes, 1)


def column_run_pool(value_bytes: int) -> list[ColumnBatch]:
    values, count = sample_values(value_bytes), column_run_records(value_bytes)
    return [
        ColumnBatch.of(RecordBatch([values[(first + index) % len(values)] for index in range(count)]))
        for first in range(0, COLUMN_RUN_POOL * count, count)
    ]


async def append(engine: EmbeddedEngine, runs: Sequence[AnyBatch], records: int, *, partitions: int = 1, tick: Tick | None = None) -> int:
    """Append at least `records` records durably, run by run, `RUNS_IN_FLIGHT` at a time; how many it were."""
    waiting: deque[asyncio.Future[list[Appended]]] = deque()
    done = turn = 0
    while done < records or waiting:
        if done < records:
            run = runs[turn % len(runs)]
            waiting.append(engine.append([Write(TOPIC, turn % partitions, run)]))
            done, turn = done + len(run), turn + 1
        if len(waiting) >= RUNS_IN_FLIGHT or done >= records:
            await waiting.popleft()
            if tick is not None and turn % 256 == 0:
                tick(done)
    return done


async def measure_append(directory: Path, plan: LogPlan, tick: Tick, *, columns: bool = False) -> float:
    """Records a second, in runs of the plan or as columns."""
    engine = open_engine(directory)
    await engine.open()
    try:
        await engine.create_topic(TOPIC, 1, TopicConfig())
        runs: Sequence[AnyBatch] = column_run_pool(plan.value_bytes) if columns else run_pool(plan.value_bytes, plan.run_records)
        began = time.perf_counter()
        done = await append(engine, runs, plan.records, tick=tick)
        return done / (time.perf_counter() - began)
    finally:
        await engine.close()


async def measure_reads(directory: Path) -> tuple[float, float]:
    """Records a second of what `measure_append` left behind: as columns, then as one object per value."""
    engine = open_engine(directory)
    await engine.open()
    try:
        return await _read_all(engine, columns=True), await _read_all(engine, columns=False)
    finally:
        await engine.close()


async def _read_all(engine: EmbeddedEngine, *, columns: bool) -> float:
    bounds = engine.bounds(TOPIC, 0)
    offset, count, size_bytes = bounds.first, 0, 0
    began = time.perf_counter()
    while offset < bounds.end:
        for batch in await engine.read(TOPIC, 0, offset, bytes_max=READ_BYTES_MAX):
            if columns:
                _offsets, values, _validity = batch.value_buffers()
                size_bytes += len(values)
                count += len(batch)
            else:
                count += len(batch.values())
            offset = batch.next_offset
    seconds = time.perf_counter() - began
    if count != bounds.end - bounds.first:
        raise BenchFailed(f"read {count} of {bounds.end - bounds.first} records")
    return count / seconds


async def measure_spread(directory: Path, partitions: int, value_bytes: int, each: int) -> tuple[float, float]:
    """Median seconds of a flush with `each` records for each partition, and of one with the same records for one partition."""
    engine = open_engine(directory)
    await engine.open()
    try:
        await engine.create_topic(TOPIC, partitions, TopicConfig())
        values = sample_values(value_bytes, partitions * each)
        spread = [
            Write(TOPIC, partition, RecordBatch(values[partition * each : (partition + 1) * each])) for partition in range(partitions)
        ]
        single = [Write(TOPIC, 0, RecordBatch(values))]
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * FLUSH_ROUNDS + 2):
            wide = turn % 2 == 0
            began = time.perf_counter()
            await engine.append(spread if wide else single)
            if turn >= 2:
                times[wide].append(time.perf_counter() - began)
        return statistics.median(times[True]), statistics.median(times[False])
    finally:
        await engine.close()


@dataclass(frozen=True, slots=True)
class Filled:
    """A log that lost its process to SIGKILL with a full journal."""

    directory: Path
    partitions: int
    records: int
    journal_bytes: int


def fill_and_kill(directory: Path, partitions: int, plan: LogPlan) -> Filled:
    """Have a child fill a log, then kill it between two breaths."""
    said = directory.with_suffix(".said")
    numbers = (plan.log_bytes, partitions, plan.value_bytes, plan.run_records)
    with child([sys.executable, "-m", "headrace.bench.fill", str(directory), *map(str, numbers)], said) as process:
        deadline = time.monotonic() + FILL_SECONDS_MAX
        while not said.read_bytes().endswith(b"}\n"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchFailed(f"filling a log failed: {last_line(said)}")
            time.sleep(0.05)
        process.kill()
        process.wait()
    told = json.loads(last_line(said))
    return Filled(directory, partitions, told["records"], told["journal_bytes"])


async def measure_recovery(filled: Filled) -> float:
    """Seconds until the log is open again, with every acknowledged record in it."""
    engine = open_engine(filled.directory)
    began = time.perf_counter()
    await engine.open()
    seconds = time.perf_counter() - began
    try:
        found = sum(engine.bounds(TOPIC, partition).end for partition in range(filled.partitions))
        if found < filled.records:
            raise BenchFailed(f"{filled.records - found} acknowledged records are gone after recovery")
        return seconds
    finally:
        await engine.close()
