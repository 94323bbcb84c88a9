"""Traps: a process that reaches a named point of a write kills another process, or itself.

The supervisor sets a trap with a file of that name in the directory HEADRACE_TRAPS. The first process that reaches the point renames the
file, so one trap is triggered once, and kills at that moment. The renamed file is the report; a kill without a report does not count.

    planning     the driver prepares the write of a batch
    staging      a task has sent its first rows
    staged       a task has completed its stage, and Spark has no report yet
    committing   the driver is about to publish
    publishing   the broker is publishing: a moment after the request
    published    all rows are visible, and Spark has not committed the batch
    zombie       as `committing`, but the publishing process outlives its driver, and publishes while a new driver runs
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.errors import BrokerError
from headrace.spark.sink import Staged, StreamSink, stream_writer
from headrace.spark.source import HeadraceSource

if TYPE_CHECKING:
    import pyarrow as pa

VARIABLE: Final = "HEADRACE_TRAPS"
POINTS: Final = ("planning", "staging", "staged", "committing", "publishing", "published", "zombie")
MYSELF: Final = 0
MY_EXECUTOR: Final = -1
PUBLISH_SECONDS: Final = 0.004
"""Approximate duration of a small publication."""
ZOMBIE_SECONDS_MAX: Final = 600.0
"""A process that outlives its driver ends after this time, if the supervisor forgets it."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Targets: process ids or groups; `MYSELF` is the process that triggers the trap, `MY_EXECUTOR` its JVM."""

    processes: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a triggered trap."""

    point: str
    by: int
    outcome: str = ""


class Traps:
    """Directory of traps, shared by both sides."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def here(cls) -> Traps:
        return cls(Path(os.environ[VARIABLE]))

    def arm(self, point: str, orders: Orders) -> None:
        assert point in POINTS
        self.report_file(point).unlink(missing_ok=True)
        self._write(self._directory / point, asdict(orders))

    def take(self, point: str) -> Orders | None:
        """Trigger the trap if it is set, in the process that renames the file first."""
        taken = self._directory / f"{point}.{os.getpid()}.{threading.get_ident()}"
        try:
            (self._directory / point).rename(taken)
        except FileNotFoundError:
            return None
        orders = Orders(**json.loads(taken.read_text()))
        taken.unlink()
        return orders

    def is_armed(self, point: str) -> bool:
        return (self._directory / point).exists()

    def tell(self, point: str, outcome: str = "") -> None:
        self._write(self.report_file(point), asdict(Report(point, os.getpid(), outcome)))

    def report(self, point: str) -> Report | None:
        try:
            return Report(**json.loads(self.report_file(point).read_text()))
        except FileNotFoundError:
            return None

    def report_file(self, point: str) -> Path:
        return self._directory / f"{point}.sprung"

    def _write(self, path: Path, content: object) -> None:
        """Write the file atomically."""
        new = path.with_name(f"{path.name}.new{os.getpid()}")
        new.write_text(json.dumps(content))
        new.rename(path)


def spring(point: str, outcome: str = "") -> None:
    traps = Traps.here()
    orders = traps.take(point)
    if orders is not None:
        traps.tell(point, outcome)
        kill(orders)


def kill(orders: Orders) -> None:
    for group in orders.groups:
        os.killpg(group, signal.SIGKILL)
    for process in orders.processes:
        os.kill({MYSELF: os.getpid(), MY_EXECUTOR: executor()}.get(process, process), signal.SIGKILL)


def executor() -> int:
    """Return the JVM of a task, whose Python process is a child of a daemon, which is a child of the JVM."""
    daemon = os.getppid()
    return int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])


class TrappedSource(HeadraceSource):
    """The format `headrace` with traps in its writers."""

    @classmethod
    def name(cls) -> str:
        return "trapped"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        spring("planning")
        made = stream_writer(self.options, schema, overwrite)
        return TrappedSink(made.options, made.columns, made.job)


class TrappedSink(StreamSink):
    """Stream writer with traps, created by `TrappedSource`."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        staged = super().write(_trapped(iterator))
        spring("staged")
        return staged

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        spring("committing")
        is_zombie = _outlive()
        returned = threading.Event()
        if (orders := Traps.here().take("publishing")) is not None:
            threading.Thread(target=_kill_later, args=(orders, returned), daemon=True).start()
        try:
            super().commit(messages, batchId)
        except BrokerError as failure:
            if is_zombie:
                Traps.here().tell("zombie", type(failure).__name__)
            raise
        if is_zombie:
            Traps.here().tell("zombie", "it published")
        returned.set()
        spring("published")


def _trapped(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Trigger a trap at the second batch, when the first has been sent."""
    for batch in rows:
        half = batch.num_rows // 2
        yield batch.slice(0, half)
        spring("staging")
        yield batch.slice(half)


def _kill_later(orders: Orders, returned: threading.Event) -> None:
    time.sleep(random.uniform(0, PUBLISH_SECONDS))
    Traps.here().tell("publishing", "after it" if returned.is_set() else "during it")
    kill(orders)


def _outlive() -> bool:
    """Kill the driver, and go on when its successor has superseded it, which the supervisor says by taking the `going` file away."""
    traps = Traps.here()
    orders = traps.take("zombie")
    if orders is None:
        return False
    going = traps.report_file("zombie").with_name("zombie.going")
    going.touch()
    # The daemon that this process was forked from hangs up on its children when it finds the JVM gone.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    traps.tell("zombie", "waiting")
    kill(orders)
    deadline = time.monotonic() + ZOMBIE_SECONDS_MAX
    while going.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return True
