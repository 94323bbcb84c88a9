"""Comparison of Headrace with other brokers, or on Kafka with clients of Kafka: same machine, same load generator, same values.

Every round starts each server on an empty directory, publishes, then reads everything back. Rounds alternate between the servers, so that
a slow period of the machine affects all of them. Each ratio is taken within one round.

On Kafka, a parser of raw Fetch responses reads the topic that Headrace has written: the same record batches from the same node. The two
take turns, and the best of each counts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from headrace.bench import traffic
from headrace.bench.children import broker
from headrace.bench.load import Tick, sample_values
from headrace.bench.peers import kafka, nats, redis
from headrace.bench.protocols import ProtocolLoad
from headrace.bench.report import Figure, NoteValue, Target
from headrace.extras import needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.facts import Steps
    from headrace.kafka_server import Cluster

PEERS = ("nats", "redis")
CLIENT_RECORDS_MAX = 50_000
"""The Python client of a peer is much slower, so fewer records are enough."""
_OURS = "headrace "
TARGETS = {
    ("publish", "figg"): Target(at_least=1.5),
    ("publish", "blipmq"): Target(at_least=1.5),
    ("publish", "flymq"): Target(at_least=1.0),
    ("publish", "rustlog"): Target(at_least=0.5),
    ("consume", "figg"): Target(at_least=2.0),
    ("consume", "flymq"): Target(at_least=2.0),
    ("consume with acks", "blipmq"): Target(at_least=1.0),
}
"""Minimum ratios to NATS JetStream with its default sync, over raw sockets."""
AIOKAFKA = "aiokafka"
PARSER = "raw Fetch"
READS = 3
"""Turns in which Headrace on Kafka and the parser of raw Fetch responses read a topic."""
JAVA = "kafka java"
KAFKA_TARGETS = {"publish": Target(at_least=0.7), "consume": Target(at_least=0.6)}
"""Minimum ratios on Kafka to whole batches of aiokafka and to a parser of raw Fetch responses."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Workload of every candidate."""

    records: int
    value_bytes: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one round, by name."""

    rates: Mapping[str, float]
    """Records per second."""
    parser: Mapping[str, float] = field(default_factory=dict)
    """Rates of the parser of raw Fetch responses on the same topic."""
    cpu: Mapping[str, float] = field(default_factory=dict)
    """CPU time of the broker, in µs per record."""


@dataclass(slots=True)
class Candidate:
    """One server with one configuration, and its rounds."""

    name: str
    round: Callable[[Comparison, Tick], Measured]
    rounds: list[Measured] = field(default_factory=list)

    @property
    def runs(self) -> dict[str, list[float]]:
        """Rates of all rounds by name."""
        return _by_name([measured.rates for measured in self.rounds])


def candidates(protocols: Iterable[ProtocolLoad], against: Iterable[str]) -> list[Candidate]:
    """Return Headrace with each of the protocols, then the peers. Raises `PeerMissing` before anything is measured."""
    found = [Candidate(f"{_OURS}{load.name}", _headrace(load)) for load in protocols]
    for name in against:
        if name == "nats":
            with needs("headrace bench compare", "nats"):
                nats.server_binary()
            found += [Candidate("nats jetstream", _nats), Candidate("nats jetstream, nats-py", _nats_client)]
        else:
            redis.server_binary()
            found += [Candidate(f"redis streams, {sync}", _redis(sync)) for sync in ("everysec", "always")]
    return found


def on_kafka(protocols: Iterable[ProtocolLoad], cluster: Cluster) -> list[Candidate]:
    """Return Headrace with each of the protocols on a Kafka cluster, then Kafka's own clients on the same."""
    below = {"HEADRACE__STORAGE__ENGINE": "kafka", "HEADRACE__KAFKA__BOOTSTRAP": cluster.bootstrap}

    def aiokafka(comparison: Comparison, tick: Tick) -> Measured:
        values = sample_values(comparison.value_bytes)
        seconds = kafka.publish(cluster, kafka.new_topic(cluster), values, comparison.records, tick)
        return Measured({"publish": comparison.records / seconds})

    def java(comparison: Comparison, tick: Tick) -> Measured:
        rate = kafka.publish_with_java(cluster, kafka.new_topic(cluster), comparison.records, comparison.value_bytes)
        return Measured({"publish": rate})

    ours = [Candidate(f"{_OURS}{load.name}", _headrace(load, below, cluster)) for load in protocols]
    return [*ours, Candidate(AIOKAFKA, aiokafka), Candidate(JAVA, java)]


def rounds(comparison: Comparison, found: list[Candidate], repeat: int, steps: Steps) -> None:
    """Run every candidate `repeat` times."""
    for turn in range(repeat):
        for candidate in found:
            with steps.step(f"{candidate.name} {turn + 1}/{repeat}", comparison.records) as tick:
                candidate.rounds.append(candidate.round(comparison, tick))


def figures(found: list[Candidate]) -> list[Figure]:
    """Return all rates, then the ratio of each protocol to each peer."""
    shown: list[Figure] = []
    for candidate in found:
        cpu = _by_name([measured.cpu for measured in candidate.rounds])
        for name, runs in candidate.runs.items():
            notes: dict[str, NoteValue] = {"broker CPU µs/record": round(median(cpu[name]), 3)} if name in cpu else {}
            shown.append(Figure(f"{candidate.name} {name}", "records/s", runs, None, notes))
        for name, runs in _by_name([measured.parser for measured in candidate.rounds]).items():
            shown.append(Figure(f"{PARSER} {name}, topic of {candidate.name}", "records/s", runs))
    ours = [candidate for candidate in found if candidate.name.startswith(_OURS)]
    for candidate in ours:
        for name, runs in _by_name([measured.parser for measured in candidate.rounds]).items():
            ratios = [mine / theirs for mine, theirs in zip(candidate.runs[name], runs, strict=True)]
            shown.append(Figure(f"{name}: {candidate.name} ÷ {PARSER}", "×", ratios, KAFKA_TARGETS[name]))
        for peer in found:
            if peer in ours:
                continue
            for name in [name for name in candidate.runs if name in peer.runs]:
                ratios = [mine / theirs for mine, theirs in zip(candidate.runs[name], peer.runs[name], strict=True)]
                shown.append(Figure(f"{name}: {candidate.name} ÷ {peer.name}", "×", ratios, _target(name, candidate.name, peer.name)))
    return shown


def _by_name(rounds: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for measured in rounds:
        for name, value in measured.items():
            found.setdefault(name, []).append(value)
    return found


def _target(name: str, ours: str, peer: str) -> Target | None:
    if peer == AIOKAFKA:
        return KAFKA_TARGETS[name]
    return TARGETS.get((name, ours.removeprefix(_OURS))) if peer == "nats jetstream" else None


def _headrace(
    load: ProtocolLoad, environment: Mapping[str, str] | None = None, cluster: Cluster | None = None
) -> Callable[[Comparison, Tick], Measured]:
    """Return a round of Headrace. With a Kafka cluster, the parser of raw Fetch responses reads the same topic."""

    def once(comparison: Comparison, tick: Tick) -> Measured:
        records = comparison.records
        with _fresh(comparison.directory / "headrace") as directory, broker(directory, environment=environment) as running:
            plan = traffic.Traffic(load, running.address, running.key, comparison.records, comparison.value_bytes)
            traffic.warm_up(plan)
            turns = 1 if cluster is None or not load.reads_history else READS
            topic = traffic.new_topic(plan, readers=turns * load.reads_history)
            cpu = running.cpu_seconds()
            seconds = traffic.publish(plan, topic, tick)
            cpu_publish = running.cpu_seconds() - cpu
            if not load.reads_history:
                # The measured topic has no subscription, as on the other servers: the reader gets its own topic.
                topic = traffic.new_topic(plan, readers=1)
                traffic.publish(plan, topic)
            name = "consume" if load.reads_history else "consume with acks"
            ours, parser, cpu_read = [], [], 0.0
            for turn in range(turns):
                cpu = running.cpu_seconds()
                ours.append(traffic.consume(plan, topic, tick, turn=turn))
                cpu_read += (running.cpu_seconds() - cpu) / turns
                if cluster is not None and load.reads_history:
                    parser.append(kafka.consume(cluster, topic.name, records, tick))
            return Measured(
                {"publish": records / seconds, name: records / min(ours)},
                {name: records / min(parser)} if parser else {},
                {"publish": cpu_publish / records * 1e6, name: cpu_read / records * 1e6},
            )

    return once


def _nats(comparison: Comparison, tick: Tick) -> Measured:
    with _fresh(comparison.directory / "nats") as directory, nats.server(directory) as address:
        values = sample_values(comparison.value_bytes)
        nats.publish(address, values, traffic.warm_up_records(comparison.records, comparison.value_bytes), stream="warm-up")
        return Measured(
            {
                "publish": comparison.records / nats.publish(address, values, comparison.records, tick=tick),
                "consume": comparison.records / nats.consume(address, comparison.records, tick),
                "consume with acks": comparison.records / nats.consume(address, comparison.records, tick, acked=True),
            }
        )


def _nats_client(comparison: Comparison, tick: Tick) -> Measured:
    records = min(comparison.records, CLIENT_RECORDS_MAX)
    with _fresh(comparison.directory / "nats-py") as directory, nats.server(directory) as address:
        return Measured({"publish": records / nats.publish_with_client(address, sample_values(comparison.value_bytes), records)})


def _redis(appendfsync: str) -> Callable[[Comparison, Tick], Measured]:
    def once(comparison: Comparison, tick: Tick) -> Measured:
        with _fresh(comparison.directory / "redis") as directory, redis.server(directory, appendfsync) as address:
            return Measured(
                {
                    "publish": comparison.records / redis.publish(address, sample_values(comparison.value_bytes), comparison.records, tick),
                    "consume": comparison.records / redis.consume(address, comparison.records, tick),
                }
            )

    return once


@contextmanager
def _fresh(directory: Path) -> Iterator[Path]:
    """Yield an empty directory and remove it at the end, so that rounds do not share dirty pages or fill the disk."""
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
