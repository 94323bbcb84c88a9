"""`headrace bench requests`: one request under way on each of many connections, beside servers that only echo or commit the same bytes.

Each repetition measures the broker, then the bare server with requests and replies of the same size. Each ratio is taken within one
repetition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from headrace.bench import exchanges, fujin, fujin_requests, traffic
from headrace.bench.bare import Bare, Kind, bare_server, head
from headrace.bench.children import cpu_seconds
from headrace.bench.closed_loop import Exchanged, Requester, exchange, fixed
from headrace.bench.load import connected
from headrace.bench.options import Bench, Chosen
from headrace.bench.protocols import PROTOCOLS
from headrace.bench.report import Figure, NoteValue, Target, percentile

PERCENTILES: Final = (50.0, 99.0, 99.9)
READ_TARGET: Final = Target(at_least=0.4)
"""Of the bare echo."""
PUBLISH_TARGET: Final = Target(at_least=0.7)
"""Of the bare group commit."""
QUIC_TARGET: Final = Target(at_least=0.6)
"""Of the bare QUIC server."""
CPU_TARGET: Final = Target(at_most=30.0)
"""Microseconds of the broker per request."""
ONE_PUBLISH_TARGET: Final = Target(at_most=0.05)
"""Milliseconds above the bare group commit, one publish at a time."""
_READ_CONNECTIONS: Final = (1, 16)
_PUBLISH_CONNECTIONS: Final = (16, 64)
_QUIC_STREAMS: Final = 16
_TARGET_READS: Final = {
    ("flymq", "consume"),
    ("flymq", "fetch-10"),
    ("rustlog", "fetch-1"),
    ("rustlog", "fetch-10"),
    ("blipmq", "consume"),
}

Once: TypeAlias = Callable[[str, int], tuple[Exchanged, Exchanged]]
"""Measures an operation on a number of connections: the broker, then the bare server."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of the command."""

    protocol: str
    operations: Sequence[str]
    connections: Sequence[int]
    seconds: float
    records: int
    """Records of the topic that is read."""
    value_bytes: int


@dataclass(slots=True)
class Point:
    """All repetitions of one operation on a number of connections."""

    protocol: str
    operation: str
    connections: int
    ours: list[Exchanged] = field(default_factory=list)
    bare: list[Exchanged] = field(default_factory=list)

    @property
    def target(self) -> Target | None:
        """Return the target of the ratio to the bare server."""
        if self.protocol == "fujin":
            return QUIC_TARGET if self.connections == _QUIC_STREAMS and self.operation != "fetch-500" else None
        if self.operation == "publish":
            return PUBLISH_TARGET if self.connections in _PUBLISH_CONNECTIONS else None
        is_target = (self.protocol, self.operation) in _TARGET_READS and self.connections in _READ_CONNECTIONS
        return READ_TARGET if is_target else None

    def figures(self) -> list[Figure]:
        """Return the rates of the broker and of the bare server, their ratio, and the figures that have a target of their own."""
        noun = "stream" if self.protocol == "fujin" else "connection"
        name = f"{self.protocol} {self.operation}, {self.connections} {noun}{'s' if self.connections > 1 else ''}"
        bare = f"bare {'group commit' if self.operation == 'publish' else 'echo'}{' over QUIC' if self.protocol == 'fujin' else ''}"
        shown = [
            Figure(name, "requests/s", [run.rate for run in self.ours], notes=_notes(self.ours)),
            Figure(f"{name}: {bare}", "requests/s", [run.rate for run in self.bare], notes=_notes(self.bare)),
            Figure(f"{name} ÷ bare", "×", [our.rate / its.rate for our, its in zip(self.ours, self.bare, strict=True)], self.target),
        ]
        if self.target is not None and self.protocol != "fujin" and all(run.peer_cpu_seconds for run in self.ours):
            shown.append(Figure(f"{name}: broker CPU", "µs/request", [_cpu(run) for run in self.ours], CPU_TARGET))
        if self.operation == "publish" and self.connections == 1 and self.protocol != "fujin":
            above = [_median(our) - _median(its) for our, its in zip(self.ours, self.bare, strict=True)]
            shown.append(Figure(f"{name}, above bare", "ms p50", above, ONE_PUBLISH_TARGET))
        return shown


def _cpu(run: Exchanged) -> float:
    return run.peer_cpu_seconds / run.requests * 1e6


def _median(run: Exchanged) -> float:
    return percentile(sorted(run.latencies), 50) * 1e3


def _notes(runs: Sequence[Exchanged]) -> dict[str, NoteValue]:
    """Return percentiles in ms over all repetitions, and the CPU time of server and load generator per request in µs."""
    ordered = sorted(latency for run in runs for latency in run.latencies)
    notes: dict[str, NoteValue] = {f"p{percent:g}": round(percentile(ordered, percent) * 1e3, 4) for percent in PERCENTILES}
    for name, seconds in (("CPU µs", sum(run.peer_cpu_seconds for run in runs)), ("load CPU µs", sum(run.own_cpu_seconds for run in runs))):
        if seconds:
            notes[name] = round(seconds / sum(run.requests for run in runs) * 1e6, 1)
    return notes


def measure(bench: Bench, chosen: Chosen, workload: Workload) -> list[Point]:
    """Measure all operations on all numbers of connections, `repeat` times."""
    operations = exchanges.operations_of(workload.protocol, workload.operations)
    points = [Point(workload.protocol, operation, count) for operation in operations for count in workload.connections]
    with (_over_quic if workload.protocol == "fujin" else _over_tcp)(bench, chosen, workload) as once:
        for turn in range(bench.repeat):
            for point in points:
                with bench.steps.step(f"{point.operation}, {point.connections} connections, {turn + 1}/{bench.repeat}", 1):
                    ours, bare = once(point.operation, point.connections)
                point.ours.append(ours)
                point.bare.append(bare)
    return points


@contextmanager
def _over_tcp(bench: Bench, chosen: Chosen, workload: Workload) -> Iterator[Once]:
    with bench.broker(chosen) as target, bare_server(bench.directory) as bare:
        plan = traffic.Traffic(PROTOCOLS[workload.protocol], target.address, target.key, workload.records, workload.value_bytes)
        topic = traffic.new_topic(plan)
        if plan.load.reads_history:
            traffic.publish(plan, topic)
        traffic.warm_up(plan)

        def once(operation: str, connections: int) -> tuple[Exchanged, Exchanged]:
            prepared = exchanges.prepare(plan, topic, operation, connections)
            with traffic.logged_in(plan, connections) as socks:
                requesters = [Requester(sock, own, prepared.framing) for sock, own in zip(socks, prepared.requests, strict=True)]
                exchange(requesters, 0.0, target.cpu_seconds)
                sizes = requesters[0].request_bytes, requesters[0].reply_bytes
                ours = exchange(requesters, workload.seconds, target.cpu_seconds)
            return ours, _bare_once(bare, Kind.COMMIT if operation == "publish" else Kind.ECHO, connections, *sizes, workload.seconds)

        yield once


def _bare_once(bare: Bare, kind: Kind, connections: int, request_bytes: int, reply_bytes: int, seconds: float) -> Exchanged:
    with connected(bare.tcp, connections) as socks:
        for sock in socks:
            sock.sendall(head(kind, request_bytes, reply_bytes))
        requesters = [Requester(sock, itertools.repeat(bytes(request_bytes)), fixed(reply_bytes)) for sock in socks]
        exchange(requesters, 0.0, bare.cpu_seconds)
        return exchange(requesters, seconds, bare.cpu_seconds)


@contextmanager
def _over_quic(bench: Bench, chosen: Chosen, workload: Workload) -> Iterator[Once]:
    with fujin.quic_broker(bench.directory, chosen.ack, chosen.profile) as (address, pid), bare_server(bench.directory, quic=True) as bare:

        def once(operation: str, streams: int) -> tuple[Exchanged, Exchanged]:
            plan = fujin_requests.prepare(address, operation, streams, workload.records, workload.value_bytes)
            ours, *sizes = fujin_requests.run(address, plan, workload.seconds, lambda: cpu_seconds(pid))
            assert bare.quic is not None
            bare_plan = fujin_requests.prepare_bare(operation, streams, *sizes)
            return ours, fujin_requests.run(bare.quic, bare_plan, workload.seconds, bare.cpu_seconds)[0]

        yield once
