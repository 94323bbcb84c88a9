"""The writers without Spark: errors, pickling, replays."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import IntegerType, StructType

from headrace.errors import ConfigError, InvalidRequest, StaleEpoch, Unavailable, UnknownStage, UnknownTopic
from headrace.spark import retry, sink
from headrace.spark.publishing import TaskId
from headrace.spark.sink import Staged, StreamSink, batch_writer, stream_writer
from tests.spark.sink.fakes import EPOCH, QUERY, SCHEMA, VALUES, FakeBroker, rows, task

SERVERS = {"kafka.bootstrap.servers": "127.0.0.1:1"}
ORDERS = {**SERVERS, "topic": "orders"}
Place = Callable[[TaskId], None]
T = TypeVar("T")
_attempts = itertools.count(100)


def sink_batch(**columns: list[str | int | None]) -> pa.RecordBatch:
    kinds = {"key": pa.string(), "value": pa.string(), "topic": pa.string(), "partition": pa.int32()}
    return pa.RecordBatch.from_pydict({name: pa.array(column, kinds[name]) for name, column in columns.items()})


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    standing_in = FakeBroker()
    monkeypatch.setattr(sink, "connect", lambda servers: standing_in)
    monkeypatch.setattr(sink, "_seen_topics", {})
    monkeypatch.setattr(sink, "CHECK_SECONDS_MAX", 0.5)
    monkeypatch.setattr(retry, "exponential", lambda **_: lambda failures: 0.001)
    return standing_in


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Set the identity of the current task."""
    return lambda place: monkeypatch.setattr(TaskId, "current", lambda: place)


def pickled(sent: T) -> T:
    """Pickle and unpickle: Spark pickles writers with cloudpickle, and messages with pickle."""
    arrived: T = pickle.loads(cloudpickle.dumps(sent))  # type: ignore[no-untyped-call]  # Spark's copy has no types
    return arrived


def stream(
    at: Place, *partitions: str, batch: int, epoch: str = EPOCH, attempt: int | None = None, **options: str
) -> tuple[StreamSink, list[WriterCommitMessage | None]]:
    """Stage one row in each task like Spark, with an unpickled writer created for this batch."""
    writer = stream_writer({**ORDERS, **options}, VALUES, False)
    messages: list[WriterCommitMessage | None] = []
    for number, value in enumerate(partitions):
        at(task(batch=batch, partition=number, attempt=next(_attempts) if attempt is None else attempt, epoch=epoch))
        message = pickled(writer).write(iter([rows(value.encode())]))
        messages.append(pickled(message))
    return stream_writer({**ORDERS, **options}, VALUES, False), messages


def test_overwriting_is_rejected_with_a_message_for_each_kind_of_write(broker: FakeBroker) -> None:
    with pytest.raises(ConfigError, match="mode\\('append'\\)"):
        batch_writer(ORDERS, VALUES, True)
    with pytest.raises(ConfigError, match="output mode 'complete'"):
        stream_writer(ORDERS, VALUES, True)
    assert broker.calls == []


def test_a_wrong_schema_is_rejected_before_any_request(broker: FakeBroker) -> None:
    with pytest.raises(ConfigError, match="column 'value' has type int"):
        batch_writer(ORDERS, StructType().add("value", IntegerType()), False)
    assert broker.calls == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"txnVersion": "1"}, "txnVersion needs txnAppId"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion: expected a number of at least 0"),
        ({"txnAppId": "x" * 201}, "txnAppId has 201 bytes"),
        ({"includeHeaders": "perhaps"}, "includeHeaders: expected true or false"),
        ({"kafka.delivery.timeout.ms": "soon"}, "kafka.delivery.timeout.ms: expected a duration"),
        ({"topik": "orders"}, "did you mean topic"),
    ],
)
def test_a_wrong_option_is_rejected_by_its_name(broker: FakeBroker, options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        batch_writer({**ORDERS, **options}, VALUES, False)


def test_the_version_of_a_stream_is_not_for_the_user_to_say(broker: FakeBroker) -> None:
    with pytest.raises(ConfigError, match="txnVersion"):
        stream_writer({**ORDERS, "txnAppId": "a", "txnVersion": "1"}, VALUES, False)


def test_an_unknown_topic_is_rejected_on_the_driver_unless_the_broker_makes_it(broker: FakeBroker) -> None:
    with pytest.raises(UnknownTopic, match="'new' not found"):
        batch_writer({**SERVERS, "topic": "new"}, VALUES, False)
    broker.auto_create = True
    batch_writer({**SERVERS, "topic": "new"}, VALUES, False)
    assert "new" in broker.topics


def test_a_topic_that_was_there_a_moment_ago_is_not_checked_again(broker: FakeBroker) -> None:
    for _ in range(3):
        stream_writer(ORDERS, VALUES, False)
    assert broker.calls == ["ensure_topic"]


def test_a_broker_that_does_not_answer_is_an_error_on_the_driver(broker: FakeBroker) -> None:
    broker.trouble = ["ensure_topic"] * 10_000
    with pytest.raises(Unavailable):
        batch_writer(ORDERS, VALUES, False)


def test_rows_are_in_the_order_of_partitions_however_the_tasks_finish(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", "b", "c", batch=0)
    writer.commit(messages[::-1], 0)
    assert broker.values == [b"a", b"b", b"c"]


def test_nothing_is_seen_before_the_commit(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", "b", batch=0)
    assert broker.values == [] and len(broker.staged) == 2
    writer.commit(messages, 0)
    assert broker.values == [b"a", b"b"] and not broker.staged
    assert broker.versions == {f"spark/{QUERY}": 0}


def test_a_message_says_whose_rows_it_stands_for(broker: FakeBroker, at: Place) -> None:
    _, (message,) = stream(at, "a", batch=5, attempt=17)
    assert isinstance(message, Staged)
    assert (message.write.writer, message.write.version, message.write.epoch) == (f"spark/{QUERY}", 5, EPOCH)
    assert message.handle == f"{QUERY}/{EPOCH}/5/0/17" and message.records == 1


def test_a_replayed_batch_is_skipped_and_logged(broker: FakeBroker, at: Place, caplog: pytest.LogCaptureFixture) -> None:
    for epoch in (EPOCH, EPOCH.replace("2", "3")):
        writer, messages = stream(at, "a", "b", batch=0, epoch=epoch)
        with caplog.at_level(logging.WARNING):
            writer.commit(messages, 0)
    assert broker.values == [b"a", b"b"] and not broker.staged
    assert [record.getMessage() for record in caplog.records] == [
        f"version 0 of spark/{QUERY} was published before: its 2 rows are not written again"
    ]


@pytest.mark.parametrize("trouble", [["publish"], ["publish!"], ["publish", "publish!"], ["publish!", "publish"]])
def test_a_broker_that_restarts_during_the_commit_publishes_once(broker: FakeBroker, at: Place, trouble: list[str]) -> None:
    writer, messages = stream(at, "a", batch=0)
    broker.trouble = trouble
    writer.commit(messages, 0)
    assert broker.values == [b"a"] and broker.trouble == []


def test_a_broker_that_has_lost_the_stages_fails_the_batch_whole(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", "b", batch=0)
    broker.restart()
    with pytest.raises(UnknownStage) as failure:
        writer.commit(messages, 0)
    assert "No row of this write is visible" in failure.value.__notes__[0]
    assert broker.values == [] and broker.versions == {}


def test_a_driver_that_was_superseded_cannot_publish(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", batch=0)
    broker.stale.add(EPOCH)
    with pytest.raises(StaleEpoch):
        writer.commit(messages, 0)
    assert broker.values == []


def test_an_aborted_batch_leaves_nothing_and_its_late_writers_are_fenced(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", batch=0, attempt=7)
    writer.abort([*messages, None], 0)
    assert broker.staged == {} and broker.values == []
    with pytest.raises(UnknownStage):
        stream(at, "a", batch=0, attempt=7)  # the same attempt of the same task, still running


def test_aborting_without_a_broker_is_no_error(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", batch=0)
    broker.trouble = ["drop"]
    writer.abort(messages, 0)
    assert broker.values == []


def test_a_task_without_rows_stages_nothing_and_its_batch_counts(broker: FakeBroker, at: Place) -> None:
    writer = stream_writer(ORDERS, VALUES, False)
    at(task(batch=3))
    message = writer.write(iter([rows().cast(rows(b"").schema)]))
    assert (message.handle, message.records) == ("", 0) and broker.staged == {}
    writer.commit([message], 3)
    assert broker.versions == {f"spark/{QUERY}": 3}


def test_large_batches_are_cut_and_keep_their_order(broker: FakeBroker, at: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "SENT_BYTES_MAX", 1000)
    many = [f"{number:04}".encode() * 25 for number in range(100)]
    huge = [b"x" * 5000]
    at(task(batch=0))
    writer = stream_writer(ORDERS, VALUES, False)
    writer.commit([writer.write(iter([rows(*many), rows(*huge)]))], 0)
    assert broker.values == many + huge
    assert broker.calls.count("batch") == 13  # nine rows of 100 bytes, with their offsets, fit into 1000


def test_a_batch_without_tasks_is_committed_in_silence(broker: FakeBroker) -> None:
    stream_writer(ORDERS, VALUES, False).commit([], 3)
    assert broker.versions == {}


def test_messages_that_do_not_belong_together_are_rejected(broker: FakeBroker, at: Place) -> None:
    writer, messages = stream(at, "a", batch=0)
    with pytest.raises(InvalidRequest, match="Spark commits batch 1"):
        writer.commit(messages, 1)
    with pytest.raises(InvalidRequest, match="1 of 2 tasks"):
        writer.commit([*messages, None], 0)
    _, others = stream(at, "b", batch=0, txnAppId="other")
    with pytest.raises(InvalidRequest, match="different versions"):
        writer.commit([*messages, *others], 0)
    assert broker.values == []


def test_topics_of_a_column_are_made_where_the_broker_allows_it(broker: FakeBroker, at: Place) -> None:
    broker.auto_create = True
    at(task(batch=0))
    writer = stream_writer(SERVERS, SCHEMA, False)
    message = writer.write(iter([sink_batch(key=["k", None], value=["x", None], topic=["new", "orders"], partition=[None, 0])]))
    writer.commit([message], 0)
    assert broker.topics == {"orders", "new"}
    assert broker.log == [
        {"topic": "new", "key": b"k", "value": b"x", "partition": None},
        {"topic": "orders", "key": None, "value": None, "partition": 0},
    ]


def test_an_unknown_topic_of_a_column_fails_the_task_by_its_name(broker: FakeBroker, at: Place) -> None:
    at(task(batch=0))
    with pytest.raises(UnknownTopic, match="'new'"):
        stream_writer(SERVERS, SCHEMA, False).write(iter([sink_batch(key=["k"], value=["x"], topic=["new"], partition=[None])]))
    assert broker.staged == {}


def batch(at: Place, value: str, *, number: int | None = None, epoch: str = EPOCH, **options: str) -> None:
    """Run a batch write with one task, and the commit in another process."""
    writer = batch_writer({**ORDERS, **options}, VALUES, False)
    at(task(batch=number, epoch=epoch, attempt=next(_attempts)))
    message = pickled(writer).write(iter([rows(value.encode())]))
    pickled(writer).commit([pickled(message)])


def test_each_plain_batch_write_counts(broker: FakeBroker, at: Place) -> None:
    batch(at, "a")
    batch(at, "a")
    assert broker.values == [b"a", b"a"]


def test_a_batch_write_with_writer_and_version_is_published_once(broker: FakeBroker, at: Place) -> None:
    batch(at, "monday", txnAppId="import", txnVersion="1")
    batch(at, "monday", txnAppId="import", txnVersion="1")
    batch(at, "tuesday", txnAppId="import", txnVersion="2")
    assert broker.values == [b"monday", b"tuesday"]


def test_one_writer_may_write_the_same_version_to_several_topics(broker: FakeBroker, at: Place) -> None:
    broker.topics.add("copies")
    batch(at, "a", txnAppId="import", txnVersion="1")
    batch(at, "a", txnAppId="import", txnVersion="1", topic="copies")
    assert [(row["topic"], row["value"]) for row in broker.log] == [("orders", b"a"), ("copies", b"a")]


def test_a_replayed_foreach_batch_writes_only_what_is_missing(broker: FakeBroker, at: Place) -> None:
    broker.topics.add("copies")
    batch(at, "a", number=0)
    # The driver dies here, before the second write.
    later = EPOCH.replace("2", "3")
    batch(at, "a", number=0, epoch=later)
    batch(at, "a", number=0, epoch=later, topic="copies")
    assert [(row["topic"], row["value"]) for row in broker.log] == [("orders", b"a"), ("copies", b"a")]


def test_a_second_write_of_one_foreach_batch_to_one_topic_is_rejected_not_lost(broker: FakeBroker, at: Place) -> None:
    batch(at, "a", number=0)
    with pytest.raises(InvalidRequest, match="batch 0 is written to topic 'orders' for the second time .* txnAppId"):
        batch(at, "b", number=0)
    assert broker.values == [b"a"]
    batch(at, "b", number=0, txnAppId="second")
    batch(at, "a", number=1)
    assert broker.values == [b"a", b"b", b"a"]


def test_two_writes_of_one_foreach_batch_at_the_same_time_are_found_out(
    broker: FakeBroker, at: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(at, "a", number=0)
    monkeypatch.setattr(broker, "last_version", lambda writer: None)  # the marker of the other write came after this check
    with pytest.raises(InvalidRequest, match="second time"):
        batch(at, "b", number=0)
