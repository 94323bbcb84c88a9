"""The figures of `headrace bench log`, part by part, each beside its target and beside what the machine allows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench import logs
from headrace.bench.children import Broker, broker
from headrace.bench.logs import LogPlan, on_loop
from headrace.bench.raw import copy_rate, sync_times
from headrace.bench.report import Figure, Target, percentile

if TYPE_CHECKING:
    from headrace.bench.progress import Steps

APPEND_TARGET = Target(at_least=1_000_000)
COLUMNS_TARGET = Target(at_least=3_000_000)
READ_TARGET = Target(at_least=5_000_000)
SPREAD_TARGET = Target(at_most=5)
SPREAD_RECORDS = (1, 10)
"""For each partition."""
RECOVERY_TARGET = Target(at_most=2)
MEMORY_TARGET = Target(at_most=150)
SYNC_ROUNDS = 100
COPY_ROUNDS = 3
_MEGABYTE = 1_000_000


def figures(plan: LogPlan, parts: Collection[str], directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    """Measure the parts one after the other; what one leaves on disk is gone before the next begins."""
    if "raw" in parts:
        yield from _raw(plan, directory, repeat, steps)
    if "append" in parts or "read" in parts:
        yield from _append_and_read(plan, parts, directory / "log", repeat, steps)
    if "spread" in parts:
        for each in SPREAD_RECORDS:
            yield _spread(plan, each, directory / "spread", repeat, steps)
    if "recovery" in parts:
        yield _recovery(plan, 1, directory / "recovery", repeat, steps)
    if "recovery" in parts or "memory" in parts:
        yield from _many_partitions(plan, parts, directory / "many", repeat, steps)


def _raw(plan: LogPlan, directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    run_bytes = plan.value_bytes * plan.run_records
    with steps.step("pwrite + fdatasync", repeat) as tick:
        for name, filled in (("a reserved file", False), ("a file written before", True)):
            rates, medians = [], []
            for turn in range(repeat):
                times = sync_times(directory, run_bytes, SYNC_ROUNDS, filled=filled)
                rates.append(SYNC_ROUNDS * plan.run_records / sum(times))
                medians.append(percentile(sorted(times), 50) * 1e3)
                tick(turn + 1)
            yield Figure(
                f"raw: pwrite + fdatasync of one run, {name}", "records/s", rates, notes={"p50 ms": percentile(sorted(medians), 50)}
            )
    yield Figure("raw: memcpy", "GB/s", [copy_rate() / 1e9 for _ in range(COPY_ROUNDS)])


def _append_and_read(plan: LogPlan, parts: Collection[str], directory: Path, repeat: int, steps: Steps) -> Iterator[Figure]:
    appends, columns, values = [], [], []
    for turn in range(repeat):
        with steps.step(f"append {turn + 1}/{repeat}", plan.records) as tick:
            appends.append(on_loop(logs.measure_append(directory, plan, tick)))
        if "read" in parts:
            with steps.step(f"read {turn + 1}/{repeat}", plan.records):
                rate, rate_as_values = on_loop(logs.measure_reads(directory))
                columns.append(rate)
                values.append(rate_as_values)
        shutil.rmtree(directory)
    if "append" in parts:
        yield Figure(f"append, durable, runs of {plan.run_records:,}", "records/s", appends, APPEND_TARGET)
        yield _append_columns(plan, directory, repeat, steps)
    if "read" in parts:
        yield Figure("read as columns", "records/s", columns, READ_TARGET)
        yield Figure("read as values", "records/s", values)


def _append_columns(plan: LogPlan, directory: Path, repeat: int, steps: Steps) -> Figure:
    rates = []
    for turn in range(repeat):
        with steps.step(f"append as columns {turn + 1}/{repeat}", plan.records) as tick:
            rates.append(on_loop(logs.measure_append(directory, plan, tick, columns=True)))
        shutil.rmtree(directory)
    return Figure(f"append as columns, durable, runs of {logs.column_run_records(plan.value_bytes):,}", "records/s", rates, COLUMNS_TARGET)


def _spread(plan: LogPlan, each: int, directory: Path, repeat: int, steps: Steps) -> Figure:
    ratios, wide_ms, single_ms = [], [], []
    for turn in range(repeat):
        with steps.step(f"spread {turn + 1}/{repeat}", 1):
            wide, single = on_loop(logs.measure_spread(directory, plan.partitions, plan.value_bytes, each))
        ratios.append(wide / single)
        wide_ms.append(wide * 1e3)
        single_ms.append(single * 1e3)
        shutil.rmtree(directory)
    notes = {"many ms": percentile(sorted(wide_ms), 50), "one ms": percentile(sorted(single_ms), 50)}
    what = "1 record" if each == 1 else f"{each} records"
    return Figure(f"flush to {plan.partitions:,} partitions, {what} each ÷ to one", "×", ratios, SPREAD_TARGET, {**notes})


def _recovery(plan: LogPlan, partitions: int, directory: Path, repeat: int, steps: Steps) -> Figure:
    """The last log stays on disk, recovered."""
    seconds = []
    for turn in range(repeat):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        with steps.step(f"recovery, {partitions:,} partitions {turn + 1}/{repeat}", 1):
            filled = logs.fill_and_kill(directory / "data", partitions, plan)
            seconds.append(on_loop(logs.measure_recovery(filled)))
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
        yield Figure(
            f"idle memory, {plan.partitions:,} partitions", "MB", sizes, MEMORY_TARGET, {"start s": percentile(sorted(starts), 50)}
        )


def _settled(running: Broker) -> int:
    """The resident set once it stands still, so that a start under way is not taken for idling; at most five seconds."""
    last = running.resident_bytes()
    for _ in range(10):
        time.sleep(0.5)
        before, last = last, running.resident_bytes()
        if last == before:
            break
    return last
