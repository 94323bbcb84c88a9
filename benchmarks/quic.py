"""Benchmark of the Fujin protocol beside its QUIC library without a broker: `python -m benchmarks.quic publish` or `consume`.

The load generator uses the same library in this process, so its cost is in both figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import click

from benchmarks import main
from benchmarks.quic_server import COUNT
from headrace.bench import fujin, options
from headrace.bench.children import Address, BenchFailed, child, cpu_seconds, parse_address, wait_until
from headrace.bench.fujin import Connection, QuicTraffic
from headrace.bench.report import Figure, NoteValue, Target, cpu_note
from headrace.bench.traffic import warm_up_records
from headrace.programs import last_line

FRACTION_TARGET = Target(at_least=0.5)
"""Of the bare library."""
Step: TypeAlias = Callable[[str], AbstractContextManager[Any]]
Turn: TypeAlias = Callable[[Address, Address, QuicTraffic, Step], tuple[Callable[[], float], Callable[[], float]]]


@contextmanager
def bare_server(directory: Path) -> Iterator[Address]:
    """Run `benchmarks.quic_server` and yield its address."""
    log = directory / "raw.log"
    with child([sys.executable, "-m", "benchmarks.quic_server", str(directory)], log) as process:
        wait_until(lambda: log.stat().st_size > 0, process, log, "the bare QUIC server")
        try:
            yield parse_address(json.loads(last_line(log))["address"])
        except json.JSONDecodeError:
            raise BenchFailed(f"the bare QUIC server printed no address: {last_line(log)}") from None


async def publish_raw(address: Address, traffic: QuicTraffic) -> float:
    """Return the seconds to send the bytes of `traffic` to a server that only reads."""
    chunks = fujin.frame_chunks("bench-0123abcd", traffic.stream_records, traffic.value_bytes)

    async def work(connection: Connection, index: int) -> None:
        stream = connection.carrier.open_stream()
        connection.carrier.send(stream, COUNT.pack(sum(map(len, chunks))))
        await connection.send_all(stream, chunks)
        await connection.until(lambda: connection.counts.get(stream, 0) > 0)

    return await fujin.on_all_streams(address, traffic, work)


async def consume_raw(address: Address, traffic: QuicTraffic) -> float:
    """Return the seconds to receive the bytes of `traffic` from a server that only writes."""

    async def work(connection: Connection, index: int) -> None:
        stream, size = connection.carrier.open_stream(), fujin.pushed_bytes(traffic.stream_records, traffic.value_bytes)
        connection.carrier.send(stream, COUNT.pack(0) + COUNT.pack(size))
        await connection.until(lambda: connection.counts.get(stream, 0) >= size)

    return await fujin.on_all_streams(address, traffic, work)


def figures(name: str, rates: list[float], ceilings: list[float], notes: dict[str, NoteValue]) -> list[Figure]:
    """Return the rate, the ceiling, and the ratio of the two."""
    return [
        Figure(name, "records/s", rates, None, notes),
        Figure(f"raw QUIC, {name.partition(',')[0].removeprefix('fujin ')}", "records/s", ceilings),
        Figure(f"{name} ÷ raw", "×", [rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)], FRACTION_TARGET),
    ]


def _publish(broker: Address, bare: Address, traffic: QuicTraffic, step: Step) -> tuple[Callable[[], float], Callable[[], float]]:
    return (
        lambda: fujin.on_loop(fujin.publish(broker, fujin.new_topic(), traffic)),
        lambda: fujin.on_loop(publish_raw(bare, traffic)),
    )


def _consume(broker: Address, bare: Address, traffic: QuicTraffic, step: Step) -> tuple[Callable[[], float], Callable[[], float]]:
    with step("fill"):
        topics = fujin.filled_topics(broker, traffic)
    return lambda: fujin.on_loop(fujin.consume(broker, topics, traffic)), lambda: fujin.on_loop(consume_raw(bare, traffic))


def _measure(
    command: str, name: str, turn: Turn, ack: str, profile: Path | None, repeat: int, output: str, parent: Path | None,
    traffic: QuicTraffic,
) -> None:  # fmt: skip
    config: dict[str, NoteValue] = {
        "records": traffic.records,
        "value_bytes": traffic.value_bytes,
        "ack": ack,
        "connections": traffic.connections,
        "streams": traffic.streams,
    }
    rates, ceilings, cpu = [], [], 0.0
    with options.measuring(command, repeat, output, parent, config) as bench:
        with fujin.quic_broker(bench.directory, ack, profile) as (broker, pid), bare_server(bench.directory) as bare:
            fujin.on_loop(
                fujin.publish(broker, fujin.new_topic(), replace(traffic, records=warm_up_records(traffic.records, traffic.value_bytes)))
            )
            for number in range(1, repeat + 1):

                def step(part: str, number: int = number) -> AbstractContextManager[Any]:
                    return bench.steps.step(f"{part} {number}/{repeat}", traffic.records)

                ours, ceiling = turn(broker, bare, traffic, step)
                with step("raw"):
                    ceilings.append(traffic.records / ceiling())
                before = cpu_seconds(pid)
                with step("fujin"):
                    rates.append(traffic.records / ours())
                cpu += cpu_seconds(pid) - before
        for figure in figures(name, rates, ceilings, cpu_note(cpu, traffic.records * repeat)):
            bench.report.add(figure)


@click.group()
def quic() -> None:
    """Measure the Fujin protocol beside its QUIC library without a broker."""


@quic.command()
@options.common
@options.size()
@options.records(1_000_000)
@options.connections()
@options.streams()
@options.ack()
@options.profile()
def publish(
    value_bytes: int, repeat: int, output: str, parent: Path | None, records: int, connections: int, streams: int, ack: str,
    profile: Path | None,
) -> None:  # fmt: skip
    """Publish, beside a QUIC server that only reads."""
    traffic = QuicTraffic(records, value_bytes, connections, streams)
    _measure("quic publish", f"fujin publish, {ack}", _publish, ack, profile, repeat, output, parent, traffic)


@quic.command()
@options.common
@options.size()
@options.records(1_000_000)
@options.connections()
@options.streams()
@options.ack()
@options.profile()
def consume(
    value_bytes: int, repeat: int, output: str, parent: Path | None, records: int, connections: int, streams: int, ack: str,
    profile: Path | None,
) -> None:  # fmt: skip
    """Read with push and auto commit, one topic per stream, beside a QUIC server that only writes."""
    traffic = QuicTraffic(records, value_bytes, connections, streams)
    _measure("quic consume", "fujin consume, pushed", _consume, ack, profile, repeat, output, parent, traffic)


if __name__ == "__main__":
    main(quic, "quic")
