"""Broker under injected faults, clients with a ledger, and the verification of both.

    with FaultyBroker(tmp_path, seed=1) as subject:
        subject.inject(Fault("fdatasync", "error=EIO", "3"))

`inject` injects a fault into the running broker, publishes through several protocols until the fault was hit, removes it and
verifies: every acknowledged value is present once and in order, reads work, and the broker is in one of the documented states
(`docs/operations.md`, "Disk space"): healthy, or fenced until it is restarted. "Disk full" must end without a restart.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeAlias

from headrace.storage.check import check
from headrace.storage.files import DiskFiles
from tests.crash.ledger import BrokenPromise, Ledger, Sent, compose
from tests.crash.peer import Peer
from tests.crash.protocols import BlipMqPeer, FlyMqPeer, RustLogPeer
from tests.crash.serving import SMALL, Broker, BrokerDied
from tests.crash.trace import read_trace
from tests.faults.injection import Fault, fired, injected, tracer
from tests.faults.order import check_sync_order

TOPICS: Final = ("orders", "clicks", "audit", "views", "carts", "mails")
"""Enough partitions that a checkpoint syncs files in parallel."""
PEERS: Final[tuple[type[Peer], ...]] = (Peer, FlyMqPeer, RustLogPeer, BlipMqPeer)
SECONDS_MAX: Final = 300.0
"""Deadline for steps that are almost immediate on an idle machine."""
ROUNDS_MAX: Final = 60
NEW_TOPICS: Final = 4
"""How many rounds use a topic that is new: only those make directories."""
CLOCKED_SECONDS: Final = 0.6
"""Pause in the traffic after which periodic maintenance runs."""

State: TypeAlias = Literal["healthy", "full", "fenced"]


class Stuck(AssertionError):
    """An expected state was not reached in time."""


def until(condition: Callable[[], bool], what: str, seconds_max: float = SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > deadline:
            raise Stuck(f"after {seconds_max:g} s: {what}")
        time.sleep(0.02)


class Client:
    """Publishes a few values per call on its own connection. Unacknowledged values stay unknown."""

    def __init__(self, number: int, ledger: Ledger, rng: random.Random) -> None:
        self.number, self._ledger, self._rng = number, ledger, rng
        self._sequence = self._connection = 0

    def connect(self, address: tuple[str, int]) -> Peer:
        self._connection += 1
        return PEERS[self.number % len(PEERS)](address, timeout=SECONDS_MAX)

    def publish(self, address: tuple[str, int], topics: tuple[str, ...] = TOPICS, *, values: int = 12) -> str:
        """Return why it ended early, or an empty string."""
        try:
            with self.connect(address) as peer:
                self.publish_on(peer, topics, values=values)
        except TimeoutError as failure:
            raise Stuck(f"a publish through {PEERS[self.number % len(PEERS)].NAME} had no answer for {SECONDS_MAX:g} s") from failure
        except OSError as failure:
            return str(failure) or type(failure).__name__
        return ""

    def publish_on(self, peer: Peer, topics: tuple[str, ...] = TOPICS, *, values: int = 12) -> None:
        """Publish one round. Raises `OSError` when the broker returns an error or disconnects."""
        for _ in range(values):
            topic = self._rng.choice(topics)
            filler = self._rng.randbytes(self._rng.choice((10, 1_000, 10_000, 70_000)))
            self._sequence += 1
            sent = Sent(self._connection, self._sequence)
            self._ledger.note_sent(self.number, topic, sent)
            peer.publish([(topic, self._sequence, compose(topic, self.number, sent, filler))])
            while peer.acknowledged() < self._sequence:
                pass
            self._ledger.note_acked(self.number, topic, self._sequence)


class FaultyBroker:
    """A broker, its clients and their ledger, over several restarts on one data directory."""

    def __init__(
        self, directory: Path, *, seed: int, settings: Mapping[str, str] = SMALL, clients: int = 4, launcher: Sequence[str] = ()
    ) -> None:
        self._directory = directory
        self._launcher = launcher
        """Command prefix of the broker, such as prlimit and its options."""
        self._settings = settings
        self._trace = directory / "trace"
        self.rng = random.Random(seed)
        self.ledger = Ledger(list(TOPICS))
        self.clients = [Client(number, self.ledger, self.rng) for number in range(clients)]
        self._broker: Broker | None = None
        self.address = ("", 0)
        self.lives = self.faults = self.manifests = 0
        self.reached = 0
        """Faults that strace has injected at least once; those of a start or a stop may come too late."""

    def __enter__(self) -> FaultyBroker:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        elif self._broker is not None:
            with contextlib.suppress(OSError):
                self._broker.kill()

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "the broker is running"
        return self._broker

    # Start and stop.

    def start(self) -> None:
        self._broker = Broker(self._directory, settings=self._settings, tracer=self._launcher)
        self.address = self._broker.wait_ready()
        self.lives += 1

    def stop(self) -> None:
        """Drain and stop. The exit code must be 0 and the checker must find nothing."""
        code = self.broker.stop(SECONDS_MAX)
        self._broker = None
        if code != 0:
            raise BrokenPromise(f"a drained broker left with {code}: {self.output()}")
        self.check_files()

    def finish(self) -> None:
        """Publish, read everything, stop, check, restart and read everything again."""
        self.must_be_healthy()
        self.stop()
        self.start()
        self.read_all()
        self.stop()

    def output_bytes(self) -> bytes:
        return (self._directory / "broker.log").read_bytes()

    def output(self) -> str:
        return self.output_bytes().decode(errors="replace")[-3000:]

    def check_files(self) -> None:
        problems = check(DiskFiles(self._directory / "data")).problems
        if problems:
            raise BrokenPromise(f"headrace check: {problems}")

    # Faults.

    def inject(self, *faults: Fault) -> State:
        """Inject faults, publish until one was hit and once more, remove them, verify. Returns the state of the broker."""
        trace = self._next_trace()
        with injected(self.broker.pid, trace, *faults):
            self._until_fired(trace, faults)
            self.publish()
        return self._judge(trace, faults)

    def suffer_at_stop(self, *faults: Fault) -> None:
        """Inject while the broker drains. It must exit, and the next start must have everything that was acknowledged."""
        trace = self._next_trace()
        self.publish()
        with injected(self.broker.pid, trace, *faults):
            self.broker.signal(signal.SIGTERM)
            code = self.broker.wait(SECONDS_MAX)
        self._broker = None
        if code not in (0, 1):
            raise BrokenPromise(f"{_named(faults)} while draining: left with {code}: {self.output()}")
        self._after_life(trace)
        self.start()
        self.read_all()

    def suffer_at_start(self, *faults: Fault, killed: bool = False, settings: Mapping[str, str] | None = None) -> State | None:
        """Inject from the first system call on, into a broker with these settings. Returns the state of the broker, or None if it exited
        with a one-line error."""
        if killed:
            self.broker.kill()
        else:
            self.stop()
        trace = self._next_trace()
        said = len(self.output_bytes())
        self._broker = Broker(self._directory, settings=settings or self._settings, tracer=tracer(trace, faults))
        state: State | None = None
        try:
            self.address = self._broker.wait_ready()
        except BrokerDied:
            code, self._broker = self._broker.wait(), None
            why = self.output_bytes()[said:].decode(errors="replace")
            if code != 1 or "headrace: " not in why or "Traceback" in why:
                raise BrokenPromise(f"{_named(faults)}: a start that failed left with {code}: {why}") from None
        else:
            self.publish()
            self.read_all()
            state = self.state()
            self.broker.signal(signal.SIGTERM)
            self.broker.wait(SECONDS_MAX)
            self._broker = None
        self._after_life(trace)
        self.start()
        self.read_all()
        return state

    def _next_trace(self) -> Path:
        self._trace = self._directory / f"trace-{self.lives}-{self.faults}"
        self.faults += 1
        return self._trace

    def _after_life(self, trace: Path) -> None:
        self._judge_order(trace)
        self.check_files()

    def _judge_order(self, trace: Path) -> None:
        self.reached += fired(trace) > 0
        self.manifests += check_sync_order(read_trace(trace))

    def _until_fired(self, trace: Path, faults: tuple[Fault, ...]) -> None:
        for round_number in range(ROUNDS_MAX):
            if fired(trace):
                return
            self.publish(new_topic=round_number < NEW_TOPICS)
            if not fired(trace):
                time.sleep(CLOCKED_SECONDS if any(fault.calls == "statfs" for fault in faults) else 0.02)
        raise Stuck(f"{_named(faults)} was not reached in {ROUNDS_MAX} rounds")

    def _judge(self, trace: Path, faults: tuple[Fault, ...]) -> State:
        if self.broker.process.poll() is not None:
            raise BrokenPromise(f"{_named(faults)}: the broker died: {self.output()}")
        self._judge_order(trace)
        state = self.settled_state()
        if state == "healthy":
            self.must_be_healthy()
        else:
            self.read_all()  # reads work in every state
            self.broker.signal(signal.SIGTERM)
            self.broker.wait(SECONDS_MAX)
            self._broker = None
            self.check_files()
            self.start()
            self.must_be_healthy()
        return state

    # Traffic and verification.

    def publish(self, *, new_topic: bool = False) -> list[str]:
        """Run one round of all clients. Returns the reasons of those that ended early."""
        if new_topic:
            self.ledger.topics = [*self.ledger.topics, f"topic-{len(self.ledger.topics)}"]
        topics = (*TOPICS, self.ledger.topics[-1])
        reasons = [client.publish(self.address, topics) for client in self.clients]
        return [reason for reason in reasons if reason]

    def read_all(self) -> None:
        """Compare every topic with the ledger. Reads work in every state."""
        with Peer(self.address, timeout=SECONDS_MAX) as peer:
            peer.ping()
        for topic in self.ledger.topics:
            self.ledger.check(topic, self._read(topic))

    def _read(self, topic: str) -> list[bytes]:
        try:
            with Peer(self.address, timeout=SECONDS_MAX) as peer:
                return peer.drain(topic)
        except ConnectionError:
            if any(known == topic for _, known in self.ledger.acked):
                raise
            return []  # the creation of the topic was not acknowledged, and a fenced broker cannot create it

    def state(self) -> State:
        """Determine the state by publishing, as a client would."""
        probe = next(client for client in self.clients if client.number % len(PEERS) == 1)
        reason = probe.publish(self.address, values=1)
        if not reason:
            return "healthy"
        if "storage failed" in reason:
            return "fenced"
        if "disk full" in reason:
            return "full"
        raise BrokenPromise(f"a publish was refused with a reason that no page documents: {reason}")

    def settled_state(self) -> State:
        """Return the state once it is not "full": the fault is removed and the disk has space."""
        states: list[State] = [self.state()]

        def has_settled() -> bool:
            states[0] = self.state()
            return states[0] != "full"

        if states[0] == "full":
            until(has_settled, "the broker still says that the disk is full")
        return states[0]

    def must_be_healthy(self) -> None:
        """Check that every protocol accepts publishes and that a checkpoint follows, so that journal files do not accumulate."""
        state = self.settled_state()
        manifest = self._directory / "data" / "MANIFEST"
        before = manifest.stat().st_mtime_ns if manifest.exists() else 0
        reasons = self.publish()
        if state != "healthy" or reasons:
            raise BrokenPromise(f"the broker is {state}: {reasons} {self.output()}")
        until(
            lambda: manifest.exists() and manifest.stat().st_mtime_ns > before, f"no checkpoint: maintenance does not work. {self.output()}"
        )
        self.read_all()


def _named(faults: tuple[Fault, ...]) -> str:
    return ", ".join(map(str, faults))


@contextlib.contextmanager
def suffering(
    directory: Path, *, seed: int = 1, settings: Mapping[str, str] = SMALL, launcher: Sequence[str] = ()
) -> Iterator[FaultyBroker]:
    """Yield a broker that stops when the block ends, after a final verification if nothing failed before."""
    subject = FaultyBroker(directory, seed=seed, settings=settings, launcher=launcher)
    with subject:
        yield subject
