"""`headrace capacity`: from cost per record to machines.

    demand of a resource  = records/s × cost per record × times it is paid
    units of a resource   = demand ÷ (capacity of one unit × utilisation), rounded up

The costs are measured (docs/scale-out.md names the commands); everything can be replaced with `--set`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import click

from headrace.cli import terminal
from headrace.cli.rows import show_rows

RATES: Final = (10_000.0, 1_000_000.0, 100_000_000.0)
_GIGABIT_BYTES: Final = 125_000_000
_SUFFIXES: Final = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a record, workload and machines. Costs are CPU µs and bytes per record of `value_bytes`."""

    value_bytes: float = 100
    """Size of a value."""
    readers: float = 1
    """Times each record is read through Headrace by clients, besides Spark."""
    spark_readers: float = 1
    """Times each record is read by Spark, through the Flight endpoint."""
    replicas: float = 3
    """Replicas of a Kafka partition."""
    retention_hours: float = 24
    """Time that Kafka keeps records."""
    utilisation: float = 0.6
    """Share of CPU, network and disk to plan with."""

    protocol_bytes: float = 25
    """Framing of a record on the wire of a client."""
    stored_bytes: float = 10
    """Framing of a record in a Kafka batch."""
    compression: float = 1
    """Size of a stored record relative to its bytes; 0.3 is common for JSON."""

    broker_publish_us: float = 1.7
    """Headrace: decode, stage, send to Kafka, acknowledge."""
    broker_read_us: float = 0.6
    """Headrace: fetch from Kafka, encode for a client."""
    broker_flight_us: float = 0.65
    """Headrace: fetch from Kafka, encode as Arrow."""
    broker_cores: float = 1.4
    """Cores that one broker can use: an event loop, and threads that work beside it."""
    broker_base_mb: float = 90
    """Memory of an idle broker."""
    broker_buffer_seconds: float = 2
    """Seconds of traffic that a broker holds in memory."""

    kafka_leader_us: float = 0.8
    """Kafka: append on the leader."""
    kafka_follower_us: float = 0.95
    """Kafka: fetch and append on one follower."""
    kafka_read_us: float = 0.15
    """Kafka: serve one read."""
    kafka_cores: float = 8
    """Cores of a Kafka node."""
    kafka_disk_mb: float = 400
    """Sequential write rate of a node's disks, MB/s."""
    kafka_disk_tb: float = 8
    """Size of a node's disks, TB."""

    spark_us: float = 4
    """Spark: one row from the Flight endpoint through a simple query into a table."""
    executor_cores: float = 4
    """Cores of a Spark executor."""

    partition_rate: float = 100_000
    """Records/s that one partition takes at the latency in the documentation."""
    network_gbit: float = 10
    """Full-duplex network of a machine, Gbit/s."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One resource: how much is needed and what one unit gives."""

    unit: str
    """Counted thing: broker, Kafka node, partition, executor."""
    resource: str
    needed: float
    per_unit: float

    @property
    def units(self) -> float:
        return self.needed / self.per_unit


REMEDIES: Final[Mapping[str, str]] = {
    "broker CPU": "more brokers; larger batches from clients; fewer single-record requests",
    "broker network": "compressing clients, more brokers, faster cards",
    "Kafka CPU": "more nodes; fewer, larger batches; fewer readers of each record",
    "Kafka network": "faster cards; compression; one reader that serves many (fan-out in Headrace instead of reads from Kafka)",
    "Kafka disk rate": "more or faster disks; compression",
    "Kafka disk size": "shorter retention; tiered storage; compression",
    "Spark CPU": "more executors; columnar values instead of JSON",
}


def demands(rate: float, costs: Costs) -> list[Demand]:
    """Return what a rate needs of each resource."""
    wire = costs.value_bytes + costs.protocol_bytes
    stored = (costs.value_bytes + costs.stored_bytes) * costs.compression
    reads = costs.readers + costs.spark_readers
    cpu = costs.utilisation * 1e6
    link = costs.network_gbit * _GIGABIT_BYTES * costs.utilisation
    broker_us = costs.broker_publish_us + costs.readers * costs.broker_read_us + costs.spark_readers * costs.broker_flight_us
    kafka_us = costs.kafka_leader_us + (costs.replicas - 1) * costs.kafka_follower_us + reads * costs.kafka_read_us
    # In: from clients, and reads from Kafka. Out: to Kafka, and to readers.
    broker_in, broker_out = wire + reads * stored, stored + reads * wire
    # In: each replica once. Out: to followers, and to brokers.
    retention_seconds = costs.retention_hours * 3600
    kafka_in, kafka_out = costs.replicas * stored, (costs.replicas - 1 + reads) * stored
    return [
        Demand("brokers", "broker CPU", rate * broker_us, costs.broker_cores * cpu),
        Demand("brokers", "broker network", rate * max(broker_in, broker_out), link),
        Demand("kafka_nodes", "Kafka CPU", rate * kafka_us, costs.kafka_cores * cpu),
        Demand("kafka_nodes", "Kafka network", rate * max(kafka_in, kafka_out), link),
        Demand("kafka_nodes", "Kafka disk rate", rate * kafka_in, costs.kafka_disk_mb * 1e6 * costs.utilisation),
        Demand("kafka_nodes", "Kafka disk size", rate * kafka_in * retention_seconds, costs.kafka_disk_tb * 1e12 * costs.utilisation),
        Demand("partitions", "partition rate", rate, costs.partition_rate * costs.utilisation),
        Demand("executors", "Spark CPU", rate * costs.spark_readers * costs.spark_us, costs.executor_cores * cpu),
    ]  # fmt: skip


def plan(rate: float, costs: Costs) -> dict[str, object]:
    """Return machines, partitions, network and memory for a rate. The bottleneck is the resource that needs the most machines."""
    found = demands(rate, costs)
    counts = {unit: max(math.ceil(each.units) for each in found if each.unit == unit) for unit in dict.fromkeys(d.unit for d in found)}
    counts["brokers"] = max(counts["brokers"], 1)
    counts["kafka_nodes"] = max(counts["kafka_nodes"], int(costs.replicas))
    counts["partitions"] = max(counts["partitions"], counts["brokers"], counts["executors"] * int(costs.executor_cores), 1)
    # Partitions are not machines: more of them cost little until there are thousands on a node.
    first, second = sorted((each for each in found if each.unit != "partitions"), key=lambda each: -each.units)[:2]
    wire, stored = costs.value_bytes + costs.protocol_bytes, (costs.value_bytes + costs.stored_bytes) * costs.compression
    reads = costs.readers + costs.spark_readers
    moved = wire * (1 + reads) + stored * (costs.replicas + reads)
    per_broker = rate / counts["brokers"] * (wire + stored) * costs.broker_buffer_seconds
    return {
        "records_per_s": rate,
        **counts,
        "gbit_per_s": round(rate * moved / _GIGABIT_BYTES, 3),
        "broker_memory_mb": round(costs.broker_base_mb + per_broker / 1e6),
        "stored_tb": round(rate * stored * costs.replicas * costs.retention_hours * 3600 / 1e12, 3),
        "bottleneck": first.resource if first.units > 1 else "none",
        "next": second.resource if second.units > 1 else "none",
        "remedy": REMEDIES[first.resource] if first.units > 1 else "one of each is enough; replication asks for more Kafka nodes",
        "demands": {each.resource: round(each.units, 3) for each in found},
    }


class _Rate(click.ParamType[float]):
    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).replace("_", "").replace(",", "")
        suffix = text[-1:] if text[-1:] in _SUFFIXES else ""
        try:
            rate = float(text.removesuffix(suffix)) * _SUFFIXES[suffix]
        except ValueError:
            rate = 0.0
        if not 0 < rate < math.inf:
            self.fail(f"{value!r} is not a rate; expected records per second such as 10000, 50k or 1M", param, ctx)
        return rate


@click.command()
@click.option("--rate", "rates", type=_Rate(), multiple=True, help="Records per second, as 50k or 1M; repeatable. Default: 10k, 1M, 100M.")
@click.option(
    "--set", "settings", metavar="NAME=NUMBER", multiple=True, help="Replace a cost or a machine; --costs lists them. Repeatable."
)
@click.option("--costs", "show_costs", is_flag=True, help="List the costs, machines and workload that are used, and exit.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format.")
def capacity(rates: tuple[float, ...], settings: tuple[str, ...], show_costs: bool, output: str) -> int:
    """Plan brokers, Kafka nodes and Spark executors.

    Arithmetic with measured costs per record, for the Kafka engine. It assumes that load is spread evenly; measure your own costs with
    headrace bench and give them with --set.
    """
    costs = _replaced(Costs(), settings)
    if show_costs:
        return show_rows([{"name": name, "value": value} for name, value in _values(costs).items()], output, columns=("name", "value"))
    plans = [plan(rate, costs) for rate in rates or RATES]
    if output == "json":
        terminal.echo(json.dumps({"costs": _values(costs), "plans": plans}, indent=2))
        return 0
    columns = (
        "records_per_s",
        "brokers",
        "kafka_nodes",
        "partitions",
        "gbit_per_s",
        "executors",
        "broker_memory_mb",
        "stored_tb",
        "bottleneck",
        "next",
    )
    show_rows([{**one, "records_per_s": f"{one['records_per_s']:,.0f}"} for one in plans], output, columns=columns)
    for one in plans:
        terminal.echo(f"{one['records_per_s']:,.0f}/s: {one['bottleneck']}: {one['remedy']}")
    return 0


def _values(costs: Costs) -> dict[str, float]:
    return dataclasses.asdict(costs)


def _replaced(costs: Costs, settings: tuple[str, ...]) -> Costs:
    known = _values(costs)
    given: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; expected one of {', '.join(known)}", param_hint="--set")
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        may_be_zero = name in ("readers", "spark_readers") or name.endswith("_us")
        if not (number > 0 or (may_be_zero and number == 0)) or number == math.inf:
            raise click.BadParameter(f"{name}: expected a positive number, got {text!r}", param_hint="--set")
        given[name] = number
    return dataclasses.replace(costs, **given)
