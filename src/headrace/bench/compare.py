"""Headrace beside other brokers: same machine, same minute, same load generator, same values.

Every round starts each server anew on an empty directory, publishes, then reads everything back; rounds alternate between the
servers, so that a slow minute of the machine hits all of them. A ratio is taken within its round, never across rounds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench import traffic
from headrace.bench.children import broker
from headrace.bench.doors import DoorLoad
from headrace.bench.load import Tick, sample_values
from headrace.bench.peers import nats, redis
from headrace.bench.report import Figure, Target
from headrace.extras import needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.progress import Steps

PEERS = ("nats", "redis")
CLIENT_RECORDS_MAX = 50_000
"""The Python client of a peer is so much slower that fewer records say the same."""
_OURS = "headrace "
TARGETS = {
    ("publish", "figg"): Target(at_least=1.5),
    ("publish", "blipmq"): Target(at_least=1.5),
    ("publish", "flymq"): Target(at_least=1.0),
    ("publish", "rustlog"): Target(at_least=0.5),
    ("consume", "figg"): Target(at_least=2.0),
    ("consume", "flymq"): Target(at_least=2.0),
}
"""Ratios to NATS JetStream with its default sync, over raw sockets."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What every contender has to do."""

    records: int
    value_bytes: int
    directory: Path


@dataclass(slots=True)
class Contender:
    """One server in one setting: a round yields its figures by name, in records a second."""

    name: str
    round: Callable[[Contest, Tick], dict[str, float]]
    runs: dict[str, list[float]] = field(default_factory=dict)


def contenders(doors: Iterable[DoorLoad], against: Iterable[str]) -> list[Contender]:
    """Headrace through each of the doors, then the peers. Raises `PeerMissing` before anything is measured."""
    found = [Contender(f"{_OURS}{load.name}", _headrace(load)) for load in doors]
    for name in against:
        if name == "nats":
            with needs("headrace bench compare", "nats"):
                nats.server_binary()
            found += [Contender("nats jetstream", _nats), Contender("nats jetstream, nats-py", _nats_client)]
        else:
            redis.server_binary()
            found += [Contender(f"redis streams, {sync}", _redis(sync)) for sync in ("everysec", "always")]
    return found


def rounds(contest: Contest, found: list[Contender], repeat: int, steps: Steps) -> None:
    """Every contender, `repeat` times over."""
    for turn in range(repeat):
        for contender in found:
            with steps.step(f"{contender.name} {turn + 1}/{repeat}", contest.records) as tick:
                for name, rate in contender.round(contest, tick).items():
                    contender.runs.setdefault(name, []).append(rate)


def figures(found: list[Contender]) -> list[Figure]:
    """All rates, then the ratio of each door to each peer."""
    shown = [Figure(f"{contender.name} {name}", "records/s", runs) for contender in found for name, runs in contender.runs.items()]
    ours = [contender for contender in found if contender.name.startswith(_OURS)]
    for contender in ours:
        for peer in found:
            if peer in ours:
                continue
            for name in [name for name in contender.runs if name in peer.runs]:
                ratios = [mine / theirs for mine, theirs in zip(contender.runs[name], peer.runs[name], strict=True)]
                shown.append(Figure(f"{name}: {contender.name} ÷ {peer.name}", "×", ratios, _target(name, contender.name, peer.name)))
    return shown


def _target(name: str, ours: str, peer: str) -> Target | None:
    return TARGETS.get((name, ours.removeprefix(_OURS))) if peer == "nats jetstream" else None


def _headrace(load: DoorLoad) -> Callable[[Contest, Tick], dict[str, float]]:
    def once(contest: Contest, tick: Tick) -> dict[str, float]:
        with _fresh(contest.directory / "headrace") as directory, broker(directory) as running:
            plan = traffic.Traffic(load, running.address, running.key, contest.records, contest.value_bytes)
            traffic.warm_up(plan)
            place = traffic.new_topic(plan, readers=int(load.reads_history))
            seconds = traffic.publish(plan, place, tick)
            if not load.reads_history:
                # Nobody subscribes to what is measured, as nobody does at the other servers: the reader gets a topic of its own.
                place = traffic.new_topic(plan, readers=1)
                traffic.publish(plan, place)
            return {"publish": contest.records / seconds, "consume": contest.records / traffic.consume(plan, place, tick)}

    return once


def _nats(contest: Contest, tick: Tick) -> dict[str, float]:
    with _fresh(contest.directory / "nats") as directory, nats.server(directory) as address:
        values = sample_values(contest.value_bytes)
        nats.publish(address, values, min(traffic.WARM_UP_RECORDS, contest.records), stream="warm-up")
        return {
            "publish": contest.records / nats.publish(address, values, contest.records, tick=tick),
            "consume": contest.records / nats.consume(address, contest.records, tick),
        }


def _nats_client(contest: Contest, tick: Tick) -> dict[str, float]:
    records = min(contest.records, CLIENT_RECORDS_MAX)
    with _fresh(contest.directory / "nats-py") as directory, nats.server(directory) as address:
        return {"publish": records / nats.publish_with_client(address, sample_values(contest.value_bytes), records)}


def _redis(appendfsync: str) -> Callable[[Contest, Tick], dict[str, float]]:
    def once(contest: Contest, tick: Tick) -> dict[str, float]:
        with _fresh(contest.directory / "redis") as directory, redis.server(directory, appendfsync) as address:
            return {
                "publish": contest.records / redis.publish(address, sample_values(contest.value_bytes), contest.records, tick),
                "consume": contest.records / redis.consume(address, contest.records, tick),
            }

    return once


@contextmanager
def _fresh(directory: Path) -> Iterator[Path]:
    """An empty directory, removed at the end so that rounds do not share dirty pages or fill the disk."""
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
