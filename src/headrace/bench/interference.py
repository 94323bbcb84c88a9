"""`headrace bench interference`: the latency of a small publisher and a small reader beside a tenant that keeps the broker busy.

The publisher sends single records and the reader fetches ten records at fixed times, both through FlyMQ. Each tenant is measured twice: on
the same broker, and as a control on a second broker of the same machine, where it takes the same CPU time and disk but not the event loop.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace.bench import traffic
from headrace.bench.children import BenchFailed, cpu_seconds, parse_address, serving
from headrace.bench.latency import Slots, open_loop, publish_slots
from headrace.bench.options import Bench
from headrace.bench.protocols.flymq import call, payload_bytes
from headrace.bench.protocols.meters import Replies
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.bench.tenants import TENANTS, VALUE_BYTES, Place, Sizes, Work, running
from headrace.server.loop_lag import BOUNDS_MS, percentile_bound
from headrace.wire.flymq import Opcode, encode_request
from headrace.wire.flymq.advanced_messages import BrokerCall, BrokerReply
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import Fetch

READ_RECORDS: Final = 10
TOPIC_RECORDS: Final = 1_000
"""Records of the topic that the small reader reads."""
CONTROL_FACTOR: Final = 2.0
"""The p99 beside a tenant is at most this multiple of the control, plus one fdatasync."""
TURN_TARGET: Final = Target(at_most=5.0)
_SETTLE_SECONDS: Final = 0.25
_SETTLE_SECONDS_MAX: Final = 30.0
_IDLE_CPU: Final = 0.1
"""CPU seconds per second of brokers that have nothing left to do."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests per second of the small clients, and the duration of a measurement."""

    rate: int
    seconds: float

    @property
    def requests(self) -> int:
        return max(1, round(self.rate * self.seconds))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of each publish and each fetch of one measurement."""

    publisher: array[float]
    reader: array[float]
    lag: Sequence[int] = ()
    """Ticks of the broker's event loop by bucket of their lag."""
    turns: Sequence[int] = ()
    """Turns of the loop by bucket of their CPU time."""


@dataclass(slots=True)
class Beside:
    """All repetitions beside one tenant. Without a tenant, `control` is empty."""

    tenant: str
    shared: list[Latencies] = field(default_factory=list)
    control: list[Latencies] = field(default_factory=list)

    def figures(self, fdatasync_ms: float) -> list[Figure]:
        """Return the p99 of publisher and reader. Its target follows from the control."""
        return [
            self._figure("publisher", [run.publisher for run in self.shared], [run.publisher for run in self.control], fdatasync_ms),
            self._figure("reader", [run.reader for run in self.shared], [run.reader for run in self.control], fdatasync_ms),
        ]

    def loop_figures(self) -> list[Figure]:
        """Return the lag of the broker's event loop and the CPU time of its turns. The lag has no target: it includes the time in which the
        machine ran other programs."""
        place = f"beside {self.tenant}" if self.control else "alone"
        longest: dict[str, NoteValue] = {"longest at most": max(_bound(run.turns, 100) for run in self.shared)}
        return [
            Figure(f"loop lag {place}", "ms p99", [_bound(run.lag, 99) for run in self.shared]),
            Figure(f"loop turns {place}", "ms CPU p99", [_bound(run.turns, 99) for run in self.shared], TURN_TARGET, longest),
        ]

    def _figure(self, client: str, shared: list[array[float]], control: list[array[float]], fdatasync_ms: float) -> Figure:
        highest = _milliseconds(shared, 99)
        notes: dict[str, NoteValue] = {"p50": statistics.median(_milliseconds(shared, 50))}
        if not control:
            return Figure(f"{client} alone", "ms p99", highest, notes=notes)
        control_p99 = statistics.median(_milliseconds(control, 99))
        notes["control p50"], notes["control p99"] = statistics.median(_milliseconds(control, 50)), control_p99
        notes["p99 ÷ control"] = statistics.median(highest) / control_p99
        target = Target(at_most=CONTROL_FACTOR * control_p99 + fdatasync_ms)
        return Figure(f"{client} beside {self.tenant}", "ms p99", highest, target, notes)


def _bound(counts: Sequence[int], percent: float) -> float:
    return min(percentile_bound(counts, percent), float(BOUNDS_MS[-1]))


def _milliseconds(runs: Sequence[array[float]], percent: float) -> list[float]:
    return [percentile(sorted(run), percent) * 1e3 for run in runs]


class Answers(Replies):
    """Counts FlyMQ replies."""

    def __init__(self) -> None:
        super().__init__(HEADER_BYTES, payload_bytes)

    def _on_reply(self, head: bytes, end: bytes) -> bytes:
        if head[2] == Opcode.ERROR:
            raise BenchFailed("flymq: the broker answered the small reader with an error")
        self.count += 1
        return b""


@dataclass(frozen=True, slots=True)
class Host:
    """A broker, with its process id."""

    place: Place
    pid: int


def settle(hosts: Sequence[Host]) -> None:
    """Wait until the brokers have finished their work in the background."""
    deadline = time.monotonic() + _SETTLE_SECONDS_MAX
    while time.monotonic() < deadline:
        before = sum(cpu_seconds(each.pid) for each in hosts)
        time.sleep(_SETTLE_SECONDS)
        if sum(cpu_seconds(each.pid) for each in hosts) - before <= _IDLE_CPU * _SETTLE_SECONDS:
            return


@contextmanager
def host(directory: Path, *, flight: bool) -> Iterator[Host]:
    """Run a broker in its own directory."""
    directory.mkdir()
    flags = ("--listen-flight", "127.0.0.1:0") if flight else ()
    with serving(directory, flags, environment={}) as served:
        yield Host(Place(parse_address(served.protocols["tcp"][0]), served.protocols["flight"][0] if flight else None), served.pid)


def _since(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [after - earlier for after, earlier in zip(now, before, strict=True)]


class SmallClients:
    """The publisher and the reader, on the first broker."""

    def __init__(self, place: Place, pace: Pace) -> None:
        self._plan, self._pace = place.plan("flymq", TOPIC_RECORDS), pace
        self._read = traffic.new_topic(self._plan)
        traffic.publish(self._plan, self._read)

    def measure(self) -> Latencies:
        topic = traffic.new_topic(self._plan).name
        slots = publish_slots(self._plan.load, topic, rate=self._pace.rate, records=self._pace.requests, value_bytes=VALUE_BYTES)
        reads = Slots(self._fetches, rate=self._pace.rate, records=self._pace.requests)
        with traffic.logged_in(self._plan, 2) as (publisher, reader), ThreadPoolExecutor(2) as threads:
            published = threads.submit(open_loop, publisher, slots, self._plan.load.acks(topic))
            read = threads.submit(open_loop, reader, reads, Answers())
            before = self._loop()
            latencies = published.result().latencies, read.result().latencies
            lag, turns = map(_since, self._loop(), before)
            return Latencies(*latencies, lag, turns)

    def _loop(self) -> tuple[list[int], list[int]]:
        """Return the counts of the lag and of the turns of the loop since the start of the broker."""
        with traffic.logged_in(self._plan) as (sock,):
            reply = call(sock, BrokerCall("status"))
        assert isinstance(reply, BrokerReply)
        server = json.loads(reply.body)["server"]
        return server["loop_lag"]["counts"], server["loop_turns"]["counts"]

    def _fetches(self, first: int, end: int) -> bytes:
        offsets = [index * READ_RECORDS % (TOPIC_RECORDS - READ_RECORDS) for index in range(first, end)]
        return b"".join([encode_request(Fetch(self._read.name, 0, offset, READ_RECORDS)) for offset in offsets])


def measure(bench: Bench, tenants: Sequence[str], pace: Pace, sizes: Sizes) -> list[Beside]:
    """Measure the small clients alone, then beside each tenant."""
    flight = "flight-append" in tenants
    with host(bench.directory / "first", flight=flight) as first, host(bench.directory / "second", flight=flight) as second:
        clients = SmallClients(first.place, pace)
        alone = Beside("none")
        for turn in range(bench.repeat):
            with bench.steps.step(f"alone {turn + 1}/{bench.repeat}", 1):
                alone.shared.append(clients.measure())
        return [alone, *(_beside(bench, name, clients, first, second, sizes) for name in tenants)]


def _beside(bench: Bench, name: str, clients: SmallClients, first: Host, second: Host, sizes: Sizes) -> Beside:
    found = Beside(name)
    with bench.steps.step(f"{name}: prepare", 1):
        prepared = [(each, TENANTS[name].prepare(each.place, sizes)) for each in (second, first)]

    def once(each: Host, work: Work) -> Latencies:
        settle((first, second))
        with running(name, each.place, work, bench.directory):
            return clients.measure()

    for turn in range(bench.repeat):
        with bench.steps.step(f"{name} {turn + 1}/{bench.repeat}", 1):
            found.control.append(once(*prepared[0]))
            found.shared.append(once(*prepared[1]))
    return found
