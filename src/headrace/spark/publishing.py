"""What a write is known by at the broker, and the patience to get it through.

Spark may run a task twice, and a whole batch again after a crash. Each attempt of a task stages its rows under a handle of its own,
which nobody sees; the driver then publishes the handles of the attempts that count, as one transaction under an application and a
version. The broker remembers the last version of each application and takes no version twice.

    written by                       application                  version          run
    a streaming query                spark/<query id>             batch id         run id of the query
    foreachBatch, to a topic         spark/<query id>/<topic>     batch id         run id of the query
    options txnAppId + txnVersion    <txnAppId>/<topic>           txnVersion       –
    any other batch job              spark/job/<random>           0                –

`txnAppId` alone takes the place of `spark/<query id>`, as `<txnAppId>/<topic>`, in a stream and in foreachBatch. `<topic>` is the option
`topic`; a write whose topics come from a column has no such part. A query keeps its id in its checkpoint, so a batch that Spark runs
again comes with the same application and version; the run is new at each start, and a broker that has seen it refuses the runs
before it.

Two writes of one foreachBatch call to the same topic would have one name, and the second would be taken for a replay of the first. So a
run leaves a mark of its own behind each such write, and one that finds the mark already there is refused (`Version.mark`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from headrace.errors import BrokerError, ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

RETRY_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts; the last one repeats. The client has tried a few times by itself before each."""
APP_BYTES_MAX: Final = 249
"""What the name of an application may have."""
KEPT_BYTES_MAX: Final = 32 << 20
"""What a task keeps of the rows it has sent, to send them again when the broker goes away and comes back."""

Answer = TypeVar("Answer")


class StageSize(Protocol):
    """What the broker has taken under a handle."""

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class StagingClient(Protocol):
    """What a task needs of `FlightClient`."""

    def stage(
        self, handle: str, batches: Iterable[pa.RecordBatch], *, topic: str | None, writer: str, epoch: str = "", order: int = 0
    ) -> StageSize: ...
    def drop(self, handles: Sequence[str]) -> int: ...


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where in Spark a task runs. Outside of a streaming query `query` and `run` are empty and `batch` is None."""

    query: str
    run: str
    batch: int | None
    partition: int
    attempt: int
    """No two attempts of a Spark application share it."""

    @classmethod
    def here(cls) -> TaskPlace:
        """Of the task that runs this code. The names of the properties are those that Spark itself sets for each batch of a query."""
        from pyspark import TaskContext

        task = TaskContext.get()
        if task is None:
            raise ConfigError("this is not a Spark task")
        query, batch = (task.getLocalProperty(name) or "" for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        in_query = bool(query and batch)
        return cls(
            query=query if in_query else "",
            run=_run(task.getLocalProperty) if in_query else "",
            batch=int(batch) if in_query else None,
            partition=task.partitionId(),
            attempt=task.taskAttemptId(),
        )


def _run(get_property: Callable[[str], str | None]) -> str:
    """Up to Spark 4.2 a run is told only by the name of the job group. A user may set another in foreachBatch, that is the same in
    every run: a name that is no UUID says nothing."""
    named = get_property("sql.streaming.runId") or get_property("spark.jobGroup.id") or ""
    return named if _UUID.fullmatch(named) else ""


JOB: Final = "spark/job/"
JOB_REMEMBERED_MS: Final = 24 * 3600 * 1000
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Version:
    """What the broker knows a write by: the same for every attempt at it, and for nothing else."""

    writer: str
    version: int
    run: str = ""

    @property
    def remember_ms(self) -> int:
        """A job with a random name comes back only to ask again what became of its one write; 0: the others may come back any time."""
        return JOB_REMEMBERED_MS if self.writer.startswith(JOB) else 0

    @property
    def mark(self) -> str:
        """The application under which a run notes that it has written this, in a foreachBatch; see the top of this page."""
        return f"spark/mark/{_digest(self.writer)}/{_digest(self.run)}"


@dataclass(frozen=True, slots=True)
class Versions:
    """How a writer names what it writes; see the table above."""

    topic: str
    writer: str = ""
    """The option `txnAppId`."""
    version: int | None = None
    """The option `txnVersion`."""
    job: str = ""
    """A random name, the same in all tasks of a batch write."""

    def of_stream(self, task: TaskPlace) -> Version:
        if task.batch is None or not task.query or not task.run:
            raise ConfigError("Spark has not told this task its query and batch, without which it cannot be written exactly once")
        return Version(self._named() or f"spark/{task.query}", task.batch, task.run)

    def of_batch(self, task: TaskPlace) -> Version:
        if self.version is not None:
            return Version(self._named(), self.version)
        if task.batch is not None:
            return Version(self._named() or self._scoped(f"spark/{task.query}"), task.batch, task.run)
        if self.writer:
            raise ConfigError(
                "outside of foreachBatch the option 'txnAppId' needs 'txnVersion' beside it: a number that grows with each write"
            )
        return Version(JOB + self.job, 0)

    def _named(self) -> str:
        return self._scoped(self.writer) if self.writer else ""

    def _scoped(self, writer: str) -> str:
        """A long name of a topic is replaced by its digest: it has to be the same each time, not to be read."""
        if not self.topic:
            return writer
        named = f"{writer}/{self.topic}"
        return named if len(named.encode()) <= APP_BYTES_MAX else f"{writer}/{_digest(self.topic)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def patiently(ask: Callable[[], Answer], *, until: float) -> Answer:
    """Ask again while the broker is away, until that time of the monotonic clock. Only for what may be asked twice."""
    for pause in _pauses():
        try:
            return ask()
        except BrokerError as failure:
            if not failure.retriable or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
    raise AssertionError("the pauses have no end")


def _pauses() -> Iterator[float]:
    yield from RETRY_SECONDS
    while True:
        yield RETRY_SECONDS[-1]


class Replay:
    """Batches on their way out, from the first again for each iteration, as long as they have been few."""

    def __init__(self, batches: Iterable[pa.RecordBatch], *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._rest = iter(batches)
        self._kept: list[pa.RecordBatch] = []
        self._room = bytes_max
        self.whole = True
        """Nothing has been forgotten, so the rows can be sent again."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        assert self.whole, "part of the rows is gone"
        yield from self._kept
        for batch in self._rest:
            self._keep(batch)
            yield batch

    def _keep(self, batch: pa.RecordBatch) -> None:
        self._room -= batch.nbytes
        if self._room >= 0:
            self._kept.append(batch)
        else:
            self.whole = False
            self._kept.clear()


def stage(
    client: StagingClient,
    handle: str,
    batches: Iterable[pa.RecordBatch],
    *,
    topic: str,
    edition: Version,
    order: int,
    until: float,
) -> tuple[str, StageSize]:
    """The handle under which the rows were staged, and what the broker counted.

    A broker that has restarted knows nothing of a handle that was being filled: each attempt takes a new one, because rows of
    the old one may still be under way.
    """
    replay = Replay(batches)
    for attempt, pause in enumerate(_pauses()):
        named = f"{handle}.{attempt}" if attempt else handle
        try:
            return named, client.stage(named, replay, topic=topic or None, writer=edition.writer, epoch=edition.run, order=order)
        except BaseException as failure:
            drop(client, [named])
            transient = isinstance(failure, BrokerError) and failure.retriable
            if not transient or not replay.whole or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
    raise AssertionError("the pauses have no end")


def drop(client: StagingClient, handles: Sequence[str]) -> None:
    """At once if the broker is there; otherwise they go when their time is over."""
    try:
        client.drop(handles)
    except BrokerError:
        pass
