"""Kill the broker repeatedly while clients publish through all protocols, and verify its guarantees.

    python -m tests.crash.kill9 --cycles 50 [--seed 1] [--clients 10] [--directory DIR]

Each cycle starts the broker on the same data, lets the clients publish for a moment and sends SIGKILL: during the traffic, during
the drain after a SIGTERM, during recovery, or (through strace) at a given system call. Every few cycles all topics are read from the
start and compared with the ledger of the clients. After the last cycle `headrace check` verifies the data directory.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.ledger import BrokenPromise, Ledger
from tests.crash.peer import Peer
from tests.crash.protocols import PEERS
from tests.crash.publisher import Board, Publisher
from tests.crash.serving import Broker, BrokerDied, check_directory, serving

TOPICS = ("orders", "clicks", "über", "audit.log")
KINDS = ("traffic",) * 6 + ("drain",) * 2 + ("recovery",) * 2 + ("write", "sync")
TRACED = ("write", "sync")
DRAIN_EVERY = 10


@dataclass
class Outcome:
    """Summary of a test run."""

    cycles: collections.Counter[str] = field(default_factory=collections.Counter)
    acked: int = 0
    protocols: set[str] = field(default_factory=set)
    """Protocols through which a value was acknowledged."""
    kept: int = 0
    checks: int = 0
    start_seconds_max: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.cycles.items()))
        return (
            f"{self.cycles.total()} cycles ({kinds}), {self.acked:,} values acknowledged, {self.kept:,} kept, "
            f"through {', '.join(sorted(self.protocols))}, {self.checks} full reads, slowest start {self.start_seconds_max:.2f} s"
        )


class Supervisor:
    """Runs the cycles. All random choices come from the seed; timing does not."""

    def __init__(self, directory: Path, *, seed: int, clients: int) -> None:
        self._directory = directory
        self._rng = random.Random(seed)
        self._ledger = Ledger(TOPICS)
        self._board = Board()
        self._clients = [
            Publisher(number, PEERS[number % len(PEERS)], self._board, self._ledger, patient=number // len(PEERS) % 2 == 0, seed=seed)
            for number in range(clients)
        ]
        self.outcome = Outcome()

    def run(self, cycles: int) -> Outcome:
        for client in self._clients:
            client.start()
        try:
            for cycle in range(cycles):
                self._cycle(self._rng.choice(KINDS) if cycle else "traffic", read=cycle % DRAIN_EVERY == DRAIN_EVERY - 1)
            self._last_words()
        finally:
            self._board.end()
        return self.outcome

    def _cycle(self, kind: str, *, read: bool) -> None:
        with serving(self._directory, tracer=self._tracer(kind)) as broker:
            if kind == "recovery":
                time.sleep(self._rng.uniform(0, max(self.outcome.start_seconds_max, 0.1)))
                broker.kill()
            else:
                self._live(broker, kind, read=read)
        self.outcome.cycles[kind] += 1
        self.outcome.acked = self._ledger.acked_count

    def _tracer(self, kind: str) -> list[str]:
        """strace delivers the signal when the call is entered: the write or sync of that number does not happen."""
        if kind not in TRACED:
            return []
        call = "pwritev2" if kind == "write" else "fdatasync"  # what os.pwritev and os.fdatasync call
        moment = f"inject={call}:signal=SIGKILL:when={self._rng.randrange(4, 80)}"
        return ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", moment]

    def _live(self, broker: Broker, kind: str, *, read: bool) -> None:
        started = time.monotonic()
        try:
            address = broker.wait_ready()
            self.outcome.start_seconds_max = max(self.outcome.start_seconds_max, time.monotonic() - started)
            if read:
                self._check(address)
        except (BrokerDied, OSError):
            if kind not in TRACED:
                raise  # the tracer may kill the broker before it is ready
            return
        self._board.open(address, broker.quic)
        time.sleep(self._rng.uniform(0.02, self._rng.choice((0.3, 0.3, 1.5))))  # QUIC connects slowly
        if kind == "drain":
            broker.signal(signal.SIGTERM)
            time.sleep(self._rng.uniform(0, 0.1))
        broker.kill()
        self._board.close()

    def _check(self, address: tuple[str, int]) -> None:
        kept = 0
        for topic in TOPICS:
            with Peer(address) as peer:
                values = peer.drain(topic)
            self._ledger.check(topic, values)
            kept += len(values)
        self.outcome.kept, self.outcome.checks = kept, self.outcome.checks + 1

    def _last_words(self) -> None:
        """Restart, read everything, drain, and run the offline checker on the files."""
        self.outcome.protocols = {
            client.protocol for client in self._clients if client.number in {number for number, _ in self._ledger.acked}
        }
        with serving(self._directory) as broker:
            self._check(broker.wait_ready())
            code = broker.stop()
        if code != 0:
            raise BrokenPromise(f"a drained broker left with {code}: {broker.output()[-2000:]}")
        report = check_directory(self._directory)
        if report.returncode != 0:
            raise BrokenPromise(f"headrace check left with {report.returncode}: {report.stdout}{report.stderr}")


def kill_repeatedly(directory: Path, *, cycles: int, seed: int, clients: int = 10) -> Outcome:
    """Run the cycles. Raises `BrokenPromise` with the seed in its message if the broker broke a guarantee."""
    try:
        return Supervisor(directory, seed=seed, clients=clients).run(cycles)
    except AssertionError as failure:
        raise BrokenPromise(f"seed {seed}, {cycles} cycles, {clients} clients: {failure}") from failure


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash.kill9", description="Kill the broker in a loop; check that it kept its word."
    )
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--directory", type=Path, help="keep the data here (default: a temporary directory, removed if all is well)")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="headrace-kill9-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        outcome = kill_repeatedly(directory, cycles=options.cycles, seed=options.seed, clients=options.clients)
    except BrokenPromise as failure:
        print(f"{failure}\nthe data is in {directory}", file=sys.stderr)
        return 1
    print(outcome)
    if options.directory is None:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
