"""Benchmark of the Flight endpoint beside a bare Flight server: `python -m benchmarks.flight`.

Both servers are child processes, and the same plain Flight client connects to both, so Arrow and gRPC cost both the same.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import pyarrow as pa
from pyarrow import flight as arrow_flight

from benchmarks import main
from benchmarks.flight_server import sample
from headrace.bench import options
from headrace.bench.children import BenchFailed, child, cpu_seconds, memory_bytes, serving, wait_until
from headrace.bench.report import Figure, NoteValue, Target, cpu_note
from headrace.limits import MIB
from headrace.programs import last_line

READ_TARGET = Target(at_least=5_000_000)
APPEND_TARGET = Target(at_least=3_000_000)
READ_FRACTION_TARGET, APPEND_FRACTION_TARGET = Target(at_least=0.5), Target(at_least=0.6)
"""Of the bare server, which writes nothing to the disk."""
MEMORY_TARGET = Target(at_most=400)
"""Of the broker in MB, while it is filled."""
COLUMNS = ("value",)
DISK_CHUNK_BYTES: Final = 8 * MIB
"""Size of a write, and of the largest appends that the broker writes at once."""
OFFSET_BYTES: Final = 4
"""Stored beside each value."""


@dataclass(frozen=True, slots=True)
class FlightTraffic:
    rows: int
    value_bytes: int
    batch_rows: int
    """Rows of one record batch that the client sends."""


@dataclass(slots=True)
class FlightRates:
    """Rows per second of each turn, and the broker's CPU seconds."""

    append: list[float] = field(default_factory=list)
    bare_append: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    """Plain writes and syncs of the bytes of as many rows."""
    read: list[float] = field(default_factory=list)
    """The first of each topic, from the disk."""
    read_again: list[float] = field(default_factory=list)
    bare_read: list[float] = field(default_factory=list)
    append_cpu: float = 0.0
    read_cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: str
    pid: int


@contextmanager
def flight_broker(directory: Path, ack: str, profile: Path | None) -> Iterator[Endpoint]:
    """Run `headrace serve` with a Flight endpoint."""
    with serving(directory, ("--listen-flight", "127.0.0.1:0"), profile=profile, environment={"HEADRACE__STORAGE__ACK": ack}) as served:
        yield Endpoint(served.protocols["flight"][0], served.pid)


@contextmanager
def bare_server(directory: Path, traffic: FlightTraffic) -> Iterator[str]:
    sizes = [str(number) for number in (traffic.rows, traffic.value_bytes, traffic.batch_rows)]
    with served_address([sys.executable, "-m", "benchmarks.flight_server", *sizes], directory / "bare.log") as address:
        yield address


@contextmanager
def served_address(command: list[str], log: Path) -> Iterator[str]:
    """Run a Flight server that prints its address, and yield the address."""
    with child(command, log) as process:
        wait_until(lambda: log.stat().st_size > 0, process, log, "the bare Flight server")
        try:
            yield json.loads(last_line(log))["address"]
        except json.JSONDecodeError:
            raise BenchFailed(f"the bare Flight server printed no address: {last_line(log)}") from None


def written(path: Path, traffic: FlightTraffic) -> float:
    """Return the seconds in which one thread writes and syncs the bytes of the rows, in chunks, to a file that grows.

    The file stays until the benchmark ends, as the rows of a topic do: memory of a file that was just removed would be reused, which
    takes a fraction of the time of memory that the machine has not used yet.
    """
    chunk = secrets.token_bytes(DISK_CHUNK_BYTES)
    left = traffic.rows * (traffic.value_bytes + OFFSET_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.perf_counter()
        while left > 0:
            left -= os.write(fd, memoryview(chunk)[:left])
            os.fdatasync(fd)
        return time.perf_counter() - began
    finally:
        os.close(fd)


class Peer:
    """A plain Flight client."""

    def __init__(self, address: str) -> None:
        self._client = arrow_flight.FlightClient(f"grpc+tcp://{address}")

    def create(self, topic: str) -> None:
        list(self._client.do_action(arrow_flight.Action("create_topic", json.dumps({"name": topic}).encode())))

    def put(self, topic: str, traffic: FlightTraffic) -> float:
        """Return the seconds from the first row to the reply that all rows are stored."""
        batch = sample(traffic.value_bytes, min(traffic.batch_rows, traffic.rows))
        descriptor = arrow_flight.FlightDescriptor.for_path(topic)
        began = time.perf_counter()
        writer, replies = self._client.do_put(descriptor, batch.schema)
        with writer:
            left = traffic.rows
            while left > 0:
                writer.write_batch(batch if left >= batch.num_rows else batch.slice(0, left))
                left -= batch.num_rows
            writer.done_writing()
            reply = replies.read()
        seconds = time.perf_counter() - began
        if reply is None or str(traffic.rows).encode() not in reply.to_pybytes():
            raise BenchFailed(f"put of {traffic.rows} rows: expected a reply with that number, got {reply}")
        return seconds

    def get(self, topic: str, traffic: FlightTraffic) -> float:
        """Return the seconds until the last row has arrived."""
        ticket = arrow_flight.Ticket(json.dumps({"topic": topic, "columns": COLUMNS}).encode())
        began, rows = time.perf_counter(), 0
        for chunk in _chunks(self._client.do_get(ticket)):
            rows += chunk.num_rows
        seconds = time.perf_counter() - began
        if rows != traffic.rows:
            raise BenchFailed(f"get of {topic}: expected {traffic.rows} rows, got {rows}")
        return seconds

    def close(self) -> None:
        self._client.close()


def _chunks(reader: Any) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield reader.read_chunk().data
        except StopIteration:
            return


def turn(endpoint: Endpoint, bare: str, directory: Path, traffic: FlightTraffic, rates: FlightRates) -> None:
    """Write and read through both servers, and write once without any."""
    ours, theirs, topic = Peer(endpoint.address), Peer(bare), f"bench-{secrets.token_hex(4)}"
    try:
        ours.create(topic)
        rates.disk.append(traffic.rows / written(directory / topic, traffic))
        rates.bare_append.append(traffic.rows / theirs.put(topic, traffic))
        before = cpu_seconds(endpoint.pid)
        rates.append.append(traffic.rows / ours.put(topic, traffic))
        between = cpu_seconds(endpoint.pid)
        rates.bare_read.append(traffic.rows / theirs.get(topic, traffic))
        settled = cpu_seconds(endpoint.pid)
        rates.read.append(traffic.rows / ours.get(topic, traffic))
        rates.append_cpu += between - before
        rates.read_cpu += cpu_seconds(endpoint.pid) - settled
        rates.read_again.append(traffic.rows / ours.get(topic, traffic))
    finally:
        ours.close()
        theirs.close()


def filled(directory: Path, ack: str, gigabytes: float, traffic: FlightTraffic) -> Figure:
    """Fill a new broker by appends to one topic, and return the largest memory of its process."""
    directory.mkdir()
    with flight_broker(directory, ack, None) as endpoint:
        peer = Peer(endpoint.address)
        try:
            peer.create("filled")
            seconds, rows, rows_wanted = 0.0, 0, gigabytes * 1e9 / traffic.value_bytes
            while rows < rows_wanted:
                seconds += peer.put("filled", traffic)
                rows += traffic.rows
        finally:
            peer.close()
        after = memory_bytes(endpoint.pid, "VmRSS") / 1e6  # before the peak, which must not be below it
        peak = memory_bytes(endpoint.pid, "VmHWM") / 1e6
    return Figure(
        f"broker memory while {gigabytes:g} GB are appended", "MB", [peak], MEMORY_TARGET, {"MB after": after, "rows/s": rows / seconds}
    )


def figures(ack: str, traffic: FlightTraffic, rates: FlightRates) -> list[Figure]:
    """Return each rate, that of the bare server, and the ratio. The targets apply to 100-byte values."""
    usual = traffic.value_bytes == 100
    rows = traffic.rows * len(rates.read)
    shown: list[Figure] = []
    for name, own, bare, target, fraction, cpu in (
        ("flight read", rates.read, rates.bare_read, READ_TARGET, READ_FRACTION_TARGET, rates.read_cpu),
        (f"flight append, {ack}", rates.append, rates.bare_append, APPEND_TARGET, APPEND_FRACTION_TARGET, rates.append_cpu),
    ):
        notes: dict[str, NoteValue] = cpu_note(cpu, rows)
        shown += [
            Figure(name, "rows/s", own, target if usual else None, notes),
            Figure(f"bare Flight {name.split()[1].rstrip(',')}", "rows/s", bare),
            Figure(f"{name} ÷ bare", "×", [rate / ceiling for rate, ceiling in zip(own, bare, strict=True)], fraction),
        ]
    again = [rate / most for rate, most in zip(rates.read_again, rates.bare_read, strict=True)]
    shown += [Figure("flight read, again", "rows/s", rates.read_again), Figure("flight read, again ÷ bare", "×", again)]
    shown.append(Figure("write + fdatasync of the same bytes", "rows/s", rates.disk))
    shown.append(Figure(f"flight append, {ack} ÷ disk", "×", [rate / most for rate, most in zip(rates.append, rates.disk, strict=True)]))
    return shown


@click.command()
@options.common
@options.size()
@click.option("--rows", type=click.IntRange(1), default=5_000_000, show_default=True, help="Rows of a turn.")
@click.option("--batch", "batch_rows", type=click.IntRange(1), default=65_536, show_default=True, help="Rows of a record batch.")
@click.option("--fill-gb", "fill_gb", type=click.FloatRange(0), default=0.0, help="GB of values to fill a new broker with, for its memory.")
@options.ack()
@options.profile()
def flight(
    value_bytes: int,
    repeat: int,
    output: str,
    parent: Path | None,
    rows: int,
    batch_rows: int,
    fill_gb: float,
    ack: str,
    profile: Path | None,
) -> None:
    """Append and read through the Flight endpoint, beside a bare Flight server.

    The bare server serves prebuilt record batches from memory and discards what it receives. For the disk, one thread writes and syncs
    the same bytes in chunks of 8 MiB.
    """
    config: dict[str, NoteValue] = {"rows": rows, "value_bytes": value_bytes, "batch_rows": batch_rows, "ack": ack, "fill_gb": fill_gb}
    traffic, rates = FlightTraffic(rows, value_bytes, batch_rows), FlightRates()
    with options.measuring("flight", repeat, output, parent, config) as bench:
        with flight_broker(bench.directory, ack, profile) as endpoint, bare_server(bench.directory, traffic) as bare:
            for number in range(repeat):
                with bench.steps.step(f"turn {number + 1}/{repeat}", rows):
                    turn(endpoint, bare, bench.directory, traffic, rates)
        for figure in figures(ack, traffic, rates):
            bench.report.add(figure)
        if fill_gb:
            with bench.steps.step(f"fill with {fill_gb:g} GB", int(fill_gb * 1e9 / value_bytes)):
                bench.report.add(filled(bench.directory / "filled", ack, fill_gb, traffic))


if __name__ == "__main__":
    main(flight, "flight")
