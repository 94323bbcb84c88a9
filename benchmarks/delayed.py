"""Lateness of delayed messages, from the delivery time of a message to its arrival at a Figg reader: `python -m benchmarks.delayed`.

This process publishes the messages one by one through FlyMQ and reads them through Figg, with the clock of the broker's machine. The load
is another process that publishes to another topic at full speed. Meanwhile a thread sleeps, writes and syncs in a loop: its lateness is
the machine's own part.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from benchmarks import main
from headrace.bench import options
from headrace.bench.children import Address, BenchFailed, child
from headrace.bench.facts import SyncProbe
from headrace.bench.latency import summary
from headrace.bench.load import READ_BYTES, STALL_SECONDS, Tick, connected
from headrace.bench.protocols.figg import FiggLoad
from headrace.bench.report import Figure, NoteValue, Target
from headrace.programs import last_line
from headrace.wire.figg import encode as figg_encode
from headrace.wire.figg.decode import Decoder as FiggDecoder
from headrace.wire.figg.frames import DataBatch, Role, ServerMessage
from headrace.wire.flymq import ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.advanced_messages import ProduceDelayed, Scheduled
from headrace.wire.flymq.messages import Failure, ReplyFrame

LATE_TARGET: Final = Target(at_most=50.0)
"""Milliseconds, for the latest message."""
LOAD_RECORDS: Final = 500_000
"""Records of one repetition of the load, which repeats until it is stopped."""
_PULSE_SECONDS: Final = 0.01
_PULSES_MAX: Final = 60_000
_PULSE_BYTES: Final = 512


@dataclass(slots=True)
class Deliveries:
    """Delivery time and arrival of each message, by its number."""

    due_ms: dict[int, int] = field(default_factory=dict)
    arrived_ms: dict[int, float] = field(default_factory=dict)

    def lateness(self) -> list[float]:
        """Return the lateness of each message in seconds. Raises `BenchFailed` for an early one."""
        late = [(self.arrived_ms[number] - due) / 1e3 for number, due in sorted(self.due_ms.items())]
        if min(late) < 0:
            raise BenchFailed(f"a delayed message arrived {-min(late) * 1e3:.1f} ms before its delivery time")
        return late


def lateness(address: Address, topic: str, *, messages: int, rate: float, delay_ms: int, tick: Tick | None = None) -> list[float]:
    """Publish `messages` delayed messages at `rate` per second and return the lateness of each in seconds."""
    with connected(address, 2) as (producer, reader):
        FiggLoad().open_topic(reader, topic)
        reader.sendall(figg_encode.attach(topic, 0))
        return _exchange(producer, reader, topic, messages, rate, delay_ms, tick).lateness()


def _exchange(
    producer: socket.socket, reader: socket.socket, topic: str, messages: int, rate: float, delay_ms: int, tick: Tick | None
) -> Deliveries:
    deliveries, replies = Deliveries(), ReplyDecoder()
    arrivals: FiggDecoder[ServerMessage] = FiggDecoder(Role.CLIENT)
    began, sent, heard = time.monotonic(), 0, time.monotonic()
    while len(deliveries.arrived_ms) < messages:
        now = time.monotonic()
        while sent < messages and sent / rate <= now - began:
            producer.sendall(encode_request(ProduceDelayed(topic, b"%d" % sent, delay_ms)))
            sent += 1
        readable, _, _ = select.select([producer, reader], [], [], max(0.0, began + sent / rate - now) if sent < messages else 0.25)
        if reader in readable:
            _arrived(deliveries, arrivals, reader)
        if producer in readable:
            _accepted(deliveries, replies, producer)
        if readable:
            heard = now
        elif now - heard > STALL_SECONDS:
            raise BenchFailed(f"no message for {STALL_SECONDS:.0f} s ({len(deliveries.arrived_ms)} of {messages} arrived)")
        if tick is not None:
            tick(len(deliveries.arrived_ms))
    while len(deliveries.due_ms) < messages:
        _accepted(deliveries, replies, producer)
    return deliveries


def _arrived(deliveries: Deliveries, arrivals: FiggDecoder[ServerMessage], reader: socket.socket) -> None:
    data, now_ms = _received(reader), time.time() * 1e3
    for message in arrivals.feed(data):
        if isinstance(message, DataBatch):
            deliveries.arrived_ms |= dict.fromkeys(map(int, message.values), now_ms)


def _accepted(deliveries: Deliveries, replies: ReplyDecoder, producer: socket.socket) -> None:
    for frame in replies.feed(_received(producer)):
        reply = decode_reply(frame) if isinstance(frame, ReplyFrame) else frame
        if isinstance(reply, Failure):
            raise BenchFailed(f"flymq: {reply.message}")
        if not isinstance(reply, Scheduled):
            raise BenchFailed(f"flymq: expected Scheduled in reply to a delayed message, got {reply}")
        deliveries.due_ms[len(deliveries.due_ms)] = reply.deliver_at


def _received(sock: socket.socket) -> bytes:
    data = sock.recv(READ_BYTES)
    if not data:
        raise BenchFailed("the connection was closed")
    return data


class Pulse(threading.Thread):
    """Context manager that measures a timer plus a write + fdatasync in a loop."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.late: list[float] = []
        self._directory, self._over = directory, threading.Event()

    def run(self) -> None:
        with contextlib.closing(SyncProbe(self._directory, _PULSE_BYTES, _PULSES_MAX)) as probe:
            for _ in range(_PULSES_MAX):
                began = time.monotonic()
                if self._over.wait(_PULSE_SECONDS):
                    return
                self.late.append(time.monotonic() - began - _PULSE_SECONDS + probe.once())

    def __enter__(self) -> Pulse:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


@contextlib.contextmanager
def loaded(address: Address, directory: Path) -> Iterator[None]:
    """Publish at full speed from another process."""
    host, port = address
    log = directory / "load.log"
    command = [sys.executable, "-m", "headrace", "bench", "publish", "--protocol", "flymq", "--server", f"{host}:{port}"]
    with child([*command, "--records", str(LOAD_RECORDS), "--repeat", "100", "--dir", str(directory)], log) as process:
        yield
        if process.poll() is not None:
            raise BenchFailed(f"the load process ended early: {last_line(log)}")


def figures(quiet: list[list[float]], busy: list[list[float]], machine: list[list[float]]) -> list[Figure]:
    """Return the lateness of the latest message of each repetition, with percentiles over all of them."""

    def figure(name: str, runs: list[list[float]], target: Target | None) -> Figure:
        return Figure(name, "ms, the latest", [max(run) * 1e3 for run in runs], target, summary([late for run in runs for late in run]))

    return [
        figure("delayed messages, idle broker", quiet, None),
        figure("delayed messages, another client at full speed", busy, LATE_TARGET),
        figure("the machine's timer, write + fdatasync at that time", machine, None),
    ]


@click.command()
@options.common
@click.option("--messages", type=click.IntRange(1, 100_000), default=500, show_default=True, help="Delayed messages of one repetition.")
@click.option("--rate", type=click.FloatRange(0.1, 10_000), default=100.0, show_default=True, help="Delayed messages published per second.")
@click.option(
    "--delay", "delay_ms", type=click.IntRange(1, 60_000), default=1_000, show_default=True, help="Delay of each message in milliseconds."
)
@options.profile()
def delayed(repeat: int, output: str, parent: Path | None, messages: int, rate: float, delay_ms: int, profile: Path | None) -> None:
    """Measure how late delayed messages arrive, on an idle broker and under full load.

    Lateness is the time from the delivery time of a message to its arrival at a Figg reader. A message that arrives early ends the
    benchmark.
    """
    config: dict[str, NoteValue] = {"messages": messages, "rate": rate, "delay_ms": delay_ms}
    quiet: list[list[float]] = []
    busy: list[list[float]] = []
    machine: list[list[float]] = []
    with options.measuring("delayed", repeat, output, parent, config) as running:
        with running.broker(options.Chosen("durable", None, None, profile)) as target:

            def once(name: str, turn: int) -> list[float]:
                with running.steps.step(f"{name} {turn + 1}/{repeat}", messages) as tick:
                    return lateness(target.address, f"delayed-{name}-{turn}", messages=messages, rate=rate, delay_ms=delay_ms, tick=tick)

            for turn in range(repeat):
                quiet.append(once("quiet", turn))
                with loaded(target.address, running.directory), Pulse(running.directory) as pulse:
                    busy.append(once("busy", turn))
                machine.append(pulse.late)
        for figure in figures(quiet, busy, machine):
            running.report.add(figure)


if __name__ == "__main__":
    main(delayed, "delayed")
