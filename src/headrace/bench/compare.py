"""Comparison of Headrace with other brokers, or on Kafka with clients of Kafka: same machine, same load generator, same values.

Every round starts each server on an empty directory, publishes, then reads everything back. Rounds alternate between the servers, so that
a slow period of the machine affects all of them. Each ratio is taken within one round.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench import traffic
from headrace.bench.children import broker
from headrace.bench.load import Tick, sample_values
from headrace.bench.peers import kafka, nats, redis
from headrace.bench.protocols import ProtocolLoad
from headrace.bench.report import Figure, Target
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
JAVA = "kafka java"
KAFKA_TARGETS = {"publish": Target(at_least=0.7), "consume": Target(at_least=0.6)}
"""Minimum ratios on Kafka to whole batches of aiokafka and to a parser of raw Fetch responses."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Workload of every candidate."""

    records: int
    value_bytes: int
    directory: Path


@dataclass(slots=True)
class Candidate:
    """One server with one configuration. A round returns its rates by name, in records per second."""

    name: str
    round: Callable[[Comparison, Tick], dict[str, float]]
    runs: dict[str, list[float]] = field(default_factory=dict)


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

    def aiokafka(comparison: Comparison, tick: Tick) -> dict[str, float]:
        topic, values = kafka.new_topic(cluster), sample_values(comparison.value_bytes)
        seconds = kafka.publish(cluster, topic, values, comparison.records, tick)
        return {
            "publish": comparison.records / seconds,
            "consume": comparison.records / kafka.consume(cluster, topic, comparison.records, tick),
        }

    def java(comparison: Comparison, tick: Tick) -> dict[str, float]:
        return {"publish": kafka.publish_with_java(cluster, kafka.new_topic(cluster), comparison.records, comparison.value_bytes)}

    ours = [Candidate(f"{_OURS}{load.name}", _headrace(load, below)) for load in protocols]
    return [*ours, Candidate(AIOKAFKA, aiokafka), Candidate(JAVA, java)]


def rounds(comparison: Comparison, found: list[Candidate], repeat: int, steps: Steps) -> None:
    """Run every candidate `repeat` times."""
    for turn in range(repeat):
        for candidate in found:
            with steps.step(f"{candidate.name} {turn + 1}/{repeat}", comparison.records) as tick:
                for name, rate in candidate.round(comparison, tick).items():
                    candidate.runs.setdefault(name, []).append(rate)


def figures(found: list[Candidate]) -> list[Figure]:
    """Return all rates, then the ratio of each protocol to each peer."""
    shown = [Figure(f"{candidate.name} {name}", "records/s", runs) for candidate in found for name, runs in candidate.runs.items()]
    ours = [candidate for candidate in found if candidate.name.startswith(_OURS)]
    for candidate in ours:
        for peer in found:
            if peer in ours:
                continue
            for name in [name for name in candidate.runs if name in peer.runs]:
                ratios = [mine / theirs for mine, theirs in zip(candidate.runs[name], peer.runs[name], strict=True)]
                shown.append(Figure(f"{name}: {candidate.name} ÷ {peer.name}", "×", ratios, _target(name, candidate.name, peer.name)))
    return shown


def _target(name: str, ours: str, peer: str) -> Target | None:
    if peer == AIOKAFKA:
        return KAFKA_TARGETS[name]
    return TARGETS.get((name, ours.removeprefix(_OURS))) if peer == "nats jetstream" else None


def _headrace(load: ProtocolLoad, environment: Mapping[str, str] | None = None) -> Callable[[Comparison, Tick], dict[str, float]]:
    def once(comparison: Comparison, tick: Tick) -> dict[str, float]:
        with _fresh(comparison.directory / "headrace") as directory, broker(directory, environment=environment) as running:
            plan = traffic.Traffic(load, running.address, running.key, comparison.records, comparison.value_bytes)
            traffic.warm_up(plan)
            topic = traffic.new_topic(plan, readers=int(load.reads_history))
            seconds = traffic.publish(plan, topic, tick)
            if not load.reads_history:
                # The measured topic has no subscription, as on the other servers: the reader gets its own topic.
                topic = traffic.new_topic(plan, readers=1)
                traffic.publish(plan, topic)
            name = "consume" if load.reads_history else "consume with acks"
            return {"publish": comparison.records / seconds, name: comparison.records / traffic.consume(plan, topic, tick)}

    return once


def _nats(comparison: Comparison, tick: Tick) -> dict[str, float]:
    with _fresh(comparison.directory / "nats") as directory, nats.server(directory) as address:
        values = sample_values(comparison.value_bytes)
        nats.publish(address, values, traffic.warm_up_records(comparison.records, comparison.value_bytes), stream="warm-up")
        return {
            "publish": comparison.records / nats.publish(address, values, comparison.records, tick=tick),
            "consume": comparison.records / nats.consume(address, comparison.records, tick),
            "consume with acks": comparison.records / nats.consume(address, comparison.records, tick, acked=True),
        }


def _nats_client(comparison: Comparison, tick: Tick) -> dict[str, float]:
    records = min(comparison.records, CLIENT_RECORDS_MAX)
    with _fresh(comparison.directory / "nats-py") as directory, nats.server(directory) as address:
        return {"publish": records / nats.publish_with_client(address, sample_values(comparison.value_bytes), records)}


def _redis(appendfsync: str) -> Callable[[Comparison, Tick], dict[str, float]]:
    def once(comparison: Comparison, tick: Tick) -> dict[str, float]:
        with _fresh(comparison.directory / "redis") as directory, redis.server(directory, appendfsync) as address:
            return {
                "publish": comparison.records / redis.publish(address, sample_values(comparison.value_bytes), comparison.records, tick),
                "consume": comparison.records / redis.consume(address, comparison.records, tick),
            }

    return once


@contextmanager
def _fresh(directory: Path) -> Iterator[Path]:
    """Yield an empty directory and remove it at the end, so that rounds do not share dirty pages or fill the disk."""
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
