"""Ways of publishing that take turns, so that a slow minute of the machine hits all of them: a ratio is taken within its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import click

from headrace.bench import traffic
from headrace.bench.guarded import guarded_broker, load_of
from headrace.bench.load import Chunk, LoadConnection, Tick, run, sample_values
from headrace.bench.options import Bench, Chosen, Measured
from headrace.bench.protocols.flymq_schema import FlyMqJsonLoad
from headrace.bench.protocols.flymq_transactions import UNDER_WAY, transactions
from headrace.bench.report import Figure, Target, cpu_note

PUBLISH_TARGETS: Final = {"figg": Target(at_least=600_000)}
AGAINST_ONE_TARGET: Final = Target(at_least=0.7)
"""Many connections lose less than 30 % of what one can do."""
SCHEMA_TARGET: Final = Target(at_least=0.5)
"""Checking every value costs no more than everything else does."""
TRANSACTION_TARGET: Final = Target(at_least=0.7)
"""Of transactions of `TRANSACTION_RECORDS` or more; smaller ones have no target."""
TRANSACTION_RECORDS: Final = 100
ACCESS_TARGET: Final = Target(at_least=0.95)
"""Rules cost less than 5 % of the throughput."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What plain publishing is held against."""

    against_one: bool = False
    schema: str | None = None
    transactions: int | None = None
    access: str | None = None

    def check(self, protocol: str, connections: int, server: str | None) -> None:
        """Raises `UsageError` for what does not go together."""
        if [self.against_one, bool(self.schema), bool(self.transactions), bool(self.access)].count(True) > 1:
            raise click.UsageError("one of --against-one, --schema, --transactions and --access at a time")
        if self.against_one and connections == 1:
            raise click.UsageError("--against-one needs --connections above 1")
        if (self.schema or self.transactions) and protocol != "flymq":
            raise click.UsageError("--schema and --transactions are for --protocol flymq")
        if self.access and (server is not None or protocol == "fujin"):
            raise click.UsageError("--access needs a broker that is started here, and a protocol over TCP")


@dataclass(slots=True)
class Way:
    """One way of publishing the same records."""

    figure: Figure
    target: Measured
    plan: traffic.Traffic
    publish: Callable[[traffic.Traffic, traffic.Place, Tick | None], float] = traffic.publish
    cpu_seconds: float = 0.0
    is_cpu_shown: bool = True
    """Not where connections log in: hashing a password costs more than publishing a hundred thousand records."""

    def once(self, bench: Bench, turn: int) -> None:
        place, before = traffic.new_topic(self.plan), self.target.cpu_seconds()
        with bench.steps.step(f"{self.figure.name} {turn + 1}/{bench.repeat}", self.plan.records) as tick:
            self.figure.runs.append(self.plan.records / self.publish(self.plan, place, tick))
        self.cpu_seconds += self.target.cpu_seconds() - before


def take_turns(bench: Bench, ways: Sequence[Way]) -> None:
    """Every way once, then all of them again the other way round: what one has written goes to the disk while the next is measured."""
    for turn in range(bench.repeat):
        for way in ways if turn % 2 == 0 else reversed(ways):
            way.once(bench, turn)
    for way in (way for way in ways if way.is_cpu_shown):
        way.figure.notes = cpu_note(way.cpu_seconds, way.plan.records * bench.repeat)


def ratio(name: str, above: Way, below: Way, target: Target | None) -> Figure:
    ratios = [one / other for one, other in zip(above.figure.runs, below.figure.runs, strict=True)]
    return Figure(name, "×", ratios, target)


def in_transactions(size: int) -> Callable[[traffic.Traffic, traffic.Place, Tick | None], float]:
    """Publish in transactions of so many records (FlyMQ)."""

    def publish(plan: traffic.Traffic, place: traffic.Place, tick: Tick | None = None) -> float:
        values, shares = sample_values(plan.value_bytes), traffic.shares(plan.records, plan.connections)
        with traffic.entered(plan, len(shares)) as socks:
            lanes = []
            for sock, share in zip(socks, shares, strict=True):
                begun = transactions(place.topic, values, share, size)
                lanes.append(LoadConnection(sock, [Chunk(begun.request, 0)], begun.meter, share))
            return run(lanes, tick)

    return publish


def ways_of(bench: Bench, brokers: ExitStack, chosen: Chosen, target: Measured, plan: traffic.Traffic, beside: Beside) -> list[Way]:
    """Plain publishing, and beside it what is asked for. A further broker lives as long as `brokers`."""
    name = f"{plan.load.name} publish, {chosen.ack}"
    plain = Way(Figure(f"{name}, {plan.connections} connections" if plan.connections > 1 else name, "records/s", []), target, plan)

    def other(words: str, changed: traffic.Traffic, on: Measured = target) -> Way:
        return Way(Figure(f"{name}, {words}", "records/s", []), on, changed)

    if beside.against_one:
        return [plain, other("1 connection", replace(plan, connections=1))]
    if beside.schema:
        plain.plan = replace(plan, load=FlyMqJsonLoad(required=False))
        return [plain, other(f"{beside.schema} schema", replace(plan, load=FlyMqJsonLoad(required=True)))]
    if beside.transactions:
        staged = other(f"transactions of {beside.transactions}", plan)
        staged.publish = in_transactions(beside.transactions)
        window = UNDER_WAY * beside.transactions
        return [plain, staged, other(f"{window:,} under way", replace(plan, window=window))]
    if beside.access:
        running, password = brokers.enter_context(guarded_broker(bench.directory / beside.access, chosen.ack))
        guarded = replace(plan, load=load_of(plan.load.name, password), address=running.address, key=running.key)
        traffic.warm_up(guarded)
        held = other(f"access {beside.access}", guarded, Measured(running.address, running.key, running))
        held.is_cpu_shown = plan.load.name != "flymq"
        return [plain, held]
    return [plain]


def figures_of(ways: Sequence[Way], plan: traffic.Traffic, beside: Beside) -> list[Figure]:
    """The rate of each way, and the ratio where there are two."""
    plain, protocol = ways[0], plan.load.name
    plain.figure.target = PUBLISH_TARGETS.get(protocol) if plan.connections == 1 else None
    figures = [way.figure for way in ways]
    if beside.schema:
        figures.append(ratio(f"{protocol} publish: with a schema ÷ without", ways[1], plain, SCHEMA_TARGET))
    if beside.against_one:
        figures.append(ratio(f"{protocol} publish: {plan.connections} connections ÷ 1", plain, ways[1], AGAINST_ONE_TARGET))
    if beside.transactions:
        target = TRANSACTION_TARGET if beside.transactions >= TRANSACTION_RECORDS else None
        figures.append(ratio(f"{protocol} publish: transactions of {beside.transactions} ÷ none", ways[1], plain, target))
        figures.append(
            ratio(f"{protocol} publish: transactions of {beside.transactions} ÷ none, as many under way", ways[1], ways[2], None)
        )
    if beside.access:
        figures.append(ratio(f"{protocol} publish: access {beside.access} ÷ open", ways[1], plain, ACCESS_TARGET))
    return figures
