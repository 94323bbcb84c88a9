"""Kill driver, broker and workers again and again while a query copies a topic, and check that every row arrived exactly once.

    python -m tests.spark.crash.supervisor --kills 100 [--seed 1] [--directory DIR]

Each kill happens at a trap (see `traps.py`) and counts only when the trap was triggered and the process has ended. Between two kills the
copy must progress, so each kill hits a running query. After some kills of the driver its successor is killed too, before it has caught up.
Only the kill of a driver needs a new JVM: a query survives the loss of a worker, and retries or restarts after the loss of a broker.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, TypeVar

import pyarrow as pa

from headrace.errors import BrokerError
from headrace.flight.client import FlightClient, Servers
from tests.spark.crash.traps import MY_EXECUTOR, MYSELF, VARIABLE, Orders, Report, Traps
from tests.spark.fast_start import spark_home
from tests.spark.serving import FlightBroker

_T = TypeVar("_T")
SOURCE, TARGET = "crash.source", "crash.target"
PARTITIONS: Final = 2
ROWS_PER_BATCH: Final = 100
BATCHES_AHEAD: Final = 60
"""Rows fed before each kill: more than a query can copy before the trap is triggered."""
SECONDS_MAX: Final = 600.0
"""A driver needs seven seconds to start on an idle machine, and more than a minute beside other tests."""

IN_PLACE: Final = (
    ("staging", "worker"),
    ("staging", "broker"),
    ("published", "broker"),
    ("publishing", "broker"),
    ("staged", "worker"),
    ("staged", "broker"),
    ("publishing", "broker"),
    ("committing", "broker"),
    ("planning", "broker"),
)
OF_DRIVERS: Final = ("published", "staging", "zombie", "recovery", "committing", "staged", "publishing", "planning")
"""`recovery` kills twice: the driver after its publication, and its successor while it prepares the same batch."""


@dataclass
class Outcome:
    """Summary of an execution."""

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    during_publication: int = 0
    fenced: list[str] = field(default_factory=list)
    """Results of publications of drivers that were already dead."""
    rows: int = 0
    restarts: int = 0
    """Errors of queries that failed in a surviving driver."""
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kinds}); {self.during_publication} of them during a publication; fenced: {self.fenced}; "
            f"{self.rows:,} rows exactly once; {self.restarts} queries restarted; {self.seconds:.0f} s"
        )


class NotExactlyOnce(AssertionError):
    """A row is missing, duplicated or out of order."""


class Driver:
    """One process of the job."""

    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        path = directory / "settings.json"
        path.write_text(json.dumps(settings))
        self._log: IO[bytes] = (directory / "driver.log").open("ab")
        environment = {**os.environ, VARIABLE: str(directory / "traps"), "SPARK_HOME": str(spark_home())}
        environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[3]), "PYSPARK_PYTHON": sys.executable}
        # A separate process group with the JVM. The Python workers have another group and briefly outlive the driver.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.crash.driver", str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait(self, seconds_max: float = SECONDS_MAX) -> int:
        code = self.process.wait(seconds_max)
        self._log.close()
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.poll() is None or not self._log.closed:
            self.wait()


class Supervisor:
    """Supervisor: sets traps, restarts processes, feeds the source, and checks the rows at the end."""

    def __init__(self, directory: Path, *, seed: int, master: str = "local[2,4]", conf: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._master, self._conf = master, dict(conf or {})
        self._rng = random.Random(seed)
        for name in ("traps", "spark", "broker"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self._traps = Traps(directory / "traps")
        self._broker = self._new_broker("127.0.0.1:0")
        self._address = self._broker.address
        self._client = FlightClient(Servers.parse(self._address, timeout_seconds=10.0))
        self._fed = [0] * PARTITIONS
        self._driver: Driver | None = None
        self.outcome = Outcome()

    def _new_broker(self, address: str) -> FlightBroker:
        broker = FlightBroker(self._directory / "broker", listen_flight=address)
        broker.wait_ready()
        return broker

    def run(self, planned: Iterable[tuple[str, str]]) -> Outcome:
        """Kill according to the plan of (target, point)."""
        started = time.monotonic()
        for topic in (SOURCE, TARGET):
            self._client.create_topic(topic, PARTITIONS)
        for kind, point in planned:
            self._feed()
            if self._driver is None:
                self._start_driver()
            self._kill(kind, point)
        self._finish()
        self._compare()
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    def close(self) -> None:
        if self._driver is not None:
            self._driver.kill()
        self._client.close()
        self._broker.__exit__(None, None, None)

    # Life

    def _feed(self) -> None:
        """Feed the source. No kill of the broker may be pending, so that each row is appended once."""
        behind = sum(self._ends(SOURCE)) - sum(self._ends(TARGET))
        missing = ROWS_PER_BATCH * BATCHES_AHEAD - behind
        if missing <= 0:
            return
        for partition in range(PARTITIONS):
            first, count = self._fed[partition], missing // PARTITIONS + 1
            values = [f"{partition}:{first + number}".encode() for number in range(count)]
            batch = pa.RecordBatch.from_pydict({"key": [str(partition).encode()] * count, "value": values})
            self._client.append(SOURCE, [batch], partition=partition)
            self._fed[partition] += count

    def _ends(self, topic: str) -> list[int]:
        return [partition.end for partition in self._client.describe([topic])[topic].partitions]

    def _start_driver(self) -> None:
        settings: dict[str, object] = {
            "servers": self._address,
            "source": SOURCE,
            "target": TARGET,
            "checkpoint": str(self._directory / "checkpoint"),
            "directory": str(self._directory / "spark"),
            "finish": str(self._directory / "finish"),
            "rows": ROWS_PER_BATCH,
            "rows_finishing": 50_000,
            "master": self._master,
            "conf": self._conf,
        }
        self._driver = Driver(self._directory, settings)

    def _finish(self) -> None:
        if self._driver is None:
            self._start_driver()
        assert self._driver is not None
        (self._directory / "finish").touch()
        code = self._driver.wait()
        if code != 0:
            raise AssertionError(f"the last driver left with {code}: {self.log()[-3000:]}")
        self._driver = None
        self.outcome.restarts = self.log().count("query failed")

    def log(self) -> str:
        return (self._directory / "driver.log").read_text(errors="replace")

    def _broker_log(self) -> str:
        return (self._directory / "broker" / "broker.log").read_text(errors="replace")

    # Death

    def _kill(self, target: str, point: str) -> None:
        match target, point:
            case "driver", "recovery":
                self._kill_driver("published")
                self._start_driver()
                self._kill_driver("planning", waking=True)
            case "driver", "zombie":
                self._kill_driver("zombie")
                self._start_driver()
                self._bury_zombie()
            case "driver", _:
                self._kill_driver(point)
            case "broker", _:
                self._kill_broker(point)
            case "executor", _:
                self._kill_worker(target, point, MY_EXECUTOR)
            case _:
                self._kill_worker(target, point, MYSELF)

    def _kill_worker(self, target: str, point: str, whom: int) -> None:
        """Kill a worker. The query survives, because Spark repeats the task."""
        self._moving()
        self._spring(point, Orders(processes=(whom,)))
        self._count(target, point)

    def _kill_driver(self, point: str, *, waking: bool = False) -> None:
        assert self._driver is not None
        if not waking:
            self._moving()
        orders = Orders(groups=(self._driver.process.pid,), processes=(MYSELF,) if point in ("committing", "staging") else ())
        self._spring(point, orders)
        code = self._driver.wait()
        assert code == -signal.SIGKILL, f"the driver left with {code}"
        self._driver = None
        self._count("driver", f"{point} again" if waking else point)

    def _kill_broker(self, point: str) -> None:
        self._moving()
        self._spring(point, Orders(processes=(self._broker.process.pid,)))
        code = self._broker.process.wait(SECONDS_MAX)
        assert code == -signal.SIGKILL, f"the broker left with {code}"
        time.sleep(self._rng.choice((0.0, 0.0, 0.5)))  # at once, or after some retries of the clients
        self._broker = self._new_broker(self._address)
        self._count("broker", point)

    def _bury_zombie(self) -> None:
        """Let the old driver publish while its successor runs; the publication must fail."""
        self._moving()
        (self._directory / "traps" / "zombie.going").unlink()
        report = self._until(lambda: self._told("zombie"), "the zombie to publish")
        self.outcome.fenced.append(report.outcome)

    def _told(self, point: str) -> Report | None:
        report = self._traps.report(point)
        return report if report is not None and report.outcome != "waiting" else None

    def _spring(self, point: str, orders: Orders) -> None:
        self._traps.arm(point, orders)
        report = self._until(lambda: self._traps.report(point), f"the trap {point!r} to spring")
        if report.outcome == "during it":
            self.outcome.during_publication += 1

    def _count(self, target: str, point: str) -> None:
        self.outcome.kills[f"{target} {point}"] += 1

    def _moving(self) -> None:
        """Wait until the query copies again after the last kill."""
        before = self._patient_end()
        self._until(lambda: self._patient_end() > before or None, "the copy to move on")

    def _patient_end(self) -> int:
        try:
            return sum(self._ends(TARGET))
        except BrokerError:
            return 0

    def _patient_ends(self) -> str:
        try:
            return f"{self._ends(SOURCE)} → {self._ends(TARGET)}"
        except BrokerError as failure:
            return f"unknown: {failure}"

    def _until(self, look: Callable[[], _T | None], what: str) -> _T:
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            found = look()
            if found is not None:
                return found
            if self._driver is not None and (code := self._driver.process.poll()) not in (None, -signal.SIGKILL):
                raise AssertionError(f"the driver left with {code}: {self.log()[-3000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {SECONDS_MAX} s for {what}; {self.outcome}; {self._state()}")
            time.sleep(0.02)

    def _state(self) -> str:
        """Return where the copy stands, and the threads of the driver: a query that stopped has no error to show."""
        if self._driver is not None:
            subprocess.run(["pkill", "-QUIT", "-g", str(self._driver.process.pid), "java"], check=False)
            time.sleep(1.0)  # Java writes its threads to the log
        return f"offsets {self._patient_ends()}; driver: {self.log()[-20_000:]}; broker: {self._broker_log()[-3000:]}"

    # Verification

    def _compare(self) -> None:
        """Compare row by row: the source equals the fed rows, and the target equals the source."""
        for partition in range(PARTITIONS):
            wanted = [f"{partition}:{number}".encode() for number in range(self._fed[partition])]
            source, target = self._values(SOURCE, partition), self._values(TARGET, partition)
            if source != wanted:
                raise AssertionError(f"the source is not what was fed: {len(source)} rows instead of {len(wanted)}")
            if target != source:
                raise NotExactlyOnce(_difference(partition, source, target))
            self.outcome.rows += len(target)

    def _values(self, topic: str, partition: int) -> list[bytes]:
        end = self._ends(topic)[partition]
        return [value for batch in self._client.read(topic, partition, 0, end, columns=("value",)) for value in batch.column(0).to_pylist()]


def _difference(partition: int, source: list[bytes], target: list[bytes]) -> str:
    counts = collections.Counter(target)
    missing = [row for row in source if not counts[row]]
    double = [row for row, count in counts.items() if count > 1]
    place = next((index for index, (left, right) in enumerate(zip(source, target, strict=False)) if left != right), len(target))
    return (
        f"partition {partition}: {len(source)} rows copied as {len(target)}; {len(missing)} missing {missing[:5]}, "
        f"{len(double)} twice {double[:5]}; the first difference is at {place}"
    )


def schedule(kills: int) -> Iterator[tuple[str, str]]:
    """Return (target, point) pairs for `kills` kills: two without a new driver, then one of a driver."""
    places, drivers = 0, 0
    while kills > 0:
        for _ in range(min(2, kills)):
            point, target = IN_PLACE[places % len(IN_PLACE)]
            places += 1
            kills -= 1
            yield target, point
        if kills > 0:
            point = OF_DRIVERS[drivers % len(OF_DRIVERS)]
            drivers += 1
            kills -= 2 if point == "recovery" else 1
            yield "driver", point


def kill_repeatedly(directory: Path, *, kills: int, seed: int) -> Outcome:
    """Run the supervisor. Raises `NotExactlyOnce`, or another `AssertionError` if the execution itself failed."""
    supervisor = Supervisor(directory, seed=seed)
    try:
        return supervisor.run(schedule(kills))
    finally:
        supervisor.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.crash.supervisor", description="Kill a copying Spark job; count its rows.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="work here (default: a temporary directory, removed if all is well)")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="headrace-spark-kill9-"))
    try:
        print(kill_repeatedly(directory, kills=options.kills, seed=options.seed))
    except AssertionError as failure:
        print(f"{failure}\neverything is in {directory}", file=sys.stderr)
        return 1
    if options.directory is None:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
