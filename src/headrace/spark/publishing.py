"""Exactly-once writes: their writers and versions, and staging with retries.

Spark may run a task twice, and a whole batch again after a crash. Each attempt of a task stages its rows under its own handle, where no
consumer sees them. The driver then publishes the handles of the successful attempts as one transaction under a writer and a version. The
broker remembers the last version of each writer and accepts no version twice.

    written by                       writer                       version          epoch                  = `Write`
    a streaming query                spark/<query id>             batch id         run id of the query
    foreachBatch, to a topic         spark/<query id>/<topic>     batch id         run id of the query
    options txnAppId + txnVersion    <txnAppId>/<topic>           txnVersion       –
    any other batch job              spark/job/<random>           0                –

`txnAppId` alone replaces `spark/<query id>`, as `<txnAppId>/<topic>`, in a stream and in foreachBatch. `<topic>` is the option `topic`; a
write whose topics come from a column has no such part. A query keeps its id in its checkpoint, so a batch that Spark runs again has the
same writer and version. The epoch is new at each start, and the broker rejects older epochs once it has seen a newer one.

Two writes of one foreachBatch call to the same topic would have the same name, and the broker would take the second for a replay of the
first. So each such write is followed by a marker for its epoch, and a write that finds the marker fails (`Write.mark`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from headrace.errors import BrokerError, ConfigError
from headrace.flight.client import Servers
from headrace.retry import TIMEOUT_SECONDS
from headrace.spark.options import Options
from headrace.spark.retry import retry
from headrace.spark.servers import servers_of

if TYPE_CHECKING:
    import pyarrow as pa

WRITER_BYTES_MAX: Final = 249
"""Longest name of a writer."""
OPTION_BYTES_MAX: Final = 200
"""Longest `txnAppId`; the topic is appended to it."""
KEPT_BYTES_MAX: Final = 32 << 20
"""Size of the sent rows that a task keeps, to send them again after a restart of the broker."""


class StageSize(Protocol):
    """Size of the rows that the broker holds under a handle."""

    @property
    def records(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class StagingClient(Protocol):
    """The methods of `FlightClient` that a task uses."""

    def stage(
        self, handle: str, batches: Iterable[pa.RecordBatch], *, topic: str | None, writer: str, epoch: str = "", order: int = 0
    ) -> StageSize: ...
    def drop(self, handles: Sequence[str]) -> int: ...


@dataclass(frozen=True, slots=True)
class TaskId:
    """Identity of a Spark task. Outside a streaming query, `query` and `epoch` are empty and `batch` is None."""

    query: str
    epoch: str
    batch: int | None
    partition: int
    attempt: int
    """Unique within a Spark application."""

    @classmethod
    def current(cls) -> TaskId:
        """Return the identity of the running task, from the properties that Spark sets for each batch of a query."""
        from pyspark import TaskContext

        task = TaskContext.get()
        if task is None:
            raise ConfigError("no Spark task is running in this process")
        query, batch = (task.getLocalProperty(name) or "" for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        in_query = bool(query and batch)
        return cls(
            query=query if in_query else "",
            epoch=_epoch(task.getLocalProperty) if in_query else "",
            batch=int(batch) if in_query else None,
            partition=task.partitionId(),
            attempt=task.taskAttemptId(),
        )


def _epoch(get_property: Callable[[str], str | None]) -> str:
    """Return the run id of the query. Up to Spark 4.2 only the name of the job group carries it, and foreachBatch code may set another
    name there, which is the same in every execution: a name that is not a UUID is ignored."""
    named = get_property("sql.streaming.runId") or get_property("spark.jobGroup.id") or ""
    return named if _UUID.fullmatch(named) else ""


JOB: Final = "spark/job/"
JOB_REMEMBERED_MS: Final = 24 * 3600 * 1000
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Write:
    """Identity of a write at the broker: the same for every attempt at this write, and unique to it."""

    writer: str
    version: int
    epoch: str = ""

    @property
    def remember_ms(self) -> int:
        """Retention of the version at the broker. A job with a random name only retries its one write; 0 means no limit."""
        return JOB_REMEMBERED_MS if self.writer.startswith(JOB) else 0

    @property
    def mark(self) -> str:
        """The writer name of the marker for a write in foreachBatch; see the module docstring."""
        return f"spark/mark/{_digest(self.writer)}/{_digest(self.epoch)}"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Parsed options of a sink, and the writes they stand for. `of` raises `ConfigError` with the name of a wrong option."""

    servers: Servers
    topic: str = ""
    """Empty: each row has a column `topic`."""
    headers: bool = True
    """Whether to write the column `headers`, as Spark's Kafka sink does by default; `includeHeaders=false` omits it."""
    writer: str = ""
    """The option `txnAppId`."""
    version: int | None = None
    """The option `txnVersion`."""
    timeout_seconds: float = TIMEOUT_SECONDS

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SinkOptions:
        options = Options(given)
        writer, version = options.text("txnAppId"), options.count("txnVersion", None, least=0)
        if version is not None and not writer:
            raise ConfigError("option txnVersion needs txnAppId too: set the name of the writer")
        if len(writer.encode()) > OPTION_BYTES_MAX:
            raise ConfigError(f"option txnAppId has {len(writer.encode())} bytes, at most {OPTION_BYTES_MAX} are allowed")
        return cls(
            servers=servers_of(options),
            topic=options.text("topic"),
            headers=options.flag("includeHeaders", True),
            writer=writer,
            version=version,
            timeout_seconds=options.duration_ms("kafka.delivery.timeout.ms", int(TIMEOUT_SECONDS * 1000)) / 1000,
        )

    def stream_write(self, task: TaskId) -> Write:
        if task.batch is None or not task.query or not task.epoch:
            raise ConfigError("Spark has not passed the query id, run id and batch id to this task; exactly-once writes need all three")
        return Write(self._named() or f"spark/{task.query}", task.batch, task.epoch)

    def batch_write(self, task: TaskId, job: str) -> Write:
        """Return the write of a batch job. `job` is a random name, the same in all of its tasks."""
        if self.version is not None:
            return Write(self._named(), self.version)
        if task.batch is not None:
            return Write(self._named() or self._scoped(f"spark/{task.query}"), task.batch, task.epoch)
        if self.writer:
            raise ConfigError("outside foreachBatch the option 'txnAppId' needs 'txnVersion' too: a number that grows with each write")
        return Write(JOB + job, 0)

    def _named(self) -> str:
        return self._scoped(self.writer) if self.writer else ""

    def _scoped(self, writer: str) -> str:
        """Append the topic; a digest replaces a topic name that is too long."""
        if not self.topic:
            return writer
        named = f"{writer}/{self.topic}"
        return named if len(named.encode()) <= WRITER_BYTES_MAX else f"{writer}/{_digest(self.topic)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Replay:
    """Iterable of record batches that starts again from the first one, while the batches sent so far fit in `bytes_max`."""

    def __init__(self, batches: Iterable[pa.RecordBatch], *, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._rest = iter(batches)
        self._kept: list[pa.RecordBatch] = []
        self._room = bytes_max
        self.whole = True
        """Whether all sent rows are kept and can be sent again."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        assert self.whole, "all sent rows are kept"
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
    write: Write,
    order: int,
    until: float,
) -> tuple[str, StageSize]:
    """Stage the rows; return their handle and the size that the broker counted.

    A restarted broker does not know a handle that was being filled. Each attempt uses a new handle, because rows of the old one may still
    be in flight.
    """
    replay, attempts = Replay(batches), count()

    def request() -> tuple[str, StageSize]:
        attempt = next(attempts)
        named = f"{handle}.{attempt}" if attempt else handle
        try:
            return named, client.stage(named, replay, topic=topic or None, writer=write.writer, epoch=write.epoch, order=order)
        except BaseException:
            drop(client, [named])
            raise

    return retry(request, give_up=lambda _, pause: not replay.whole or time.monotonic() + pause > until)


def drop(client: StagingClient, handles: Sequence[str]) -> None:
    """Drop staged rows. The broker expires those it cannot drop now."""
    try:
        client.drop(handles)
    except BrokerError:
        pass
