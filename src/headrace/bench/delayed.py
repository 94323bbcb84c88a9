"""How late delayed messages are: from the time a message was due to its arrival at a reader that is pushed.

Messages are handed in one by one through FlyMQ and read through Figg, by the same process and so by the same clock as the broker's. The
load is a client of its own in a process of its own, which publishes to another topic as fast as it can. Meanwhile a thread here sleeps,
writes and syncs over and over: how late that is, is the machine's own part.
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

from headrace.bench.children import Address, child
from headrace.bench.faults import BenchFailed
from headrace.bench.latency import summary
from headrace.bench.load import READ_BYTES, STALL_SECONDS, Tick, connected
from headrace.bench.protocols.figg import FiggLoad
from headrace.bench.raw import SyncProbe
from headrace.bench.report import Figure, Target
from headrace.programs import last_line
from headrace.wire.figg import encode as figg_encode
from headrace.wire.figg.decode import Decoder as FiggDecoder
from headrace.wire.figg.frames import DataBatch, Role, ServerMessage
from headrace.wire.flymq import ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.advanced_messages import ProduceDelayed, Scheduled
from headrace.wire.flymq.messages import Failure, ReplyFrame

LATE_TARGET: Final = Target(at_most=50.0)
"""Milliseconds, of the latest of all."""
LOAD_RECORDS: Final = 500_000
"""Of one turn of the load; it begins anew until it is stopped."""
_PULSE_SECONDS: Final = 0.01
_PULSES_MAX: Final = 60_000
_PULSE_BYTES: Final = 512


@dataclass(slots=True)
class Post:
    """What was handed in, when it was due and when it came, by its number."""

    due_ms: dict[int, int] = field(default_factory=dict)
    came_ms: dict[int, float] = field(default_factory=dict)

    def lateness(self) -> list[float]:
        """Seconds of each. Raises `BenchFailed` for one that came early."""
        late = [(self.came_ms[number] - due) / 1e3 for number, due in sorted(self.due_ms.items())]
        if min(late) < 0:
            raise BenchFailed(f"a delayed message came {-min(late) * 1e3:.1f} ms before its time")
        return late


def lateness(address: Address, topic: str, *, messages: int, rate: float, delay_ms: int, tick: Tick | None = None) -> list[float]:
    """Seconds from its time to its arrival, of each of so many messages, `rate` of which are handed in a second."""
    with connected(address, 2) as (desk, reader):
        FiggLoad().open_topic(reader, topic)
        reader.sendall(figg_encode.attach(topic, 0))
        return _exchange(desk, reader, topic, messages, rate, delay_ms, tick).lateness()


def _exchange(desk: socket.socket, reader: socket.socket, topic: str, messages: int, rate: float, delay_ms: int, tick: Tick | None) -> Post:
    post, replies = Post(), ReplyDecoder()
    arrivals: FiggDecoder[ServerMessage] = FiggDecoder(Role.CLIENT)
    began, sent, heard = time.monotonic(), 0, time.monotonic()
    while len(post.came_ms) < messages:
        now = time.monotonic()
        while sent < messages and sent / rate <= now - began:
            desk.sendall(encode_request(ProduceDelayed(topic, b"%d" % sent, delay_ms)))
            sent += 1
        readable, _, _ = select.select([desk, reader], [], [], max(0.0, began + sent / rate - now) if sent < messages else 0.25)
        if reader in readable:
            _arrived(post, arrivals, reader)
        if desk in readable:
            _accepted(post, replies, desk)
        if readable:
            heard = now
        elif now - heard > STALL_SECONDS:
            raise BenchFailed(f"no message for {STALL_SECONDS:.0f} s ({len(post.came_ms)} of {messages} came)")
        if tick is not None:
            tick(len(post.came_ms))
    while len(post.due_ms) < messages:
        _accepted(post, replies, desk)
    return post


def _arrived(post: Post, arrivals: FiggDecoder[ServerMessage], reader: socket.socket) -> None:
    data, now_ms = _received(reader), time.time() * 1e3
    for message in arrivals.feed(data):
        if isinstance(message, DataBatch):
            post.came_ms |= dict.fromkeys(map(int, message.values), now_ms)


def _accepted(post: Post, replies: ReplyDecoder, desk: socket.socket) -> None:
    for frame in replies.feed(_received(desk)):
        reply = decode_reply(frame) if isinstance(frame, ReplyFrame) else frame
        if isinstance(reply, Failure):
            raise BenchFailed(f"flymq: {reply.message}")
        if not isinstance(reply, Scheduled):
            raise BenchFailed(f"flymq: a delayed message was answered by {reply}")
        post.due_ms[len(post.due_ms)] = reply.deliver_at


def _received(sock: socket.socket) -> bytes:
    data = sock.recv(READ_BYTES)
    if not data:
        raise BenchFailed("the connection was closed")
    return data


class Pulse(threading.Thread):
    """What a timer and a write + fdatasync take on this machine at the same time. Used as a context."""

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
    """Somebody publishes at full speed meanwhile."""
    host, port = address
    log = directory / "load.log"
    command = [sys.executable, "-m", "headrace", "bench", "publish", "--protocol", "flymq", "--server", f"{host}:{port}"]
    with child([*command, "--records", str(LOAD_RECORDS), "--repeat", "100", "--dir", str(directory)], log) as process:
        yield
        if process.poll() is not None:
            raise BenchFailed(f"the load ended by itself: {last_line(log)}")


def figures(quiet: list[list[float]], busy: list[list[float]], machine: list[list[float]]) -> list[Figure]:
    """The latest message of each run, with percentiles over all runs."""

    def figure(name: str, runs: list[list[float]], target: Target | None) -> Figure:
        return Figure(name, "ms, the latest", [max(run) * 1e3 for run in runs], target, summary([late for run in runs for late in run]))

    return [
        figure("delayed messages, nothing else to do", quiet, None),
        figure("delayed messages, another client at full speed", busy, LATE_TARGET),
        figure("the machine's timer, write + fdatasync at that time", machine, None),
    ]
