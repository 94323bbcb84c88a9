"""Measurements of the storage layer without a network: appends, reads, recovery, flushes to many partitions."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.bench.children import BenchFailed, child
from headrace.bench.load import Tick, sample_values
from headrace.engine.contract import Ack, Appended, TopicConfig, Write
from headrace.engine.embedded import EmbeddedEngine
from headrace.limits import BATCH_BYTES_TARGET
from headrace.programs import last_line
from headrace.records import AnyBatch, ColumnBatch, RecordBatch
from headrace.storage.files import DiskFiles
from headrace.storage.store import StoreOptions

TOPIC = "bench"
READ_BYTES_MAX = 8 * 1024 * 1024
BATCHES_IN_FLIGHT = 64
"""Batches that wait for their flush at once, as those of a busy connection do."""
BATCH_POOL = 64
"""Distinct batches that are appended in turn, so that the values do not all fit into the processor's cache."""
COLUMN_BATCH_POOL = 16
"""The same for column batches."""
FLUSH_ROUNDS = 30
READ_ROUNDS = 10
SMALL_READS = 2_000
SMALL_READ_RECORDS = 10
SMALL_READ_BATCHES = 20
SMALL_READ_BATCH_RECORDS = 5_000
FILL_SECONDS_MAX = 1_200.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Sizes of one benchmark."""

    records: int
    value_bytes: int
    batch_records: int
    log_bytes: int
    partitions: int


def clock() -> int:
    return time.time_ns() // 1_000_000


def on_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run on the same kind of event loop as the broker."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def open_engine(directory: Path, options: StoreOptions | None = None) -> EmbeddedEngine:
    return EmbeddedEngine(DiskFiles(directory), options or StoreOptions(), clock=clock)


def batch_pool(value_bytes: int, batch_records: int) -> list[RecordBatch]:
    values = sample_values(value_bytes)
    fresh = [bytes(bytearray(values[index % len(values)])) for index in range(BATCH_POOL * batch_records)]
    return [RecordBatch(fresh[first : first + batch_records]) for first in range(0, len(fresh), batch_records)]


def column_batch_records(value_bytes: int) -> int:
    """Return the number of records that fill a batch."""
    return max(BATCH_BYTES_TARGET // value_bytes, 1)


def column_batch_pool(value_bytes: int) -> list[ColumnBatch]:
    values, count = sample_values(value_bytes), column_batch_records(value_bytes)
    return [
        ColumnBatch.of(RecordBatch([values[(first + index) % len(values)] for index in range(count)]))
        for first in range(0, COLUMN_BATCH_POOL * count, count)
    ]


async def append(
    engine: EmbeddedEngine, batches: Sequence[AnyBatch], records: int, *, partitions: int = 1, tick: Tick | None = None
) -> int:
    """Append at least `records` records durably, `BATCHES_IN_FLIGHT` batches at a time, and return their number."""
    waiting: deque[asyncio.Future[list[Appended]]] = deque()
    done = turn = 0
    while done < records or waiting:
        if done < records:
            batch = batches[turn % len(batches)]
            waiting.append(engine.append([Write(TOPIC, turn % partitions, batch)]))
            done, turn = done + len(batch), turn + 1
        if len(waiting) >= BATCHES_IN_FLIGHT or done >= records:
            await waiting.popleft()
            if tick is not None and turn % 256 == 0:
                tick(done)
    return done


async def measure_append(directory: Path, plan: LogPlan, tick: Tick, *, columns: bool = False) -> float:
    """Return records per second, in batches of the plan or as columns."""
    engine = open_engine(directory)
    await engine.open()
    try:
        await engine.create_topic(TOPIC, 1, TopicConfig())
        batches: Sequence[AnyBatch] = column_batch_pool(plan.value_bytes) if columns else batch_pool(plan.value_bytes, plan.batch_records)
        began = time.perf_counter()
        done = await append(engine, batches, plan.records, tick=tick)
        return done / (time.perf_counter() - began)
    finally:
        await engine.close()


async def measure_reads(directory: Path) -> tuple[float, float]:
    """Return records per second of reading what `measure_append` wrote: as columns, then as one object per value."""
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


async def measure_small_reads(directory: Path, value_bytes: int) -> dict[str, float]:
    """Return the CPU microseconds of a read of a few records from large batches in segments, by the places of the reads."""
    engine = open_engine(directory)
    await engine.open()
    try:
        await engine.create_topic(TOPIC, 1, TopicConfig())
        values = sample_values(value_bytes, SMALL_READ_BATCH_RECORDS)
        for _ in range(SMALL_READ_BATCHES):
            await engine.append([Write(TOPIC, 0, RecordBatch(values))])
        await engine.maintain()
        end, rng = engine.bounds(TOPIC, 0).end - SMALL_READ_RECORDS, random.Random(1)
        places = {
            "in order": [turn * SMALL_READ_RECORDS for turn in range(SMALL_READS)],
            "at one place": [end // 2] * SMALL_READS,
            "at random": [rng.randrange(end) for _ in range(SMALL_READS)],
        }
        return {name: await _small_reads(engine, offsets) for name, offsets in places.items()}
    finally:
        await engine.close()


async def _small_reads(engine: EmbeddedEngine, offsets: list[int]) -> float:
    began = time.process_time()
    for offset in offsets:
        found = await engine.read(TOPIC, 0, offset, bytes_max=READ_BYTES_MAX // 8, records_max=SMALL_READ_RECORDS)
        if sum(map(len, found)) != SMALL_READ_RECORDS:
            raise BenchFailed(f"a read at offset {offset} gave {sum(map(len, found))} of {SMALL_READ_RECORDS} records")
    return (time.process_time() - began) / len(offsets) * 1e6


@dataclass(frozen=True, slots=True)
class Filling:
    """Cost of a log that was filled in a certain way."""

    bytes_per_record: float
    columns_cpu_seconds: float
    """Of reading it."""
    values_cpu_seconds: float


async def measure_filling(directory: Path, records: int, value_bytes: int, each: int) -> Filling:
    """Fill a log with flushes of `each` records, close it, and read it."""
    engine = open_engine(directory)
    await engine.open()
    try:
        await engine.create_topic(TOPIC, 1, TopicConfig())
        values = sample_values(value_bytes, records)
        for first in range(0, records, each):
            await engine.append([Write(TOPIC, 0, RecordBatch(values[first : first + each]))], ack=Ack.WRITTEN)
    finally:
        await engine.close()
    engine = open_engine(directory)
    await engine.open()
    try:
        size_bytes = engine.size_bytes(TOPIC, 0)
        return Filling(size_bytes / records, await _reading_cpu(engine, columns=True), await _reading_cpu(engine, columns=False))
    finally:
        await engine.close()


async def _reading_cpu(engine: EmbeddedEngine, *, columns: bool) -> float:
    began = time.process_time()
    for _ in range(READ_ROUNDS):
        await _read_all(engine, columns=columns)
    return (time.process_time() - began) / READ_ROUNDS


async def measure_spread(directory: Path, partitions: int, value_bytes: int, each: int) -> tuple[float, float]:
    """Return the median seconds of a flush of `each` records per partition, and of one of the same records to one partition."""
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
    """A log whose process was killed with a full journal."""

    directory: Path
    partitions: int
    records: int
    journal_bytes: int


def fill_and_kill(directory: Path, partitions: int, plan: LogPlan) -> Filled:
    """Start a child that fills a log, then kill it with SIGKILL."""
    printed = directory.with_suffix(".out")
    numbers = (plan.log_bytes, partitions, plan.value_bytes, plan.batch_records)
    with child([sys.executable, "-m", "benchmarks.log_fill", str(directory), *map(str, numbers)], printed) as process:
        deadline = time.monotonic() + FILL_SECONDS_MAX
        while not printed.read_bytes().endswith(b"}\n"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchFailed(f"filling a log failed: {last_line(printed)}")
            time.sleep(0.05)
        process.kill()
        process.wait()
    filled = json.loads(last_line(printed))
    return Filled(directory, partitions, filled["records"], filled["journal_bytes"])


async def measure_recovery(filled: Filled) -> float:
    """Return the seconds until the log is open with every acknowledged record in it."""
    engine = open_engine(filled.directory)
    began = time.perf_counter()
    await engine.open()
    seconds = time.perf_counter() - began
    try:
        found = sum(engine.bounds(TOPIC, partition).end for partition in range(filled.partitions))
        if found < filled.records:
            raise BenchFailed(f"{filled.records - found} acknowledged records are missing after recovery")
        return seconds
    finally:
        await engine.close()
