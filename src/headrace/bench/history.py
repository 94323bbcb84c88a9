"""`headrace bench consume`: read whole topics, also one that was filled one record at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from headrace.bench import singles, traffic
from headrace.bench.options import Bench, Chosen
from headrace.bench.protocols import PROTOCOLS
from headrace.bench.report import Figure, Target, cpu_note

TARGETS: Final = {"figg": Target(at_least=1_000_000)}
"""Records per second of a topic that was filled in bulk."""
SINGLES_TARGET: Final = Target(at_least=0.5)
"""Of a topic that was filled in bulk."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of the command."""

    protocol: str
    records: int
    value_bytes: int
    connections: int
    has_singles: bool


@dataclass(slots=True)
class _Read:
    """Reads of one topic."""

    name: str
    topic: traffic.BenchTopic
    rates: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of the broker, in all repetitions."""


def measure(bench: Bench, chosen: Chosen, workload: Workload) -> Iterator[Figure]:
    """Read the topics in turns, `repeat` times. Each connection reads the whole topic."""
    protocol, records, connections = workload.protocol, workload.records, workload.connections
    total = records * connections
    with bench.broker(chosen) as target:
        plan = traffic.Traffic(PROTOCOLS[protocol], target.address, target.key, records, workload.value_bytes, connections)
        reads = [_Read(f"{protocol} consume, history", traffic.new_topic(plan, readers=bench.repeat * connections))]
        with bench.steps.step("fill", records) as tick:
            traffic.publish(replace(plan, connections=1), reads[0].topic, tick)
        if workload.has_singles:
            with bench.steps.step("fill one record at a time", 1):
                reads.append(_Read(f"{protocol} consume, filled one at a time", singles.filled_topic(plan, bench.repeat * connections)))
        traffic.warm_up(plan)
        for turn in range(bench.repeat):
            for read in reads:
                cpu_before = target.cpu_seconds()
                with bench.steps.step(f"{read.name} {turn + 1}/{bench.repeat}", total) as tick:
                    read.rates.append(total / traffic.consume(plan, read.topic, tick, turn=turn))
                read.cpu_seconds += target.cpu_seconds() - cpu_before
    goals = [TARGETS.get(protocol), None]
    for read, goal in zip(reads, goals, strict=False):
        yield Figure(read.name, "records/s", read.rates, goal, cpu_note(read.cpu_seconds, total * bench.repeat))
    if workload.has_singles:
        bulk, single = reads
        ratios = [mine / plain for mine, plain in zip(single.rates, bulk.rates, strict=True)]
        yield Figure(f"{protocol}: filled one at a time ÷ in bulk", "×", ratios, SINGLES_TARGET)
