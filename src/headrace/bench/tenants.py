"""Tenants of `bench interference`: clients that keep a broker busy, each in its own process.

`python -m headrace.bench.tenants NAME HOST:PORT FLIGHT TOPIC RECORDS` prints `started` before its first request and repeats its work until
it is stopped. FLIGHT is the address of the Flight endpoint, or `-`.
"""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.bench import singles, traffic
from headrace.bench.children import Address, BenchFailed, child, parse_address, wait_until
from headrace.bench.load import LoadConnection, connected, run, sample_values
from headrace.bench.protocols import PROTOCOLS
from headrace.bench.protocols.flymq import call
from headrace.programs import last_line
from headrace.wire.flymq import encode_request
from headrace.wire.flymq.advanced_messages import BrokerCall
from headrace.wire.flymq.messages import CreateTopic, Request

VALUE_BYTES: Final = 100
CREATORS: Final = 64
"""Connections that create topics."""
FLIGHT_ROWS: Final = 65_536
FLIGHT_BATCHES: Final = 16
"""Record batches of one append."""


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses of a broker."""

    tcp: Address
    flight: str | None = None

    def plan(self, protocol: str, records: int) -> traffic.Traffic:
        return traffic.Traffic(PROTOCOLS[protocol], self.tcp, b"", records, VALUE_BYTES)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the tenants' topics."""

    small_batches: int
    """Records of the topic filled one at a time."""
    history: int
    """Records of a flood, and of the history that is read."""
    topics: int
    """Topics that are listed."""


@dataclass(frozen=True, slots=True)
class Work:
    """Topic of a tenant and the number of its records."""

    topic: str = "-"
    records: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """Client that keeps a broker busy."""

    prepare: Callable[[Place, Sizes], Work]
    """Fill a broker before the clock starts."""
    begin: Callable[[Place, Work], Callable[[], object]]
    """Open connections and encode frames, and return the work to repeat."""


@contextmanager
def running(name: str, place: Place, work: Work, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a tenant. Raises `BenchFailed` if it ends by itself."""
    log = directory / f"{name}.log"
    host, port = place.tcp
    command = [sys.executable, "-m", "headrace.bench.tenants", name, f"{host}:{port}", place.flight or "-", work.topic, str(work.records)]
    with child(command, log) as process:
        wait_until(lambda: log.read_bytes().startswith(b"started\n"), process, log, name)
        yield process
        if process.poll() is not None:
            raise BenchFailed(f"{name} ended early: {last_line(log)}")


def _fill_small_batches(place: Place, sizes: Sizes) -> Work:
    topic = singles.new_topic(place.tcp)
    return Work(topic, singles.fill(place.tcp, topic, sizes.small_batches, VALUE_BYTES))


def _fill_history(place: Place, sizes: Sizes) -> Work:
    plan = place.plan("figg", sizes.history)
    topic = traffic.new_topic(plan)
    traffic.publish(plan, topic)
    return Work(topic.name, sizes.history)


def _create_topics(place: Place, sizes: Sizes) -> Work:
    prefix = f"listed-{secrets.token_hex(4)}"
    requests: list[Request] = [CreateTopic(f"{prefix}-{index}", 1) for index in range(sizes.topics)]
    singles.one_at_a_time(place.tcp, [encode_request(request) for request in requests], CREATORS)
    return Work()


def _new_topic(place: Place, sizes: Sizes) -> Work:
    return Work(traffic.new_topic(place.plan("figg", 1)).name, sizes.history)


def _reads(protocol: str) -> Callable[[Place, Work], Callable[[], object]]:
    def begin(place: Place, work: Work) -> Callable[[], object]:
        plan, topic = place.plan(protocol, work.records), traffic.BenchTopic(work.topic, [0])
        return lambda: traffic.consume(plan, topic)

    return begin


def _floods(place: Place, work: Work) -> Callable[[], object]:
    plan = place.plan("figg", work.records)
    chunks = traffic.chunks(plan, work.topic, sample_values(VALUE_BYTES), work.records)

    def publish() -> None:
        with traffic.logged_in(plan) as (sock,):
            run([LoadConnection(sock, chunks, plan.load.acks(work.topic), work.records)])

    return publish


def _appends(place: Place, work: Work) -> Callable[[], object]:
    import pyarrow as pa

    from headrace.flight.client import FlightClient, Servers

    assert place.flight is not None
    values = list(itertools.islice(itertools.cycle(sample_values(VALUE_BYTES)), FLIGHT_ROWS))
    batch = pa.record_batch({"value": pa.array(values, pa.binary())})
    client = FlightClient(Servers.parse(place.flight))
    return lambda: client.append(work.topic, [batch] * FLIGHT_BATCHES)


def _lists(place: Place, work: Work) -> Callable[[], object]:
    def list_topics() -> None:
        with connected(place.tcp) as (sock,):
            call(sock, BrokerCall("topic.list"))

    return list_topics


TENANTS: Final = {
    "small-batches": Tenant(_fill_small_batches, _reads("flymq")),
    "flight-append": Tenant(_new_topic, _appends),
    "figg-flood": Tenant(_new_topic, _floods),
    "figg-history": Tenant(_fill_history, _reads("figg")),
    "topic-list": Tenant(_create_topics, _lists),
}


def main(name: str, tcp: str, flight: str, topic: str, records: str) -> None:
    repeat = TENANTS[name].begin(Place(parse_address(tcp), None if flight == "-" else flight), Work(topic, int(records)))
    print("started", flush=True)
    while True:
        repeat()


if __name__ == "__main__":
    main(*sys.argv[1:])
