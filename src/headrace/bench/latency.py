"""Reply times.

*Open loop*: sends records at fixed times, whether or not earlier ones are acknowledged. Each latency counts from the intended send time,
so a stall of one second shows in every record that was due in it. A client that waits for replies would hide it (coordinated omission).

*Round trips*: sends one record at a time. Compare them with the machine's own write + fdatasync.
"""

from __future__ import annotations

import ctypes
import select
import socket
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from headrace.bench.children import BenchFailed
from headrace.bench.load import READ_BYTES, STALL_SECONDS, Meter, Tick, sample_values
from headrace.bench.protocols import ProtocolLoad
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.extras import needs

RECORD_OVERHEAD_BYTES = 156
"""Approximate journal overhead of a single record, so that the disk probe writes as many bytes as the broker."""
ROUND_TRIP_TARGET = Target(at_most=0.3)
"""Milliseconds above the machine's own write + fdatasync."""
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)
_HIGHEST_MICROSECONDS = 120 * 1_000_000
_DIGITS = 3
_PR_SET_TIMERSLACK = 29
_LINE_SIZE_MAX = 4_000
"""Records sent at once after a stall."""


@dataclass(slots=True)
class Replies:
    """Acknowledgements over time: `counts[i]` records were acknowledged by `times[i]` (seconds since the start)."""

    times: list[float]
    counts: list[int]

    def latencies(self, interval: float, records: int) -> list[float]:
        """Return the seconds from the intended time of each record to its acknowledgement."""
        return [self.times[bisect_right(self.counts, index)] - index * interval for index in range(records)]


def open_loop(
    sock: socket.socket, load: ProtocolLoad, topic: str, *, rate: int, records: int, value_bytes: int, tick: Tick | None = None
) -> list[float]:
    """Return the latency of each of `records` records sent at `rate` per second."""
    values = sample_values(value_bytes)
    frames = [load.publish(topic, [values[index % len(values)]], index) for index in range(records)]
    meter, buffer = load.acks(topic), bytearray(READ_BYTES)
    replies = Replies([], [])
    interval = 1.0 / rate
    sent, ticked = 0, 0.0
    _sleep_precisely()
    began = time.perf_counter()
    while meter.count < records:
        now = time.perf_counter() - began
        due = min(int(now * rate) + 1, records, sent + _LINE_SIZE_MAX)
        if sent < due:
            sock.sendall(b"".join(frames[sent:due]))
            sent = due
        wait = max(0.0, sent * interval - (time.perf_counter() - began)) if sent < records else STALL_SECONDS
        readable, _, _ = select.select([sock], [], [], wait)
        if readable:
            _receive(sock, buffer, meter)
            replies.times.append(time.perf_counter() - began)
            replies.counts.append(meter.count)
        elif sent == records:
            raise BenchFailed(f"no reply for {STALL_SECONDS:.0f} s ({meter.count} of {records} records acknowledged)")
        if tick is not None and now - ticked > 0.25:
            ticked = now
            tick(meter.count)
    return replies.latencies(interval, records)


def round_trips(
    sock: socket.socket, load: ProtocolLoad, topic: str, *, count: int, value_bytes: int, probe: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Return the seconds of `count` publishes sent one at a time, and of a disk probe after each.

    They alternate so that other work on the machine affects both.
    """
    (value,) = sample_values(value_bytes, 1)
    frames = [load.publish(topic, [value], index) for index in range(count)]
    meter, buffer = load.acks(topic), bytearray(READ_BYTES)
    trips, machine = [], []
    for index, frame in enumerate(frames):
        began = time.perf_counter()
        sock.sendall(frame)
        while meter.count <= index:
            _receive(sock, buffer, meter)
        trips.append(time.perf_counter() - began)
        machine.append(probe())
    return trips, machine


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


def summary(latencies: list[float]) -> dict[str, NoteValue]:
    """Return percentiles in ms and the encoded histogram, which can be merged with others."""
    with needs("headrace bench latency"):
        from hdrh.histogram import HdrHistogram
    histogram = HdrHistogram(1, _HIGHEST_MICROSECONDS, _DIGITS)
    for latency in latencies:
        histogram.record_value(max(1, round(latency * 1e6)))
    shown: dict[str, NoteValue] = {f"p{percent:g}": histogram.get_value_at_percentile(percent) / 1e3 for percent in PERCENTILES}
    shown["max"] = histogram.get_max_value() / 1e3
    shown["hdr"] = histogram.encode().decode("ascii")
    return shown


def figures(
    protocol: str, ack: str, rate: int, open_loops: list[list[float]], trips: list[list[float]], machine: list[list[float]]
) -> list[Figure]:
    """Return the median latency of each repetition, with percentiles over all of them."""

    def medians(runs: list[list[float]]) -> list[float]:
        return [percentile(sorted(times), 50) * 1e3 for times in runs]

    def notes(runs: list[list[float]]) -> dict[str, NoteValue]:
        return summary([latency for times in runs for latency in times])

    above = [trip - own for trip, own in zip(medians(trips), medians(machine), strict=True)]
    return [
        Figure(f"{protocol} open loop at {rate}/s, {ack}", "ms p50", medians(open_loops), notes=notes(open_loops)),
        Figure(f"{protocol} one at a time, {ack}", "ms p50", medians(trips), notes=notes(trips)),
        Figure("the machine's write + fdatasync", "ms p50", medians(machine), notes=notes(machine)),
        Figure(f"{protocol} one at a time, above the machine", "ms p50", above, ROUND_TRIP_TARGET if ack == "durable" else None),
    ]
