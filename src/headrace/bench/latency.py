"""Reply times.

*Open loop*: sends records at fixed times, whether or not earlier ones are acknowledged. Each latency counts from the intended send time,
so a stall of one second shows in every record that was due in it. A client that waits for replies would hide it (coordinated omission).

*Bare group commit*: the same bytes at the same times to a server that only writes and syncs them. Machine and load generator take this long
without a broker.

*Round trips*: sends one record at a time. Compare them with the machine's own write + fdatasync.
"""

from __future__ import annotations

import ctypes
import select
import socket
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.bench import traffic
from headrace.bench.bare import Kind, head
from headrace.bench.children import Address, BenchFailed
from headrace.bench.load import CHUNK_BYTES, READ_BYTES, STALL_SECONDS, TICK_SECONDS, Meter, Tick, connected, sample_values
from headrace.bench.protocols import ProtocolLoad
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.extras import needs

RECORD_OVERHEAD_BYTES = 156
"""Approximate journal overhead of a single record, so that the disk probe writes as many bytes as the broker."""
ROUND_TRIP_TARGET = Target(at_most=0.3)
"""Milliseconds above the machine's own write + fdatasync."""
LOADED_TARGET: Final = Target(at_most=15.0)
"""Milliseconds of the p99 at half of the maximum rate."""
LOADED_PROTOCOLS: Final = ("figg", "flymq")
LOADED_PERCENT: Final = 50
_MAXIMUM_RECORDS: Final = 500_000
_MAXIMUM_BYTES: Final = 256 * 1024 * 1024
"""Bounds of a publish at full speed that measures the maximum rate."""
_MAXIMUM_TURNS: Final = 3
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)
_HIGHEST_MICROSECONDS = 120 * 1_000_000
_DIGITS = 3
_PR_SET_TIMERSLACK = 29
_SLOTS_PER_SECOND_MAX: Final = 10_000
_READY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Frames encoded ahead of their time."""
_LATE_SECONDS_MAX: Final = 5.0
"""After the time of the last record plus this, an open loop sends no more."""


class Slots:
    """Frames of an open loop. Records that are due within 0.1 ms share a slot, which is sent when the last of them is due.

    Slots are encoded before the connection is opened, because the broker closes a connection that stays silent. Those beyond
    `_READY_BYTES_MAX` are encoded while the loop is idle.
    """

    def __init__(self, encode: Callable[[int, int], bytes], *, rate: int, records: int) -> None:
        self.rate, self.records = rate, records
        self.taken = 0
        """Records handed out to be sent."""
        self._encode, self._size = encode, max(1, rate // _SLOTS_PER_SECOND_MAX)
        self._ready: deque[bytes] = deque()
        self._ready_bytes = self._encoded = 0
        while self.prepare():
            pass

    def prepare(self) -> bool:
        """Encode one more slot. Return False if all are encoded or enough are ready."""
        if self._encoded == self.records or self._ready_bytes >= _READY_BYTES_MAX:
            return False
        end = min(self._encoded + self._size, self.records)
        self._ready.append(self._encode(self._encoded, end))
        self._ready_bytes += len(self._ready[-1])
        self._encoded = end
        return True

    def due_in(self, now: float) -> float:
        """Return the seconds until the next slot is due; there must be one."""
        return (min(self.taken + self._size, self.records) - 1) / self.rate - now

    def take(self, now: float) -> bytes:
        """Return the frames of the slots that are due, at most about `CHUNK_BYTES`."""
        frames, size_bytes = [], 0
        while self.taken < self.records and self.due_in(now) <= 0 and size_bytes < CHUNK_BYTES:
            if not self._ready:
                self.prepare()
            frames.append(self._ready.popleft())
            size_bytes += len(frames[-1])
            self._ready_bytes -= len(frames[-1])
            self.taken = min(self.taken + self._size, self.records)
        return b"".join(frames)


def publish_slots(load: ProtocolLoad, topic: str, *, rate: int, records: int, value_bytes: int) -> Slots:
    """Return slots that publish `records` records."""
    values = sample_values(value_bytes)

    def encode(first: int, end: int) -> bytes:
        return load.publish(topic, [values[index % len(values)] for index in range(first, end)], first)

    return Slots(encode, rate=rate, records=records)


@dataclass(slots=True)
class Replies:
    """Acknowledgements over time: `counts[i]` records were acknowledged by `times[i]` (seconds since the start)."""

    times: list[float]
    counts: list[int]

    def latencies(self, rate: int, records: int) -> array[float]:
        """Return the seconds from the intended time of each record to its acknowledgement.

        A record without one gets the time until the end of the loop, which is less than its latency.
        """
        found = array("d")
        for at, count in zip(self.times, self.counts, strict=True):
            found.extend(at - index / rate for index in range(len(found), count))
        found.extend(self.times[-1] - index / rate for index in range(len(found), records))
        return found


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Latency of each record, and the number of records that could not be sent in time."""

    latencies: array[float]
    unsent: int = 0


def open_loop(sock: socket.socket, slots: Slots, meter: Meter, tick: Tick | None = None) -> OpenLoop:
    """Send each slot at its time and return the latencies.

    Replies are read while a slot waits for the socket: a broker whose replies are not read stops reading. A loop that cannot send its last
    record within `_LATE_SECONDS_MAX` of its time sends no more; the rate is too high.
    """
    buffer, replies = bytearray(READ_BYTES), Replies([], [])
    deadline = slots.records / slots.rate + _LATE_SECONDS_MAX
    unsent = memoryview(b"")
    ticked = heard = 0.0
    _sleep_precisely()
    sock.setblocking(False)
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        is_sending = slots.taken < slots.records and now < deadline
        if is_sending and not unsent:
            unsent = memoryview(slots.take(now))
        if unsent:
            unsent = unsent[_sent(sock, unsent) :]
        elif not is_sending and meter.count >= slots.taken:
            break
        wait = 1.0
        if is_sending and not unsent:
            wait = max(0.0, slots.due_in(time.perf_counter() - began)) if slots.taken < slots.records else 0.0
            if wait and slots.prepare():
                wait = 0.0
        readable, writable, _ = select.select([sock], [sock] if unsent else [], [], wait)
        if readable:
            _receive(sock, buffer, meter)
            replies.times.append(time.perf_counter() - began)
            replies.counts.append(meter.count)
        if readable or writable or (is_sending and not unsent):
            heard = now
        elif now - heard > STALL_SECONDS:
            raise BenchFailed(f"no reply for {STALL_SECONDS:.0f} s ({meter.count} of {slots.records} records acknowledged)")
        if tick is not None and now - ticked > TICK_SECONDS:
            ticked = now
            tick(meter.count)
    if slots.taken < slots.records:
        replies.times.append(time.perf_counter() - began)
        replies.counts.append(meter.count)
    return OpenLoop(replies.latencies(slots.rate, slots.records), slots.records - slots.taken)


class ByteMeter:
    """Counts replies of one byte."""

    def __init__(self) -> None:
        self.count = 0

    def feed(self, received: bytearray, size: int) -> bytes:
        self.count += size
        return b""


def commit_loop(address: Address, load: ProtocolLoad, topic: str, *, rate: int, records: int, value_bytes: int) -> OpenLoop:
    """Send as many bytes to a bare group commit. The records of one slot are one request, so that the server does nothing per record."""
    size = max(1, rate // _SLOTS_PER_SECOND_MAX)
    request_bytes = size * len(load.publish(topic, sample_values(value_bytes, 1), 0))
    slots = Slots(lambda first, end: bytes((end - first) * request_bytes), rate=max(1, rate // size), records=max(1, records // size))
    with connected(address) as (sock,):
        sock.sendall(head(Kind.COMMIT, request_bytes, 1))
        return open_loop(sock, slots, ByteMeter())


def maximum_records(value_bytes: int) -> int:
    """Return the number of records of a publish that measures the maximum rate."""
    return max(1, min(_MAXIMUM_RECORDS, _MAXIMUM_BYTES // max(1, value_bytes)))


def maximum_rate(plan: traffic.Traffic) -> int:
    """Return the records per second of one connection at full speed: the median of several publishes.

    Whole records, so that the rate of an open loop follows from the maximum that the report shows.
    """
    return round(statistics.median(plan.records / traffic.publish(plan, traffic.new_topic(plan)) for _ in range(_MAXIMUM_TURNS)))


def round_trips(
    sock: socket.socket, load: ProtocolLoad, topic: str, *, count: int, value_bytes: int, probe: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Return the seconds of `count` publishes sent one at a time, and of a disk probe after each.

    They alternate so that other work on the machine affects both.
    """
    (value,) = sample_values(value_bytes, 1)
    meter, buffer = load.acks(topic), bytearray(READ_BYTES)
    trips, machine = [], []
    for index in range(count):
        frame = load.publish(topic, [value], index)
        began = time.perf_counter()
        sock.sendall(frame)
        while meter.count <= index:
            _receive(sock, buffer, meter)
        trips.append(time.perf_counter() - began)
        machine.append(probe())
    return trips, machine


def _sent(sock: socket.socket, frames: memoryview) -> int:
    try:
        return sock.send(frames)
    except BlockingIOError:
        return 0


def _receive(sock: socket.socket, buffer: bytearray, meter: Meter) -> None:
    size = sock.recv_into(buffer)
    if size == 0:
        raise BenchFailed("the broker closed the connection")
    meter.feed(buffer, size)


def _sleep_precisely() -> None:
    """Set the timer slack to 1 ns. Where this fails, latencies are up to 50 µs higher."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def summary(latencies: Iterable[float]) -> dict[str, NoteValue]:
    """Return percentiles in ms and the encoded histogram, which can be merged with others."""
    with needs("headrace bench latency"):
        from hdrh.histogram import HdrHistogram
    histogram = HdrHistogram(1, _HIGHEST_MICROSECONDS, _DIGITS)
    for microseconds, count in Counter(max(1, round(latency * 1e6)) for latency in latencies).items():
        histogram.record_value(microseconds, count)
    shown: dict[str, NoteValue] = {f"p{percent:g}": histogram.get_value_at_percentile(percent) / 1e3 for percent in PERCENTILES}
    shown["max"] = histogram.get_max_value() / 1e3
    shown["hdr"] = histogram.encode().decode("ascii")
    return shown


def loaded_figure(protocol: str, ack: str, percent: int, maximum: int, open_loops: Sequence[OpenLoop]) -> Figure:
    """Return the p99 at a percentage of the maximum rate."""
    has_target = protocol in LOADED_PROTOCOLS and ack == "durable" and percent == LOADED_PERCENT
    runs = [percentile(sorted(loop.latencies), 99) * 1e3 for loop in open_loops]
    notes: dict[str, NoteValue] = {"maximum records/s": maximum}
    return Figure(
        f"{protocol} open loop at {percent} % of the maximum, {ack}", "ms p99", runs, LOADED_TARGET if has_target else None, notes
    )


def commit_figure(open_loops: Sequence[OpenLoop]) -> Figure:
    """Return the p99 of the bare group commit."""
    latencies = [sorted(loop.latencies) for loop in open_loops]
    notes: dict[str, NoteValue] = {"p50": statistics.median(percentile(times, 50) * 1e3 for times in latencies)}
    return Figure("bare group commit of the same bytes", "ms p99", [percentile(times, 99) * 1e3 for times in latencies], notes=notes)


def figures(
    protocol: str, ack: str, rate: int, open_loops: list[OpenLoop], trips: list[list[float]], machine: list[list[float]]
) -> list[Figure]:
    """Return the median latency of each repetition, with percentiles over all of them."""

    def medians(runs: Iterable[Sequence[float]]) -> list[float]:
        return [percentile(sorted(times), 50) * 1e3 for times in runs]

    def notes(runs: Iterable[Sequence[float]]) -> dict[str, NoteValue]:
        return summary(latency for times in runs for latency in times)

    loops = [loop.latencies for loop in open_loops]
    unsent = sum(loop.unsent for loop in open_loops)
    late: dict[str, NoteValue] = {"not sent in time": unsent, "of": sum(map(len, loops))} if unsent else {}
    above = [trip - own for trip, own in zip(medians(trips), medians(machine), strict=True)]
    return [
        Figure(f"{protocol} open loop at {rate}/s, {ack}", "ms p50", medians(loops), notes=notes(loops) | late),
        Figure(f"{protocol} one at a time, {ack}", "ms p50", medians(trips), notes=notes(trips)),
        Figure("the machine's write + fdatasync", "ms p50", medians(machine), notes=notes(machine)),
        Figure(f"{protocol} one at a time, above the machine", "ms p50", above, ROUND_TRIP_TARGET if ack == "durable" else None),
    ]
