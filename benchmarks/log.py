"""Benchmark of the storage layer without a network: `python -m benchmarks.log`.

Each figure is shown beside its target and beside the limits of the machine. `log_measurements` takes the measurements.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks import log_measurements as measurements
from benchmarks import main
from benchmarks.log_measurements import LogPlan, on_loop
from headrace.bench import options
from headrace.bench.children import Broker, broker
from headrace.bench.facts import sync_times
from headrace.bench.report import Figure, NoteValue, Target, percentile

if TYPE_CHECKING:
    from headrace.bench.facts import Steps

PARTS = ["raw", "append", "read", "small-reads", "singles", "spread", "recovery", "memory"]
APPEND_TARGET = Target(at_least=1_000_000)
COLUMNS_TARGET = Target(at_least=3_000_000)
READ_TARGET = Target(at_least=5_000_000)
SMALL_READ_TARGET = Target(at_most=10)
SINGLES_READ_TARGET = Target(at_least=0.5)
SINGLES_SIZE_TARGET = Target(at_most=1.2)
SINGLES_EVERY = 20
"""Of the records of the plan, one in so many: each takes a flush of its own."""
SPREAD_TARGET = Target(at_most=5)
SPREAD_RECORDS = (1, 10)
"""For each partition."""
RECOVERY_TARGET = Target(at_most=2)
MEMORY_TARGET = Target(at_most=150)
SYNC_ROUNDS = 100
COPY_ROUNDS = 3
_COPY_BYTES = 64 * 1024 * 1024
_MEGABYTE = 1_000_000


@click.command()
@options.common
@options.records(2_000_000)
@options.size()
@click.option("--batch", "batch_records", type=click.IntRange(1), default=1_000, show_default=True, help="Records of one append.")
@options.size("--log-size", "log_bytes", "1 GiB", "Size of the log that is recovered and then idles.")
@click.option("--partitions", type=click.IntRange(2, 1_000), default=1_000, show_default=True, help="Partitions of the large topics.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Measure only this part; may be repeated.")
def log(
    repeat: int, output: str, parent: Path | None, records: int, value_bytes: int, batch_records: int, log_bytes: int, partitions: int,
    only: tuple[str, ...],
) -> None:  # fmt: skip
    """Measure the storage layer without a network, beside the disk and the memory.

    raw: pwrite + fdatasync and memcpy. append: durable, 64 batches in flight. read: as columns and as values. small-reads: a few records
    at a time from large batches. singles: a log that was filled one record at a time beside one filled in batches. spread: a flush to all
    partitions, and one of the same bytes to one. recovery: opening a log whose process was killed with a full journal. memory: a broker
    that idles on that log.
    """
    config: dict[str, NoteValue] = {
        "records": records, "value_bytes": value_bytes, "batch_records": batch_records, "log_bytes": log_bytes, "partitions": partitions,
    }  # fmt: skip
    plan = LogPlan(records, value_bytes, batch_records, log_bytes, partitions)
    with options.measuring("log", repeat, output, parent, config) as bench:
        for figure in figures(plan, only or PARTS, bench.directory, repeat, bench.steps):
            bench.report.add(figure)


def figures(plan: LogPlan, parts: Collection[str], directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    """Measure the parts one after the other. Each part removes its files before the next begins."""
    if "raw" in parts:
        yield from _raw(plan, directory, repeat, steps)
    if "append" in parts or "read" in parts:
        yield from _append_and_read(plan, parts, directory / "log", repeat, steps)
    if "small-reads" in parts:
        yield from _small_reads(plan, directory / "small-reads", repeat, steps)
    if "singles" in parts:
        yield from _singles(plan, directory, repeat, steps)
    if "spread" in parts:
        for each in SPREAD_RECORDS:
            yield _spread(plan, each, directory / "spread", repeat, steps)
    if "recovery" in parts:
        yield _recovery(plan, 1, directory / "recovery", repeat, steps)
    if "recovery" in parts or "memory" in parts:
        yield from _many_partitions(plan, parts, directory / "many", repeat, steps)


def copy_rate() -> float:
    """Return the bytes per second that one core copies from memory to memory."""
    source, target = memoryview(bytes(_COPY_BYTES)), memoryview(bytearray(_COPY_BYTES))
    target[:] = source
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return _COPY_BYTES / min(times)


def _raw(plan: LogPlan, directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    batch_bytes = plan.value_bytes * plan.batch_records
    with steps.step("pwrite + fdatasync", repeat) as tick:
        for name, filled in (("a reserved file", False), ("a file written before", True)):
            rates, medians = [], []
            for turn in range(repeat):
                times = sync_times(directory, batch_bytes, SYNC_ROUNDS, filled=filled)
                rates.append(SYNC_ROUNDS * plan.batch_records / sum(times))
                medians.append(percentile(sorted(times), 50) * 1e3)
                tick(turn + 1)
            notes: dict[str, NoteValue] = {"p50 ms": percentile(sorted(medians), 50)}
            yield Figure(f"raw: pwrite + fdatasync of one batch, {name}", "records/s", rates, notes=notes)
    yield Figure("raw: memcpy", "GB/s", [copy_rate() / 1e9 for _ in range(COPY_ROUNDS)])


def _append_and_read(plan: LogPlan, parts: Collection[str], directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    appends, columns, values = [], [], []
    for turn in range(repeat):
        with steps.step(f"append {turn + 1}/{repeat}", plan.records) as tick:
            appends.append(on_loop(measurements.measure_append(directory, plan, tick)))
        if "read" in parts:
            with steps.step(f"read {turn + 1}/{repeat}", plan.records):
                rate, rate_as_values = on_loop(measurements.measure_reads(directory))
                columns.append(rate)
                values.append(rate_as_values)
        shutil.rmtree(directory)
    if "append" in parts:
        yield Figure(f"append, durable, batches of {plan.batch_records:,}", "records/s", appends, APPEND_TARGET)
        yield _append_columns(plan, directory, repeat, steps)
    if "read" in parts:
        yield Figure("read as columns", "records/s", columns, READ_TARGET)
        yield Figure("read as values", "records/s", values)


def _append_columns(plan: LogPlan, directory: Path, repeat: int, steps: Steps) -> Figure:
    rates = []
    for turn in range(repeat):
        with steps.step(f"append as columns {turn + 1}/{repeat}", plan.records) as tick:
            rates.append(on_loop(measurements.measure_append(directory, plan, tick, columns=True)))
        shutil.rmtree(directory)
    size = measurements.column_batch_records(plan.value_bytes)
    return Figure(f"append as columns, durable, batches of {size:,}", "records/s", rates, COLUMNS_TARGET)


def _small_reads(plan: LogPlan, directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    turns = []
    for turn in range(repeat):
        with steps.step(f"small reads {turn + 1}/{repeat}", 1):
            turns.append(on_loop(measurements.measure_small_reads(directory, plan.value_bytes)))
        shutil.rmtree(directory)
    what = f"read of {measurements.SMALL_READ_RECORDS} records from batches of {measurements.SMALL_READ_BATCH_RECORDS:,}"
    for name in turns[0]:
        yield Figure(f"{what}, {name}", "CPU µs", [times[name] for times in turns], SMALL_READ_TARGET)


def _singles(plan: LogPlan, directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    records = max(plan.records // SINGLES_EVERY, 1)
    sizes, columns, values, single_bytes, bulk_bytes = [], [], [], [], []
    for turn in range(repeat):
        with steps.step(f"single records {turn + 1}/{repeat}", 1):
            single = on_loop(measurements.measure_filling(directory / "single", records, plan.value_bytes, 1))
            bulk = on_loop(measurements.measure_filling(directory / "bulk", records, plan.value_bytes, plan.batch_records))
        sizes.append(single.bytes_per_record / bulk.bytes_per_record)
        columns.append(bulk.columns_cpu_seconds / single.columns_cpu_seconds)
        values.append(bulk.values_cpu_seconds / single.values_cpu_seconds)
        single_bytes.append(single.bytes_per_record)
        bulk_bytes.append(bulk.bytes_per_record)
        for name in ("single", "bulk"):
            shutil.rmtree(directory / name)
    notes: dict[str, NoteValue] = {"single B": percentile(sorted(single_bytes), 50), "bulk B": percentile(sorted(bulk_bytes), 50)}
    yield Figure("space of a record, filled one at a time ÷ in bulk", "×", sizes, SINGLES_SIZE_TARGET, notes)
    yield Figure("read as columns by CPU time, filled one at a time ÷ in bulk", "×", columns, SINGLES_READ_TARGET)
    yield Figure("read as values by CPU time, filled one at a time ÷ in bulk", "×", values, SINGLES_READ_TARGET)


def _spread(plan: LogPlan, each: int, directory: Path, repeat: int, steps: Steps) -> Figure:
    ratios, wide_ms, single_ms = [], [], []
    for turn in range(repeat):
        with steps.step(f"spread {turn + 1}/{repeat}", 1):
            wide, single = on_loop(measurements.measure_spread(directory, plan.partitions, plan.value_bytes, each))
        ratios.append(wide / single)
        wide_ms.append(wide * 1e3)
        single_ms.append(single * 1e3)
        shutil.rmtree(directory)
    notes = {"many ms": percentile(sorted(wide_ms), 50), "one ms": percentile(sorted(single_ms), 50)}
    what = "1 record" if each == 1 else f"{each} records"
    return Figure(f"flush to {plan.partitions:,} partitions, {what} each ÷ to one", "×", ratios, SPREAD_TARGET, {**notes})


def _recovery(plan: LogPlan, partitions: int, directory: Path, repeat: int, steps: Steps) -> Figure:
    """Measure recovery. The last log stays on disk, recovered."""
    seconds = []
    for turn in range(repeat):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        with steps.step(f"recovery, {partitions:,} partitions {turn + 1}/{repeat}", 1):
            filled = measurements.fill_and_kill(directory / "data", partitions, plan)
            seconds.append(on_loop(measurements.measure_recovery(filled)))
    name = "recovery, 1 partition" if partitions == 1 else f"recovery, {partitions:,} partitions"
    return Figure(name, "s", seconds, RECOVERY_TARGET, {"records": filled.records, "journal MB": filled.journal_bytes / _MEGABYTE})


def _many_partitions(plan: LogPlan, parts: Collection[str], directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    recovery = _recovery(plan, plan.partitions, directory, repeat if "recovery" in parts else 1, steps)
    if "recovery" in parts:
        yield recovery
    if "memory" in parts:
        sizes, starts = [], []
        for turn in range(repeat):
            with steps.step(f"idle memory {turn + 1}/{repeat}", 1), broker(directory) as running:
                sizes.append(_settled(running) / _MEGABYTE)
                starts.append(running.start_seconds)
        notes: dict[str, NoteValue] = {"start s": percentile(sorted(starts), 50)}
        yield Figure(f"idle memory, {plan.partitions:,} partitions", "MB", sizes, MEMORY_TARGET, notes)


def _settled(running: Broker) -> int:
    """Return the resident set once it no longer changes, after at most five seconds."""
    last = running.resident_bytes()
    for _ in range(10):
        time.sleep(0.5)
        before, last = last, running.resident_bytes()
        if last == before:
            break
    return last


if __name__ == "__main__":
    main(log, "log")
