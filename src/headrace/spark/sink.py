"""Sinks for `df.write.format("headrace")` and `df.writeStream.format("headrace")`.

    driver   writer() or streamWriter(): check the options, the schema and the topic           before any task
    task     write(rows): stage the rows under a handle of this attempt, report the handle     no row is visible
    driver   commit(reports): publish the handles as one transaction                           all rows become visible
             abort(reports): drop them                                                         no row becomes visible

Every step may be repeated: Spark repeats tasks and batches, the broker restarts. `publishing.py` defines the writer and version by which
the broker recognises a repeated write. Spark pickles sinks to the tasks and back, so they hold plain values and connect in the process
that uses them.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, Self

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.errors import ConfigError, InvalidRequest, UnknownStage
from headrace.flight.client import Publication, Servers
from headrace.spark import publishing
from headrace.spark.connection import connect
from headrace.spark.publishing import SinkOptions, TaskId, Write
from headrace.spark.retry import retry_until
from headrace.spark.sink_columns import SinkColumns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

CHECK_SECONDS_MAX: Final = 15.0
"""Time limit for the driver to reach the broker before the query starts: a user is waiting."""
SENT_BYTES_MAX: Final = 16 << 20
"""Approximate size of one message to the broker; a single row may be larger."""
TOPIC_SECONDS_MAX: Final = 10.0
"""Time before the existence of a topic is checked again."""

_log = logging.getLogger("headrace.spark")
_seen_topics: dict[tuple[Servers, str], float] = {}


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Return the writer for `df.write`. Raises `ConfigError` before any task starts."""
    if overwrite:
        raise ConfigError("a topic cannot be overwritten: use mode('append')")
    return BatchSink.of(SinkOptions.of(options), schema)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """Return the writer for `df.writeStream`. Spark creates a new one for each batch, in the driver and in the tasks."""
    if overwrite:
        raise ConfigError("a topic cannot be overwritten, which output mode 'complete' does with each batch: use 'append', or foreachBatch")
    chosen = SinkOptions.of(options)
    if chosen.version is not None:
        raise ConfigError("the option 'txnVersion' is for batch writes: the version of a stream is the id of its batch")
    return StreamSink.of(chosen, schema)


@dataclass(frozen=True, slots=True)
class Staged(WriterCommitMessage):
    """Report of a task to the driver. A task without rows has an empty handle."""

    write: Write
    handle: str
    records: int
    size_bytes: int


@dataclass(frozen=True)
class Sink:
    """The steps that both sinks share: stage, publish, drop."""

    options: SinkOptions
    columns: SinkColumns
    job: str
    """A random name, the same in all tasks of this write."""

    @classmethod
    def of(cls, options: SinkOptions, schema: StructType) -> Self:
        """Check the schema and the topic. Raises `ConfigError`, `UnknownTopic`."""
        columns = SinkColumns.of(schema, topic=options.topic, headers=options.headers)
        if options.topic:
            ensure_topic(options.servers, options.topic, until=time.monotonic() + min(CHECK_SECONDS_MAX, options.timeout_seconds))
        return cls(options, columns, uuid.uuid4().hex)

    def stage(self, task: TaskId, write: Write, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Stage rows under a handle unique to this attempt. `order` makes a replay publish the rows in the same order."""
        first = next((batch for batch in rows if batch.num_rows), None)
        if first is None:
            return Staged(write, "", 0, 0)
        handle = f"{task.query or self.job}/{task.epoch}/{write.version}/{task.partition}/{task.attempt}"
        handle, size = publishing.stage(
            connect(self.options.servers),
            handle,
            self._shaped(chain((first,), rows)),
            topic=self.options.topic,
            write=write,
            order=task.partition,
            until=self._deadline(),
        )
        return Staged(write, handle, size.records, size.size_bytes)

    def _shaped(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in rows:
            if not batch.num_rows:
                continue
            shaped = self.columns.shape(batch)
            if not self.options.topic:
                for topic in shaped.column("topic").unique().to_pylist():
                    ensure_topic(self.options.servers, topic, until=self._deadline())
            yield from _cut(shaped)

    def publish(self, messages: Sequence[Staged]) -> Publication:
        """Publish all handles in one transaction. The broker ignores a version that it has published."""
        write = _common_write(messages)
        handles = [message.handle for message in messages if message.handle]
        client = connect(self.options.servers)
        request = partial(client.publish, write.writer, write.version, handles, epoch=write.epoch, remember_ms=write.remember_ms)
        try:
            published = retry_until(request, until=self._deadline())
        except UnknownStage as failure:
            failure.add_note(
                "The broker has restarted since these rows were staged, or the staged rows have expired. No row of this write is "
                "visible; a streaming query writes the rows again when it restarts."
            )
            raise
        if published.already and handles:
            rows = sum(message.records for message in messages)
            _log.warning("version %d of %s was published before: its %d rows are not written again", write.version, write.writer, rows)
        return published

    def publish_marked(self, messages: Sequence[Staged]) -> Publication:
        """Publish inside foreachBatch, where two writes may have the same name. Raises `InvalidRequest` for the second."""
        write, client = _common_write(messages), connect(self.options.servers)
        last = retry_until(partial(client.last_version, write.mark), until=self._deadline())
        if last is not None and last >= write.version:
            raise InvalidRequest(self._second_write(write))
        published = self.publish(messages)
        marked = retry_until(partial(client.publish, write.mark, write.version, ()), until=self._deadline())
        if marked.already:
            raise InvalidRequest(self._second_write(write))
        return published

    def _second_write(self, write: Write) -> str:
        where = f"topic '{self.options.topic}'" if self.options.topic else "the topics of column 'topic'"
        return (
            f"batch {write.version} is written to {where} for the second time in one call of foreachBatch. The broker cannot distinguish "
            "the two writes after a crash: give each a different name with the option txnAppId"
        )

    def drop(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop the staged rows. Rows that remain, and rows of tasks that still run, stay invisible and expire."""
        handles = [message.handle for message in messages if isinstance(message, Staged) and message.handle]
        if handles:
            publishing.drop(connect(self.options.servers), handles)

    def _deadline(self) -> float:
        return time.monotonic() + self.options.timeout_seconds


class StreamSink(Sink, DataSourceStreamArrowWriter):
    """Sink of a stream. Each batch is one transaction, published once however often Spark runs the batch."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskId.current()
        return self.stage(task, self.options.stream_write(task), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        staged = _reports(messages)
        if not staged:
            # Only a task knows the id of the query. Versions may skip numbers.
            return
        if any(report.write.version != batchId for report in staged):
            raise InvalidRequest(f"Spark commits batch {batchId}, but the tasks have written {staged[0].write}")
        self.publish(staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.drop(messages)


class BatchSink(Sink, DataSourceArrowWriter):
    """Sink of a batch job: all rows or none. In foreachBatch, or with `txnAppId` and `txnVersion`, also exactly once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        task = TaskId.current()
        return self.stage(task, self.options.batch_write(task, self.job), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        staged = _reports(messages)
        if staged and staged[0].write.epoch:
            self.publish_marked(staged)
        elif staged:
            self.publish(staged)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.drop(messages)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slice a batch without copying: Spark's may hold gigabytes, and the Flight endpoint holds a whole batch in memory."""
    rows = max(1, batch.num_rows * SENT_BYTES_MAX // max(SENT_BYTES_MAX, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    staged = [message for message in messages if isinstance(message, Staged)]
    if len(staged) != len(messages):
        raise InvalidRequest(f"{len(messages) - len(staged)} of {len(messages)} tasks have sent no report to the driver")
    return staged


def _common_write(staged: Sequence[Staged]) -> Write:
    writes = {message.write for message in staged}
    if len(writes) != 1:
        raise InvalidRequest(f"the tasks of one write have different versions: {sorted(map(str, writes))}")
    return writes.pop()


def ensure_topic(servers: Servers, topic: str, *, until: float) -> None:
    """Check that the topic exists or that the broker creates it. Raises `UnknownTopic`. A recent result is reused."""
    now = time.monotonic()
    if now - _seen_topics.get((servers, topic), -TOPIC_SECONDS_MAX) < TOPIC_SECONDS_MAX:
        return
    retry_until(partial(connect(servers).ensure_topic, topic), until=until)
    _seen_topics[servers, topic] = now
