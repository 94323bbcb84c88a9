"""`headrace bench fanout`: one publisher, and many subscribers that each receive every record.

Records are published at fixed times. The latency of a delivery counts from the intended time of its record to the read that completes it
at the subscriber, so it includes the publish and its fdatasync. All subscribers are served by one loop that only counts bytes: every
record has the same size.
"""

from __future__ import annotations

import asyncio
import select
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from headrace.bench import fujin, traffic
from headrace.bench.children import Address, BenchFailed, cpu_seconds
from headrace.bench.load import READ_BYTES, STALL_SECONDS, connected, sample_values
from headrace.bench.options import Bench, Chosen
from headrace.bench.protocols import PROTOCOLS
from headrace.bench.protocols.contract import receive_exactly
from headrace.bench.report import Figure, NoteValue, Target, percentile
from headrace.wire.figg import encode as figg
from headrace.wire.fujin import ReaderKind, WriteForm, encode

TARGETS: Final = {
    ("figg", 1_000, 100): {50: Target(at_most=10.0), 99: Target(at_most=50.0)},
    ("fujin", 100, 1_000): {50: Target(at_most=50.0)},
}
"""Milliseconds, by protocol, subscribers and rate, then by percentile."""
_TOPIC: Final = "fanout-{}"
_READER: Final = "fanout-{}-{}"
"""Name of a Fujin reader: the number of the repetition and of the subscriber. Each is a group of its own."""


@dataclass(frozen=True, slots=True)
class Fanout:
    """Parameters of the command."""

    protocol: str
    subscribers: int
    rate: int
    """Records per second."""
    seconds: float
    value_bytes: int

    @property
    def records(self) -> int:
        return max(1, round(self.rate * self.seconds))

    def values(self) -> list[bytes]:
        return sample_values(self.value_bytes)


@dataclass(slots=True)
class Deliveries:
    """Latency in seconds of every record at every subscriber. `counts` are the records that each subscriber has received."""

    fanout: Fanout
    counts: list[int]
    latencies: array[float] = field(default_factory=lambda: array("d"))
    received: int = 0

    @classmethod
    def of(cls, fanout: Fanout) -> Deliveries:
        return cls(fanout, [0] * fanout.subscribers)

    def note(self, subscriber: int, count: int, now: float) -> None:
        """Note that the subscriber has `count` records `now` seconds after the start."""
        before, self.counts[subscriber] = self.counts[subscriber], count
        if count > self.fanout.records:
            raise BenchFailed(f"subscriber {subscriber} received {count} records, expected {self.fanout.records}")
        rate = self.fanout.rate
        self.latencies.extend([now - index / rate for index in range(before, count)])
        self.received += count - before

    @property
    def is_done(self) -> bool:
        return self.received == self.fanout.records * self.fanout.subscribers


@dataclass(slots=True)
class Fanned:
    """All repetitions."""

    fanout: Fanout
    runs: list[array[float]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """CPU time of the broker."""

    def figures(self) -> list[Figure]:
        fanout, ordered = self.fanout, [sorted(run) for run in self.runs]
        name = f"{fanout.protocol}, {fanout.rate}/s to {fanout.subscribers} subscribers"
        targets = TARGETS.get((fanout.protocol, fanout.subscribers, fanout.rate), {})
        deliveries = sum(map(len, ordered))
        notes: dict[str, NoteValue] = {"max": max(run[-1] for run in ordered) * 1e3}
        if self.cpu_seconds:
            notes["broker CPU µs/delivery"] = round(self.cpu_seconds / deliveries * 1e6, 2)
        return [
            Figure(
                name,
                f"ms p{percent}",
                [percentile(run, percent) * 1e3 for run in ordered],
                targets.get(percent),
                notes if percent == 50 else {},
            )
            for percent in (50, 99)
        ]


def measure(bench: Bench, chosen: Chosen, fanout: Fanout) -> Fanned:
    found = Fanned(fanout)
    if fanout.protocol == "fujin":
        names = [(turn, index) for turn in range(bench.repeat) for index in range(fanout.subscribers)]
        settings = {"HEADRACE__FUJIN__READERS": ",".join(f"{_READER.format(*name)}={_TOPIC.format(name[0])}" for name in names)}
        with fujin.quic_broker(bench.directory, chosen.ack, chosen.profile, settings) as (address, pid):
            _repeat(bench, found, lambda turn: fujin.on_loop(_over_quic(address, fanout, turn)), lambda: cpu_seconds(pid))
    else:
        with bench.broker(chosen) as target:
            plan = traffic.Traffic(PROTOCOLS["figg"], target.address, target.key, fanout.records, fanout.value_bytes)
            traffic.warm_up(plan)
            _repeat(bench, found, lambda _: _over_figg(target.address, fanout, traffic.new_topic(plan).name), target.cpu_seconds)
    return found


def _repeat(bench: Bench, found: Fanned, once: Callable[[int], array[float]], cpu: Callable[[], float]) -> None:
    before = cpu()
    for turn in range(bench.repeat):
        with bench.steps.step(f"fan-out {turn + 1}/{bench.repeat}", 1):
            found.runs.append(once(turn))
    found.cpu_seconds = cpu() - before


def _over_figg(address: Address, fanout: Fanout, topic: str) -> array[float]:
    values, deliveries = fanout.values(), Deliveries.of(fanout)
    skipped, frame_bytes = len(figg.attached(topic, 0)), len(figg.data(topic, [0], values[:1]))
    buffer, poll = bytearray(READ_BYTES), select.epoll()
    frames = [figg.publish(topic, [index], [values[index % len(values)]]) for index in range(fanout.records)]
    with connected(address, fanout.subscribers + 1) as (publisher, *subscribers):
        for sock in subscribers:
            sock.sendall(figg.attach(topic))
        for sock in subscribers:
            receive_exactly(sock, skipped)
            sock.setblocking(False)
            poll.register(sock, select.EPOLLIN)
        by_fd = {sock.fileno(): index for index, sock in enumerate(subscribers)}
        received = [0] * fanout.subscribers
        sent, heard, began = 0, 0.0, time.perf_counter()
        while not deliveries.is_done:
            now = time.perf_counter() - began
            while sent < fanout.records and sent / fanout.rate <= now:
                publisher.sendall(frames[sent])
                sent += 1
            wait = sent / fanout.rate - now if sent < fanout.records else 1.0
            for fd, _ in poll.poll(max(0.0, wait)):
                index = by_fd[fd]
                size = subscribers[index].recv_into(buffer)
                if not size:
                    raise BenchFailed("the broker closed the connection of a subscriber")
                heard = time.perf_counter() - began
                received[index] += size
                deliveries.note(index, received[index] // frame_bytes, heard)
            if now - heard > STALL_SECONDS:
                raise BenchFailed(f"nothing delivered for {STALL_SECONDS:.0f} s")
    poll.close()
    return deliveries.latencies


class _Subscriber(fujin.Connection):
    """Passes the bytes received on its stream to `heard`, and calls `ended` if the connection is lost."""

    heard: Callable[[int], None] | None = None
    ended: Callable[[], None] | None = None

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        super().received(stream, data, finished)
        if self.heard is not None and not stream & 3:
            self.heard(self.counts[stream])

    def lost(self, reason: str) -> None:
        super().lost(reason)
        if self.ended is not None:
            self.ended()


async def _over_quic(address: Address, fanout: Fanout, turn: int) -> array[float]:
    values, deliveries, topic = fanout.values(), Deliveries.of(fanout), _TOPIC.format(turn)
    frames = [encode.writes(topic, [bytes(4)], [values[index % len(values)]], form=WriteForm.NEVER) for index in range(fanout.records)]
    skipped, frame_bytes = fujin.pushed_bytes(0, fanout.value_bytes), len(encode.messages(None, values[:1]))
    publisher = await fujin.Connection.open(address)
    subscribers = [await _Subscriber.open(address) for _ in range(fanout.subscribers)]
    try:
        for index, subscriber in enumerate(subscribers):
            stream = subscriber.carrier.open_stream()
            subscriber.carrier.send(stream, encode.connect_reader(ReaderKind.PUSH, True, _READER.format(turn, index)))
            await subscriber.until(lambda subscriber=subscriber, stream=stream: subscriber.counts.get(stream, 0) >= skipped)  # type: ignore[misc]  # bound for this turn
        stream = publisher.carrier.open_stream()
        publisher.carrier.send(stream, encode.connect_writer())
        done, began = asyncio.Event(), time.perf_counter()

        def heard(index: int, received_bytes: int) -> None:
            deliveries.note(index, (received_bytes - skipped) // frame_bytes, time.perf_counter() - began)
            if deliveries.is_done:
                done.set()

        for index, subscriber in enumerate(subscribers):
            subscriber.heard, subscriber.ended = partial(heard, index), done.set
        for index, frame in enumerate(frames):
            await asyncio.sleep(max(0.0, began + index / fanout.rate - time.perf_counter()))
            publisher.carrier.send(stream, frame)
        async with asyncio.timeout(STALL_SECONDS):
            await done.wait()
        if not deliveries.is_done:
            reason = next(subscriber.reason for subscriber in subscribers if subscriber.reason is not None)
            raise BenchFailed(f"the connection of a subscriber was lost: {reason}")
    except TimeoutError:
        raise BenchFailed(f"{deliveries.received} of {fanout.records * fanout.subscribers} records delivered") from None
    finally:
        for connection in (publisher, *subscribers):
            connection.close()
    return deliveries.latencies
