"""Alternating variants of publishing. Each ratio is taken within one turn, so that other work on the machine affects both variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import click

from headrace.bench import traffic
from headrace.bench.enforced import enforced_broker, load_of
from headrace.bench.load import Chunk, LoadConnection, Tick, run, sample_values
from headrace.bench.options import Bench, Chosen, Measured
from headrace.bench.protocols.flymq import FlyMqJsonLoad
from headrace.bench.protocols.flymq_transactions import IN_FLIGHT, transactions
from headrace.bench.report import Figure, Target, cpu_note

PUBLISH_TARGETS: Final = {"figg": Target(at_least=600_000)}
AGAINST_ONE_TARGET: Final = Target(at_least=0.7)
"""Many connections reach at least 70 % of the rate of one."""
SCHEMA_TARGET: Final = Target(at_least=0.5)
"""Checking every value costs at most half of the throughput."""
TRANSACTION_TARGET: Final = Target(at_least=0.7)
"""For transactions of `TRANSACTION_RECORDS` or more; smaller ones have no target."""
TRANSACTION_RECORDS: Final = 100
ACCESS_TARGET: Final = Target(at_least=0.95)
"""Access rules cost at most 5 % of the throughput."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Variant that plain publishing is compared with."""

    against_one: bool = False
    schema: str | None = None
    transactions: int | None = None
    access: str | None = None

    def check(self, protocol: str, connections: int, server: str | None) -> None:
        """Raise `UsageError` for options that exclude each other."""
        if [self.against_one, bool(self.schema), bool(self.transactions), bool(self.access)].count(True) > 1:
            raise click.UsageError("use only one of --against-one, --schema, --transactions and --access")
        if self.against_one and connections == 1:
            raise click.UsageError("--against-one needs --connections above 1")
        if (self.schema or self.transactions) and protocol != "flymq":
            raise click.UsageError("--schema and --transactions are for --protocol flymq")
        if self.access and (server is not None or protocol == "fujin"):
            raise click.UsageError("--access cannot be used with --server or --protocol fujin")


@dataclass(slots=True)
class Variant:
    """One variant of publishing the same records."""

    figure: Figure
    target: Measured
    plan: traffic.Traffic
    publish: Callable[[traffic.Traffic, traffic.BenchTopic, Tick | None], float] = traffic.publish
    cpu_seconds: float = 0.0
    is_cpu_shown: bool = True
    """False where connections log in: hashing a password costs more than publishing a hundred thousand records."""

    def once(self, bench: Bench, turn: int) -> None:
        topic, before = traffic.new_topic(self.plan), self.target.cpu_seconds()
        with bench.steps.step(f"{self.figure.name} {turn + 1}/{bench.repeat}", self.plan.records) as tick:
            self.figure.runs.append(self.plan.records / self.publish(self.plan, topic, tick))
        self.cpu_seconds += self.target.cpu_seconds() - before


def take_turns(bench: Bench, variants: Sequence[Variant]) -> None:
    """Run all variants `repeat` times, in alternating order, because writeback of one variant overlaps the next."""
    for turn in range(bench.repeat):
        for variant in variants if turn % 2 == 0 else reversed(variants):
            variant.once(bench, turn)
    for variant in (variant for variant in variants if variant.is_cpu_shown):
        variant.figure.notes = cpu_note(variant.cpu_seconds, variant.plan.records * bench.repeat)


def ratio(name: str, above: Variant, below: Variant, target: Target | None) -> Figure:
    ratios = [one / other for one, other in zip(above.figure.runs, below.figure.runs, strict=True)]
    return Figure(name, "×", ratios, target)


def in_transactions(size: int) -> Callable[[traffic.Traffic, traffic.BenchTopic, Tick | None], float]:
    """Return a function that publishes in transactions of `size` records (FlyMQ)."""

    def publish(plan: traffic.Traffic, topic: traffic.BenchTopic, tick: Tick | None = None) -> float:
        values, counts = sample_values(plan.value_bytes), traffic.records_per_connection(plan.records, plan.connections)
        with traffic.logged_in(plan, len(counts)) as socks:
            loads = []
            for sock, count in zip(socks, counts, strict=True):
                begun = transactions(topic.name, values, count, size)
                loads.append(LoadConnection(sock, [Chunk(begun.request, 0)], begun.meter, count))
            return run(loads, tick)

    return publish


def variants_of(
    bench: Bench, brokers: ExitStack, chosen: Chosen, target: Measured, plan: traffic.Traffic, compared: Compared
) -> list[Variant]:
    """Return plain publishing and the variant that `compared` names. Further brokers are stopped by `brokers`."""
    name = f"{plan.load.name} publish, {chosen.ack}"
    plain = Variant(Figure(f"{name}, {plan.connections} connections" if plan.connections > 1 else name, "records/s", []), target, plan)

    def other(words: str, changed: traffic.Traffic, on: Measured = target) -> Variant:
        return Variant(Figure(f"{name}, {words}", "records/s", []), on, changed)

    if compared.against_one:
        return [plain, other("1 connection", replace(plan, connections=1))]
    if compared.schema:
        plain.plan = replace(plan, load=FlyMqJsonLoad(required=False))
        return [plain, other(f"{compared.schema} schema", replace(plan, load=FlyMqJsonLoad(required=True)))]
    if compared.transactions:
        staged = other(f"transactions of {compared.transactions}", plan)
        staged.publish = in_transactions(compared.transactions)
        window = IN_FLIGHT * compared.transactions
        return [plain, staged, other(f"{window:,} in flight", replace(plan, window=window))]
    if compared.access:
        running, password = brokers.enter_context(enforced_broker(bench.directory / compared.access, chosen.ack))
        enforced = replace(plan, load=load_of(plan.load.name, password), address=running.address, key=running.key)
        traffic.warm_up(enforced)
        checked = other(f"access {compared.access}", enforced, Measured(running.address, running.key, running))
        checked.is_cpu_shown = plan.load.name != "flymq"
        return [plain, checked]
    return [plain]


def figures_of(variants: Sequence[Variant], plan: traffic.Traffic, compared: Compared) -> list[Figure]:
    """Return the rate of each variant, and the ratios."""
    plain, protocol = variants[0], plan.load.name
    plain.figure.target = PUBLISH_TARGETS.get(protocol) if plan.connections == 1 else None
    figures = [variant.figure for variant in variants]
    if compared.schema:
        figures.append(ratio(f"{protocol} publish: with a schema ÷ without", variants[1], plain, SCHEMA_TARGET))
    if compared.against_one:
        figures.append(ratio(f"{protocol} publish: {plan.connections} connections ÷ 1", plain, variants[1], AGAINST_ONE_TARGET))
    if compared.transactions:
        target = TRANSACTION_TARGET if compared.transactions >= TRANSACTION_RECORDS else None
        figures.append(ratio(f"{protocol} publish: transactions of {compared.transactions} ÷ none", variants[1], plain, target))
        figures.append(
            ratio(f"{protocol} publish: transactions of {compared.transactions} ÷ none, as many in flight", variants[1], variants[2], None)
        )
    if compared.access:
        figures.append(ratio(f"{protocol} publish: access {compared.access} ÷ open", variants[1], plain, ACCESS_TARGET))
    return figures
