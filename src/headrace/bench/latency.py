"""How long an answer takes.

*Open loop*: records are sent at fixed times whether or not earlier ones have been answered, and each latency counts from the
time the record was *meant* to be sent. A broker that stalls for a second thus shows that second in every record that was due in
it, not in one; a client that waits for answers before it sends would hide it (coordinated omission).

*Round trips*: one record at a time, the next after the answer. To be read beside the machine's own write + fdatasync.
"""

from __future__ import annotations

import ctypes
import select
import socket
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from headrace.bench.doors import DoorLoad
from headrace.bench.faults import BenchFailed
from headrace.bench.load import READ_BYTES, STALL_SECONDS, Meter, Tick, sample_values
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.extras import needs

RECORD_OVERHEAD_BYTES = 156
"""What a journal adds to the value of a lone record, about: the machine is asked to write as much as the broker has to."""
ROUND_TRIP_TARGET = Target(at_most=0.3)
"""Milliseconds above the machine's own write + fdatasync."""
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)
_HIGHEST_MICROSECONDS = 120 * 1_000_000
_DIGITS = 3
_PR_SET_TIMERSLACK = 29
_LINE_SIZE_MAX = 4_000
"""Records that are sent in one go after a stall; the rest follow at once."""


@dataclass(slots=True)
class Answers:
    """When which records were answered: `counts[i]` records were by `times[i]` (seconds since the start)."""

    times: list[float]
    counts: list[int]

    def latencies(self, interval: float, records: int) -> list[float]:
        """Seconds from the intended time of each record to its answer."""
        return [self.times[bisect_right(self.counts, index)] - index * interval for index in range(records)]


def open_loop(
    sock: socket.socket, load: DoorLoad, topic: str, *, rate: int, records: int, value_bytes: int, tick: Tick | None = None
) -> list[float]:
    """The latency of each of `records` records sent at `rate` a second."""
    values = sample_values(value_bytes)
    frames = [load.publish(topic, [values[index % len(values)]], index) for index in range(records)]
    meter, buffer = load.acks(topic), bytearray(READ_BYTES)
    answers = Answers([], [])
    interval = 1.0 / rate
    sent, told = 0, 0.0
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
            answers.times.append(time.perf_counter() - began)
            answers.counts.append(meter.count)
        elif sent == records:
            raise BenchFailed(f"no answer for {STALL_SECONDS:.0f} s ({meter.count} of {records} records answered)")
        if tick is not None and now - told > 0.25:
            told = now
            tick(meter.count)
    return answers.latencies(interval, records)


def round_trips(
    sock: socket.socket, load: DoorLoad, topic: str, *, count: int, value_bytes: int, probe: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of `count` publishes, each one sent when the one before it was answered; and of a probe of the machine after each.

    They take turns so that both see the same minute of a machine that may have other work to do.
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
        raise BenchFailed("the connection was closed")
    meter.feed(buffer, size)


def _sleep_precisely() -> None:
    """Ask the kernel not to round our waits up by its usual 50 µs; where it cannot, latencies show up to that much more."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def summary(latencies: list[float]) -> dict[str, NoteValue]:
    """Percentiles in ms, and the whole histogram encoded so that runs can be merged later."""
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
    door: str, ack: str, rate: int, open_loops: list[list[float]], trips: list[list[float]], machine: list[list[float]]
) -> list[Figure]:
    """Median latencies of the runs, with percentiles over all of them."""

    def medians(runs: list[list[float]]) -> list[float]:
        return [percentile(sorted(times), 50) * 1e3 for times in runs]

    def notes(runs: list[list[float]]) -> dict[str, NoteValue]:
        return summary([latency for times in runs for latency in times])

    above = [trip - own for trip, own in zip(medians(trips), medians(machine), strict=True)]
    return [
        Figure(f"{door} open loop at {rate}/s, {ack}", "ms p50", medians(open_loops), notes=notes(open_loops)),
        Figure(f"{door} one at a time, {ack}", "ms p50", medians(trips), notes=notes(trips)),
        Figure("the machine's write + fdatasync", "ms p50", medians(machine), notes=notes(machine)),
        Figure(f"{door} one at a time, above the machine", "ms p50", above, ROUND_TRIP_TARGET if ack == "durable" else None),
    ]
