"""Writing to topics: what `df.write.format("headrace")` and `df.writeStream.format("headrace")` come to.

    driver   writer() or streamWriter(): options and schema are checked, the topic is there    before any task
    task     write(rows): stage them under a handle of this attempt, seal it, report it        nobody sees anything
    driver   commit(reports): publish the handles as one transaction                           all rows are there, at once
             abort(reports): drop them                                                          none ever was

All of it may happen again: Spark runs tasks twice and batches again, the broker restarts. `publishing.py` says by which names the
broker recognises what it has already. Writers are pickled to the tasks and back, so they hold plain values and connect where they run.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.errors import ConfigError, InvalidRequest, UnknownStage
from headrace.flight.client import Publication, Servers
from headrace.spark import publishing
from headrace.spark.connection import connect
from headrace.spark.publishing import TaskPlace, Version, Versions, patiently
from headrace.spark.sink_columns import SinkColumns
from headrace.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

CHECK_SECONDS_MAX: Final = 15.0
"""How long the driver looks for the broker before it says that nobody answers: a user waits for it."""
SENT_BYTES_MAX: Final = 16 << 20
"""About what one message to the broker holds, unless a single row is larger."""
TOPIC_SECONDS_MAX: Final = 10.0
"""How long a topic that was there is taken to be there."""

_log = logging.getLogger("headrace.spark")
_seen_topics: dict[tuple[Servers, str], float] = {}


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """For `df.write`. Raises `ConfigError` for what cannot be written, before any task."""
    if overwrite:
        raise ConfigError("a topic cannot be overwritten, its records are only ever added to: use mode('append')")
    return BatchSink(Outlet.of(SinkOptions.of(options), schema, job=uuid.uuid4().hex))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """For `df.writeStream`; Spark makes a new one for each batch, on both sides of the tasks."""
    if overwrite:
        raise ConfigError("a topic cannot be overwritten, as output mode 'complete' does with each batch: use 'append', or foreachBatch")
    chosen = SinkOptions.of(options)
    if chosen.version is not None:
        raise ConfigError("the option 'txnVersion' is for batch writes: the version of a stream is the id of its batch")
    return StreamSink(Outlet.of(chosen, schema))


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver. Without rows there is no handle."""

    edition: Version
    handle: str
    records: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Outlet:
    """What both writers share: where rows go to, and the three steps of their way."""

    servers: Servers
    topic: str
    """Empty: each row says."""
    columns: SinkColumns
    editions: Versions
    patience_seconds: float

    @classmethod
    def of(cls, options: SinkOptions, schema: StructType, *, job: str = "") -> Outlet:
        columns = SinkColumns.of(schema, topic=options.topic, headers=options.headers)
        if options.topic:
            ensure_topic(options.servers, options.topic, until=time.monotonic() + min(CHECK_SECONDS_MAX, options.patience_seconds))
        editions = Versions(topic=options.topic, writer=options.writer, version=options.version, job=job)
        return cls(options.servers, options.topic, columns, editions, options.patience_seconds)

    def stage(self, task: TaskPlace, edition: Version, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Under a handle that no other attempt of this or any other task has. `order` is what makes a replay write the same log."""
        first = next((batch for batch in rows if batch.num_rows), None)
        if first is None:
            return Staged(edition, "", 0, 0)
        handle = f"{task.query or self.editions.job}/{task.run}/{edition.version}/{task.partition}/{task.attempt}"
        handle, size = publishing.stage(
            connect(self.servers),
            handle,
            self._shaped(chain((first,), rows)),
            topic=self.topic,
            edition=edition,
            order=task.partition,
            until=self._deadline(),
        )
        return Staged(edition, handle, size.records, size.size_bytes)

    def _shaped(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in rows:
            if not batch.num_rows:
                continue
            shaped = self.columns.shape(batch)
            if not self.topic:
                for topic in shaped.column("topic").unique().to_pylist():
                    ensure_topic(self.servers, topic, until=self._deadline())
            yield from _cut(shaped)

    def publish(self, messages: Sequence[Staged]) -> Publication:
        """One transaction. The broker may restart while it is asked: what it has published it does not publish again."""
        edition = _common_edition(messages)
        handles = [message.handle for message in messages if message.handle]
        client = connect(self.servers)
        ask = partial(client.publish, edition.writer, edition.version, handles, epoch=edition.run, remember_ms=edition.remember_ms)
        try:
            published = patiently(ask, until=self._deadline())
        except UnknownStage as failure:
            failure.add_note(
                "The broker has restarted since these rows were staged, or they have waited for too long. Nothing of this write is "
                "visible; a streaming query writes it when it is started again."
            )
            raise
        if published.already and handles:
            rows = sum(message.records for message in messages)
            _log.warning("version %d of %s was published before: its %d rows are not written again", edition.version, edition.writer, rows)
        return published

    def publish_marked(self, messages: Sequence[Staged]) -> Publication:
        """The same inside a foreachBatch, where two writes may have one name. Raises `InvalidRequest` for the second."""
        edition, client = _common_edition(messages), connect(self.servers)
        last = patiently(partial(client.last_version, edition.mark), until=self._deadline())
        if last is not None and last >= edition.version:
            raise InvalidRequest(self._second_write(edition))
        published = self.publish(messages)
        marked = patiently(partial(client.publish, edition.mark, edition.version, ()), until=self._deadline())
        if marked.already:
            raise InvalidRequest(self._second_write(edition))
        return published

    def _second_write(self, edition: Version) -> str:
        where = f"topic '{self.topic}'" if self.topic else "the topics of column 'topic'"
        return (
            f"batch {edition.version} is written to {where} for the second time in one call of foreachBatch. After a crash the two could "
            "not be told apart: give each of them a name of its own with the option txnAppId"
        )

    def drop(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Best effort: what is left behind is seen by nobody, and goes when its time is over. The same holds for tasks that still run."""
        handles = [message.handle for message in messages if isinstance(message, Staged) and message.handle]
        if handles:
            publishing.drop(connect(self.servers), handles)

    def _deadline(self) -> float:
        return time.monotonic() + self.patience_seconds


class StreamSink(DataSourceStreamArrowWriter):
    """Each batch of a query is one transaction, published once however often Spark runs it."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskPlace.here()
        return self.outlet.stage(task, self.outlet.editions.of_stream(task), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        staged = _reports(messages)
        if not staged:
            # Without a task nobody knows the id of the query. Nothing is lost: versions have to grow, not to be dense.
            return
        if any(report.edition.version != batchId for report in staged):
            raise InvalidRequest(f"Spark commits batch {batchId}, which is not what the tasks have written: {staged[0].edition}")
        self.outlet.publish(staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.outlet.drop(messages)


class BatchSink(DataSourceArrowWriter):
    """All rows or none. In foreachBatch, or with `txnAppId` and `txnVersion`, also not twice."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskPlace.here()
        return self.outlet.stage(task, self.outlet.editions.of_batch(task), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        staged = _reports(messages)
        if staged and staged[0].edition.run:
            self.outlet.publish_marked(staged)
        elif staged:
            self.outlet.publish(staged)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.outlet.drop(messages)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch of Spark's may hold gigabytes, and one of the Flight endpoint is held in memory whole. Slices are no copies."""
    rows = max(1, batch.num_rows * SENT_BYTES_MAX // max(SENT_BYTES_MAX, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise InvalidRequest(f"{len(messages) - len(staged)} of {len(messages)} tasks have not said what they wrote")
    return staged


def _common_edition(staged: Sequence[Staged]) -> Version:
    editions = {message.edition for message in staged}
    if len(editions) != 1:
        raise InvalidRequest(f"the tasks of one write disagree about what they wrote: {sorted(map(str, editions))}")
    return editions.pop()


def ensure_topic(servers: Servers, topic: str, *, until: float) -> None:
    """The topic is there, or the broker makes it; else `UnknownTopic`. What was there a moment ago is not asked for again."""
    now = time.monotonic()
    if now - _seen_topics.get((servers, topic), -TOPIC_SECONDS_MAX) < TOPIC_SECONDS_MAX:
        return
    patiently(partial(connect(servers).ensure_topic, topic), until=until)
    _seen_topics[servers, topic] = now
