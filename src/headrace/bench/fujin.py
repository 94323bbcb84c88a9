"""Load for the Fujin protocol, beside what its QUIC library can do without a broker.

The load generator is the library, too, in this process: whatever it costs, it costs both. Frames are built before the clock starts, and
answers are counted by their bytes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import uvloop

from headrace.bench.children import Address, child, parse_address, serving, wait_until
from headrace.bench.faults import BenchFailed
from headrace.bench.latency import summary
from headrace.bench.load import STALL_SECONDS, sample_values
from headrace.bench.quic_raw import COUNT
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.net.quic.endpoint import ClientEndpoint, ClientTls
from headrace.programs import last_line
from headrace.wire.fujin import ALPN, ReaderKind, encode

SHARE_TARGET = Target(at_least=0.5)
"""Of the raw ceiling."""
_CHUNK_RECORDS = 1_000
_AHEAD_BYTES = 1024 * 1024
"""Sent and not acknowledged by the transport: enough to keep it busy."""
_OK_BYTES = len(encode.written([bytes(4)]))
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class QuicTraffic:
    records: int
    value_bytes: int
    connections: int = 1
    streams: int = 1
    """On each connection."""


class Connection:
    """Answers pings, and counts what comes on each stream."""

    def __init__(self, endpoint: ClientEndpoint) -> None:
        self._endpoint, self.carrier = endpoint, endpoint.carrier
        self.counts: dict[int, int] = {}
        self.changed = asyncio.Event()
        self.reason: str | None = None
        self.carrier.attach(self)

    @classmethod
    async def open(cls, address: Address) -> Connection:
        endpoint = await ClientEndpoint.open(*address, alpn=ALPN, tls=ClientTls(insecure=True), idle_seconds=STALL_SECONDS)
        connection = cls(endpoint)
        endpoint.start()
        await connection.until(lambda: connection.counts.get(-1, 0) > 0)
        return connection

    def connected(self) -> None:
        self.counts[-1] = 1
        self.changed.set()

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        self.carrier.taken(stream, len(data))
        if stream & 3:
            self.carrier.send(stream, encode.PONG, finish=True)
        self.counts[stream] = self.counts.get(stream, 0) + len(data)
        self.changed.set()

    def reset(self, stream: int) -> None: ...

    def progressed(self) -> None:
        self.changed.set()

    def lost(self, reason: str) -> None:
        self.reason = reason
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.reason is not None:
                raise BenchFailed(f"the connection was lost: {self.reason}")
            self.changed.clear()
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await self.changed.wait()
            except TimeoutError:
                raise BenchFailed(f"no answer for {STALL_SECONDS:.0f} s") from None

    async def send_all(self, stream: int, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self.carrier.send(stream, chunk)
            if self.carrier.unacknowledged(stream) > _AHEAD_BYTES:
                await self.until(lambda: self.carrier.unacknowledged(stream) <= _AHEAD_BYTES // 2)

    def close(self) -> None:
        self.carrier.close(0, "")
        self.carrier.give_up("done")
        self._endpoint.close()


def on_loop(work: Awaitable[_Result]) -> _Result:
    async def wrapped() -> _Result:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(wrapped())


@contextmanager
def quic_broker(directory: Path, ack: str, profile: Path | None) -> Iterator[tuple[Address, int]]:
    """`headrace serve` with a QUIC address: where it is, and its process."""
    with serving(directory, ("--listen-quic", "127.0.0.1:0"), profile=profile, environment={"HEADRACE__STORAGE__ACK": ack}) as served:
        yield parse_address(served.protocols["quic"][0]), served.pid


@contextmanager
def raw_peer(directory: Path) -> Iterator[Address]:
    log = directory / "raw.log"
    with child([sys.executable, "-m", "headrace.bench.quic_raw", str(directory)], log) as process:
        wait_until(lambda: log.stat().st_size > 0, process, log, "the raw QUIC peer")
        try:
            yield parse_address(json.loads(last_line(log))["address"])
        except json.JSONDecodeError:
            raise BenchFailed(f"the raw QUIC peer says: {last_line(log)}") from None


def _chunks(topic: str, records: int, value_bytes: int) -> list[bytes]:
    values = sample_values(value_bytes, _CHUNK_RECORDS)
    cids = [number.to_bytes(4, "big") for number in range(_CHUNK_RECORDS)]
    whole = encode.writes(topic, cids, values)
    rest = records % _CHUNK_RECORDS
    return [whole] * (records // _CHUNK_RECORDS) + ([encode.writes(topic, cids[:rest], values[:rest])] if rest else [])


async def _over_all(address: Address, traffic: QuicTraffic, work: Callable[[Connection, int, int], Awaitable[None]]) -> float:
    """Seconds for `work(connection, index, records)` on every stream at once."""
    count = traffic.connections * traffic.streams
    connections = [await Connection.open(address) for _ in range(traffic.connections)]
    began = time.perf_counter()
    try:
        await asyncio.gather(*(work(connections[index % traffic.connections], index, traffic.records // count) for index in range(count)))
        return time.perf_counter() - began
    finally:
        for connection in connections:
            connection.close()


async def publish(address: Address, topic: str, traffic: QuicTraffic) -> float:
    """Seconds until every record is acknowledged."""
    chunks = _chunks(topic, traffic.records // (traffic.connections * traffic.streams), traffic.value_bytes)

    async def work(connection: Connection, index: int, records: int) -> None:
        stream = connection.carrier.open_stream()
        connection.carrier.send(stream, encode.connect_writer())
        await connection.send_all(stream, chunks)
        await connection.until(lambda: connection.counts.get(stream, 0) >= records * _OK_BYTES)

    return await _over_all(address, traffic, work)


async def publish_raw(address: Address, traffic: QuicTraffic) -> float:
    """The same bytes into a sink that only reads."""
    chunks = _chunks("bench-0123abcd", traffic.records // (traffic.connections * traffic.streams), traffic.value_bytes)

    async def work(connection: Connection, index: int, records: int) -> None:
        stream = connection.carrier.open_stream()
        connection.carrier.send(stream, COUNT.pack(sum(map(len, chunks))))
        await connection.send_all(stream, chunks)
        await connection.until(lambda: connection.counts.get(stream, 0) > 0)

    return await _over_all(address, traffic, work)


async def consume(address: Address, topics: Sequence[str], traffic: QuicTraffic) -> float:
    """Seconds until each stream has been pushed a topic of its own, with auto commit."""

    async def work(connection: Connection, index: int, records: int) -> None:
        stream = connection.carrier.open_stream()
        connection.carrier.send(stream, encode.connect_reader(ReaderKind.PUSH, True, topics[index]))
        await connection.until(lambda: connection.counts.get(stream, 0) >= _pushed_bytes(records, traffic.value_bytes))

    return await _over_all(address, traffic, work)


async def consume_raw(address: Address, traffic: QuicTraffic) -> float:
    async def work(connection: Connection, index: int, records: int) -> None:
        stream, size = connection.carrier.open_stream(), _pushed_bytes(records, traffic.value_bytes)
        connection.carrier.send(stream, COUNT.pack(0) + COUNT.pack(size))
        await connection.until(lambda: connection.counts.get(stream, 0) >= size)

    return await _over_all(address, traffic, work)


def _pushed_bytes(records: int, value_bytes: int) -> int:
    return len(encode.reader_connected()) + records * len(encode.messages(None, [bytes(value_bytes)]))


async def round_trips(
    address: Address, topic: str, count: int, value_bytes: int, probe: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of `count` records, one at a time; and of a probe of the machine after each, so that both see the same minute of it."""
    connection = await Connection.open(address)
    (value,) = sample_values(value_bytes, 1)
    frame = encode.writes(topic, [bytes(4)], [value])
    stream = connection.carrier.open_stream()
    connection.carrier.send(stream, encode.connect_writer())
    times: list[float] = []
    machine: list[float] = []
    try:
        for index in range(count):
            began = time.perf_counter()
            connection.carrier.send(stream, frame)
            await connection.until(lambda index=index: connection.counts.get(stream, 0) >= (index + 1) * _OK_BYTES)  # type: ignore[misc]  # bound for this turn
            times.append(time.perf_counter() - began)
            machine.append(probe())
    finally:
        connection.close()
    return times, machine


def new_topic() -> str:
    return f"bench-{secrets.token_hex(4)}"


def share_figures(name: str, rates: list[float], ceilings: list[float], notes: dict[str, NoteValue]) -> list[Figure]:
    """A rate, the ceiling beside it, and what part of it that is."""
    return [
        Figure(name, "records/s", rates, None, notes),
        Figure(f"raw QUIC, {name.partition(',')[0].removeprefix('fujin ')}", "records/s", ceilings),
        Figure(f"{name} ÷ raw", "×", [rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)], SHARE_TARGET),
    ]


def latency_figures(ack: str, trips: list[list[float]], machine: list[list[float]]) -> list[Figure]:
    """No target: the round trip of QUIC itself, two passes through a Python library, is in it."""

    def medians(runs: list[list[float]]) -> list[float]:
        return [percentile(sorted(times), 50) * 1e3 for times in runs]

    def figure(name: str, runs: list[list[float]]) -> Figure:
        return Figure(name, "ms p50", medians(runs), notes=summary([latency for times in runs for latency in times]))

    above = [trip - own for trip, own in zip(medians(trips), medians(machine), strict=True)]
    return [
        figure(f"fujin one at a time, {ack}", trips),
        figure("the machine's write + fdatasync", machine),
        Figure("fujin one at a time, above the machine", "ms p50", above),
    ]
