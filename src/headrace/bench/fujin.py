"""Load for the Fujin protocol over QUIC.

Frames are built before the clock starts, and replies are counted by their bytes. The load generator uses the broker's QUIC library, so a
rate includes the cost of the library on both sides; `benchmarks/quic.py` measures that part alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import uvloop

from headrace.bench.children import Address, BenchFailed, parse_address, serving
from headrace.bench.latency import summary
from headrace.bench.load import STALL_SECONDS, sample_values
from headrace.bench.report import Figure, percentile
from headrace.net.quic.endpoint import ClientEndpoint, ClientTls
from headrace.wire.fujin import ALPN, ReaderKind, WriteForm, encode

_CHUNK_RECORDS = 1_000
_AHEAD_BYTES = 1024 * 1024
"""Bytes sent and not acknowledged by the transport, which keep it busy."""
_OK_BYTES = len(encode.written([bytes(4)]))
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class QuicTraffic:
    records: int
    value_bytes: int
    connections: int = 1
    streams: int = 1
    """On each connection."""

    @property
    def stream_records(self) -> int:
        """Records of one stream."""
        return self.records // (self.connections * self.streams)


class Connection:
    """Answers pings and counts the bytes received on each stream."""

    def __init__(self, endpoint: ClientEndpoint) -> None:
        self._endpoint, self.carrier = endpoint, endpoint.carrier
        self.counts: dict[int, int] = {}
        self.changed = asyncio.Event()
        self.reason: str | None = None
        self.carrier.attach(self)

    @classmethod
    async def open(cls, address: Address) -> Self:
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
                raise BenchFailed(f"connection lost: {self.reason}")
            self.changed.clear()
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await self.changed.wait()
            except TimeoutError:
                raise BenchFailed(f"no reply for {STALL_SECONDS:.0f} s") from None

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
def quic_broker(
    directory: Path, ack: str, profile: Path | None, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Address, int]]:
    """Run `headrace serve` with a QUIC listener and yield its address and process id. `environment` holds further settings.

    Writes have no headers, because some sizes of a value are ambiguous otherwise.
    """
    settings = {**(environment or {}), "HEADRACE__STORAGE__ACK": ack, "HEADRACE__FUJIN__WRITE_HEADERS": "never"}
    with serving(directory, ("--listen-quic", "127.0.0.1:0"), profile=profile, environment=settings) as served:
        yield parse_address(served.protocols["quic"][0]), served.pid


def frame_chunks(topic: str, records: int, value_bytes: int) -> list[bytes]:
    """Encode the WRITE frames of all records, in chunks of `_CHUNK_RECORDS`."""
    values = sample_values(value_bytes, _CHUNK_RECORDS)
    cids = [number.to_bytes(4, "big") for number in range(_CHUNK_RECORDS)]
    whole = encode.writes(topic, cids, values, form=WriteForm.NEVER)
    rest = records % _CHUNK_RECORDS
    return [whole] * (records // _CHUNK_RECORDS) + (
        [encode.writes(topic, cids[:rest], values[:rest], form=WriteForm.NEVER)] if rest else []
    )


async def on_all_streams(address: Address, traffic: QuicTraffic, work: Callable[[Connection, int], Awaitable[None]]) -> float:
    """Return the seconds of `work(connection, index)` on all streams at once."""
    count = traffic.connections * traffic.streams
    connections = [await Connection.open(address) for _ in range(traffic.connections)]
    began = time.perf_counter()
    try:
        await asyncio.gather(*(work(connections[index % traffic.connections], index) for index in range(count)))
        return time.perf_counter() - began
    finally:
        for connection in connections:
            connection.close()


async def publish(address: Address, topic: str, traffic: QuicTraffic) -> float:
    """Return the seconds until every record is acknowledged."""
    chunks = frame_chunks(topic, traffic.stream_records, traffic.value_bytes)

    async def work(connection: Connection, index: int) -> None:
        stream = connection.carrier.open_stream()
        connection.carrier.send(stream, encode.connect_writer())
        await connection.send_all(stream, chunks)
        await connection.until(lambda: connection.counts.get(stream, 0) >= traffic.stream_records * _OK_BYTES)

    return await on_all_streams(address, traffic, work)


async def consume(address: Address, topics: Sequence[str], traffic: QuicTraffic) -> float:
    """Return the seconds until each stream has received its own topic, pushed with auto commit."""

    async def work(connection: Connection, index: int) -> None:
        stream = connection.carrier.open_stream()
        connection.carrier.send(stream, encode.connect_reader(ReaderKind.PUSH, True, topics[index]))
        await connection.until(lambda: connection.counts.get(stream, 0) >= pushed_bytes(traffic.stream_records, traffic.value_bytes))

    return await on_all_streams(address, traffic, work)


def pushed_bytes(records: int, value_bytes: int) -> int:
    """Return the bytes a reader receives for `records` pushed records."""
    return len(encode.reader_connected()) + records * len(encode.messages(None, [bytes(value_bytes)]))


async def round_trips(
    address: Address, topic: str, count: int, value_bytes: int, probe: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Return the seconds of `count` records sent one at a time, and of a disk probe after each record."""
    connection = await Connection.open(address)
    (value,) = sample_values(value_bytes, 1)
    frame = encode.writes(topic, [bytes(4)], [value], form=WriteForm.NEVER)
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


def filled_topics(address: Address, traffic: QuicTraffic) -> list[str]:
    """Publish the records of `traffic` to one new topic per stream and return the topics."""
    topics = [new_topic() for _ in range(traffic.connections * traffic.streams)]
    for topic in topics:
        on_loop(publish(address, topic, replace(traffic, records=traffic.stream_records, connections=1, streams=1)))
    return topics


def latency_figures(ack: str, trips: list[list[float]], machine: list[list[float]]) -> list[Figure]:
    """Return the figures of the round trips. They have no target, because they include two passes through the QUIC library."""

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
