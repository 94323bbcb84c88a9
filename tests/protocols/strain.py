"""Tools for load tests: raw frames of each protocol, a probe that measures response times, and the memory of the process."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from headrace.limits import MIB
from headrace.wire import figg, flymq, rustlog
from headrace.wire.blipmq import encoder as blipmq
from headrace.wire.flymq import messages as flymq_messages
from headrace.wire.rustlog import Dialect
from headrace.wire.rustlog import messages as rustlog_messages
from tests.canaries import secret
from tests.server.process import BrokerProcess

WAIT_SECONDS: Final = 300.0
ANSWER_CPU_SECONDS_MAX: Final = 2.0
"""Processor time that the broker may spend on others while one peer waits. It does not depend on the load of the machine."""
"""Longest response time for a bystander on two busy cores."""
KEY: Final = secret("api-key")
TOPIC: Final = "demo"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Frames:
    """One protocol's frames, as a peer that only knows bytes would send them."""

    greeting: bytes
    question: bytes
    """Answered at once, whatever the broker holds."""
    publish: bytes
    """Many records for the topic, in one or more frames."""
    first_part: bytes
    """The beginning of a long frame that is recognised and never finished."""


def _blipmq() -> Frames:
    greeting = blipmq.hello(1) + blipmq.auth(2, KEY.encode())
    publish = blipmq.publishes(1, TOPIC, range(10, 138), [bytes(1_000)] * 128)
    # The longest possible AUTH.
    return Frames(greeting, blipmq.ping(3), publish, blipmq.hello(1) + blipmq.auth(2, bytes(65_535))[:60_000])


def _rustlog() -> Frames:
    produce = rustlog.encode_request(Dialect.BINARY, rustlog_messages.Produce(TOPIC, 0, [bytes(1_000)] * 128))
    large = rustlog.encode_request(Dialect.BINARY, rustlog_messages.Produce(TOPIC, 0, [bytes(9 * MIB)]))
    return Frames(b"", rustlog.encode_request(Dialect.BINARY, rustlog_messages.ListTopics()), produce, large[: 8 * MIB])


def _flymq() -> Frames:
    produce = flymq.encode_request(flymq_messages.ProduceBatch(TOPIC, [bytes(1_000)] * 128))
    large = flymq.encode_request(flymq_messages.ProduceBatch(TOPIC, [bytes(31 * MIB)]))
    return Frames(b"", flymq.encode_request(flymq_messages.ListTopics()), produce, large[: 30 * MIB])


def _figg() -> Frames:
    publish = figg.encode.publish(TOPIC, range(1, 129), [bytes(1_000)] * 128)
    return Frames(b"", figg.encode.ping(1), publish, figg.encode.publish(TOPIC, [1], [bytes(31 * MIB)])[: 30 * MIB])


PROTOCOLS: Final = {"figg": _figg(), "rustlog": _rustlog(), "blipmq": _blipmq(), "flymq": _flymq()}


class Peer:
    """A socket that blocks no longer than it should."""

    def __init__(self, address: tuple[str, int], protocol: str, *, receive_bytes: int = 0) -> None:
        self.frames = PROTOCOLS[protocol]
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(WAIT_SECONDS)
        self.socket.connect(address)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def greet(self) -> Peer:
        """Become a session that has been answered."""
        self.socket.sendall(self.frames.greeting + self.frames.question)
        assert self.socket.recv(65_536)
        return self

    def exchange(self) -> None:
        """Ask a question and wait for the answer."""
        self.socket.sendall(self.frames.question)
        assert self.socket.recv(65_536), "closed"

    def pour(self, frames: bytes, seconds: float) -> int:
        """Send again and again, never reading, until the time is up; how many bytes the broker took."""
        deadline, sent, rest = time.monotonic() + seconds, 0, memoryview(frames)
        self.socket.settimeout(0.05)
        while time.monotonic() < deadline:
            try:
                count = self.socket.send(rest)
            except TimeoutError:
                continue
            sent += count
            rest = rest[count:] or memoryview(frames)
        self.socket.settimeout(WAIT_SECONDS)
        return sent

    def is_closed(self) -> bool:
        """Whether the broker has ended it, without waiting; answers on the way are thrown away."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(65_536):
                del data
            return True
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        finally:
            self.socket.settimeout(WAIT_SECONDS)

    def close(self) -> None:
        self.socket.close()


class Probe(threading.Thread):
    """A probe on each protocol: sends requests continuously, records what the broker did during the longest wait and its peak memory."""

    def __init__(self, broker: BrokerProcess) -> None:
        super().__init__(daemon=True)
        self._peers = {protocol: Peer(broker.addresses[0], protocol).greet() for protocol in PROTOCOLS}
        self._pid = broker.process.pid
        self._enough = threading.Event()
        self._failure: Exception | None = None
        self.answers = 0
        self.waited_cpu_seconds_max = 0.0
        self.memory_bytes_start = self.memory_bytes_max = memory_bytes(self._pid)

    def run(self) -> None:
        try:
            while not self._enough.wait(0.005):
                for peer in self._peers.values():
                    before = cpu_seconds(self._pid)
                    peer.exchange()
                    self.waited_cpu_seconds_max = max(self.waited_cpu_seconds_max, cpu_seconds(self._pid) - before)
                    self.answers += 1
                self.memory_bytes_max = max(self.memory_bytes_max, memory_bytes(self._pid))
        except (OSError, AssertionError) as failure:
            self._failure = failure

    def finish(self, *, grown_bytes_max: int) -> None:
        """Check that no response took too long and that the broker stayed within this memory."""
        until(lambda: self.answers >= len(self._peers) or self._failure is not None)
        self._enough.set()
        self.join(WAIT_SECONDS)
        for peer in self._peers.values():
            peer.close()
        assert self._failure is None, f"a bystander lost its connection: {self._failure!r}"
        assert self.waited_cpu_seconds_max < ANSWER_CPU_SECONDS_MAX
        grown_bytes = self.memory_bytes_max - self.memory_bytes_start
        assert grown_bytes < grown_bytes_max, f"{grown_bytes / MIB:.0f} MiB"


def memory_bytes(pid: int) -> int:
    """Return the memory of the process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def cpu_seconds(pid: int) -> float:
    """Return the processor time that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@dataclass
class Strain:
    """A broker under strain; `log` is what it said, once it has stopped."""

    broker: BrokerProcess
    address: tuple[str, int]
    log: str = ""

    def counted(self, figure: str) -> int:
        """A figure of the last line about the protocols."""
        found = re.search(rf"protocols closed .*\b{figure}[=:] ?(\d+)", self.log)
        return int(found[1]) if found else 0


@contextmanager
def strained(directory: Path, *settings: str, grown_bytes_max: int) -> Iterator[Strain]:
    """A broker with a topic and a probe; afterwards the probe is content and the broker drains."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chosen = [word for setting in (*settings, "rustlog.auto_create=true") for word in ("--set", setting)]
    try:
        with BrokerProcess(directory, *chosen, "--blipmq-key", "env:STRAIN_KEY", log=directory / "log", STRAIN_KEY=KEY) as broker:
            strain = Strain(broker, broker.addresses[0])
            with Peer(strain.address, "figg").greet() as peer:
                peer.socket.sendall(figg.encode.publish(TOPIC, [1], [b"first"]))
                assert peer.socket.recv(64)
            probe = Probe(broker)
            probe.start()
            yield strain
            probe.finish(grown_bytes_max=grown_bytes_max)
            code, _, strain.log = broker.stop()
            assert code == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
