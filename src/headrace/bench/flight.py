"""Load for the Flight endpoint, beside a bare Flight server that serves and sinks ready-made batches from memory.

Both are children of this process, and both are met with the same plain Flight client: what Arrow and gRPC cost, they cost both.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from headrace.bench.children import child, cpu_seconds, serving, wait_until
from headrace.bench.faults import BenchFailed
from headrace.bench.flight_raw import sample
from headrace.bench.report import Figure, NoteValue, Target, cpu_note
from headrace.programs import last_line

READ_TARGET = Target(at_least=5_000_000)
APPEND_TARGET = Target(at_least=3_000_000)
SHARE_TARGET = Target(at_least=0.5)
"""Of the bare server."""
COLUMNS = ("value",)


@dataclass(frozen=True, slots=True)
class FlightTraffic:
    rows: int
    value_bytes: int
    batch_rows: int
    """Rows of one record batch on its way in."""


@dataclass(slots=True)
class FlightRates:
    """Rows a second, turn by turn."""

    append: list[float] = field(default_factory=list)
    bare_append: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    bare_read: list[float] = field(default_factory=list)
    append_cpu: float = 0.0
    read_cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: str
    pid: int


@contextmanager
def flight_broker(directory: Path, ack: str, profile: Path | None) -> Iterator[Endpoint]:
    """`headrace serve` with a Flight endpoint."""
    with serving(directory, ("--listen-flight", "127.0.0.1:0"), profile=profile, environment={"HEADRACE__STORAGE__ACK": ack}) as served:
        yield Endpoint(served.protocols["flight"][0], served.pid)


@contextmanager
def bare_server(directory: Path, traffic: FlightTraffic) -> Iterator[str]:
    log = directory / "bare.log"
    sizes = [str(number) for number in (traffic.rows, traffic.value_bytes, traffic.batch_rows)]
    with child([sys.executable, "-m", "headrace.bench.flight_raw", *sizes], log) as process:
        wait_until(lambda: log.stat().st_size > 0, process, log, "the bare Flight server")
        try:
            yield json.loads(last_line(log))["address"]
        except json.JSONDecodeError:
            raise BenchFailed(f"the bare Flight server says: {last_line(log)}") from None


class Peer:
    """A plain Flight client."""

    def __init__(self, address: str) -> None:
        self._client = flight.FlightClient(f"grpc+tcp://{address}")

    def create(self, topic: str) -> None:
        list(self._client.do_action(flight.Action("create_topic", json.dumps({"name": topic}).encode())))

    def put(self, topic: str, traffic: FlightTraffic) -> float:
        """Seconds from the first row to the answer that all of them are safe."""
        batch = sample(traffic.value_bytes, min(traffic.batch_rows, traffic.rows))
        descriptor = flight.FlightDescriptor.for_path(topic)
        began = time.perf_counter()
        writer, answers = self._client.do_put(descriptor, batch.schema)
        with writer:
            left = traffic.rows
            while left > 0:
                writer.write_batch(batch if left >= batch.num_rows else batch.slice(0, left))
                left -= batch.num_rows
            writer.done_writing()
            answer = answers.read()
        seconds = time.perf_counter() - began
        if answer is None or str(traffic.rows).encode() not in answer.to_pybytes():
            raise BenchFailed("the put was not answered")
        return seconds

    def get(self, topic: str, traffic: FlightTraffic) -> float:
        """Seconds until the last row is here."""
        ticket = flight.Ticket(json.dumps({"topic": topic, "columns": COLUMNS}).encode())
        began, rows = time.perf_counter(), 0
        for chunk in _chunks(self._client.do_get(ticket)):
            rows += chunk.num_rows
        seconds = time.perf_counter() - began
        if rows != traffic.rows:
            raise BenchFailed(f"{rows} of {traffic.rows} rows came")
        return seconds

    def close(self) -> None:
        self._client.close()


def _chunks(reader: Any) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield reader.read_chunk().data
        except StopIteration:
            return


def turn(lane: Endpoint, bare: str, traffic: FlightTraffic, rates: FlightRates) -> None:
    """Write and read once through both, in turns."""
    ours, theirs, topic = Peer(lane.address), Peer(bare), f"bench-{secrets.token_hex(4)}"
    try:
        ours.create(topic)
        rates.bare_append.append(traffic.rows / theirs.put(topic, traffic))
        before = cpu_seconds(lane.pid)
        rates.append.append(traffic.rows / ours.put(topic, traffic))
        between = cpu_seconds(lane.pid)
        rates.bare_read.append(traffic.rows / theirs.get(topic, traffic))
        settled = cpu_seconds(lane.pid)
        rates.read.append(traffic.rows / ours.get(topic, traffic))
        rates.append_cpu += between - before
        rates.read_cpu += cpu_seconds(lane.pid) - settled
    finally:
        ours.close()
        theirs.close()


def figures(ack: str, traffic: FlightTraffic, rates: FlightRates) -> list[Figure]:
    """Each rate, the bare server's beside it, and what part of it that is. The targets are those of 100-byte values."""
    usual = traffic.value_bytes == 100
    rows = traffic.rows * len(rates.read)
    shown: list[Figure] = []
    for name, own, bare, target, cpu in (
        ("bulk read", rates.read, rates.bare_read, READ_TARGET, rates.read_cpu),
        (f"bulk append, {ack}", rates.append, rates.bare_append, APPEND_TARGET, rates.append_cpu),
    ):
        notes: dict[str, NoteValue] = cpu_note(cpu, rows)
        shown += [
            Figure(name, "rows/s", own, target if usual else None, notes),
            Figure(f"bare Flight {name.split()[1].rstrip(',')}", "rows/s", bare),
            Figure(f"{name} ÷ bare", "×", [rate / ceiling for rate, ceiling in zip(own, bare, strict=True)], SHARE_TARGET),
        ]
    return shown
