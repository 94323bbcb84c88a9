"""The names of writes, and retries while the broker is unavailable."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from headrace.errors import ConfigError, InvalidRequest, Unavailable
from headrace.flight.client import Servers
from headrace.spark import publishing, retry
from headrace.spark.publishing import WRITER_BYTES_MAX, Replay, SinkOptions, Write, stage
from headrace.spark.retry import retry_until
from tests.spark.sink.fakes import EPOCH, QUERY, FakeBroker, rows, task

LONG_TOPIC = "ü" * 124


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "exponential", lambda **_: lambda failures: 0.001)


def sink_options(topic: str, *, writer: str = "", version: int | None = None) -> SinkOptions:
    return SinkOptions(Servers(("127.0.0.1:1",)), topic, writer=writer, version=version)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def test_a_stream_is_known_by_its_query_and_a_version_by_its_batch() -> None:
    assert sink_options("orders").stream_write(task(batch=7, partition=3, attempt=99)) == Write(f"spark/{QUERY}", 7, EPOCH)


def test_a_stream_may_be_given_a_name_which_holds_for_its_topic() -> None:
    assert sink_options("orders", writer="billing").stream_write(task(batch=7)) == Write("billing/orders", 7, EPOCH)
    assert sink_options("", writer="billing").stream_write(task(batch=7)) == Write("billing", 7, EPOCH)


def test_a_stream_without_the_names_of_its_query_is_rejected_rather_than_written_twice() -> None:
    with pytest.raises(ConfigError, match="query id, run id and batch id"):
        sink_options("orders").stream_write(task(batch=None))
    with pytest.raises(ConfigError, match="query id, run id and batch id"):
        sink_options("orders").stream_write(task(batch=3, epoch=""))


def test_a_write_in_foreach_batch_is_known_by_query_topic_and_batch() -> None:
    assert sink_options("a").batch_write(task(batch=4), "j1") == Write(f"spark/{QUERY}/a", 4, EPOCH)
    assert sink_options("b").batch_write(task(batch=4), "j2") == Write(f"spark/{QUERY}/b", 4, EPOCH)
    assert sink_options("").batch_write(task(batch=4), "j3") == Write(f"spark/{QUERY}", 4, EPOCH)
    assert sink_options("a", writer="second").batch_write(task(batch=4), "j4") == Write("second/a", 4, EPOCH)


def test_the_options_of_the_user_win_over_the_batch() -> None:
    assert sink_options("a", writer="import", version=20240229).batch_write(task(batch=4), "j") == Write("import/a", 20240229)
    assert sink_options("a", writer="import", version=0).batch_write(task(batch=None), "j") == Write("import/a", 0)


def test_a_plain_batch_job_has_a_name_of_its_own() -> None:
    assert sink_options("a").batch_write(task(batch=None), "7f") == Write("spark/job/7f", 0)


def test_a_writer_without_a_version_is_rejected_outside_of_foreach_batch() -> None:
    with pytest.raises(ConfigError, match="'txnAppId' needs 'txnVersion'"):
        sink_options("a", writer="import").batch_write(task(batch=None), "j")


@pytest.mark.parametrize("writer", ["", "x" * 200])
def test_the_longest_names_fit_and_stay_apart(writer: str) -> None:
    names = {sink_options(topic, writer=writer).batch_write(task(batch=1), "j").writer for topic in (LONG_TOPIC, LONG_TOPIC[:-1] + "a")}
    assert len(names) == 2
    assert all(len(name.encode()) <= WRITER_BYTES_MAX for name in names)
    assert len(Write("x" * WRITER_BYTES_MAX, 1, EPOCH).mark) <= WRITER_BYTES_MAX


def test_a_job_group_that_a_user_has_named_is_no_epoch() -> None:
    def epoch(**named: str) -> str:
        return publishing._epoch(lambda name: named.get(name.replace(".", "_")))

    assert epoch(sql_streaming_runId=EPOCH, spark_jobGroup_id="mine") == EPOCH
    assert epoch(spark_jobGroup_id=EPOCH) == EPOCH
    assert epoch(spark_jobGroup_id="mine") == ""
    assert epoch() == ""


def test_a_broker_that_comes_back_is_retried() -> None:
    failures = [Unavailable("away"), Unavailable("away")]

    def ask() -> str:
        if failures:
            raise failures.pop()
        return "here"

    assert retry_until(ask, until=soon()) == "here"


def test_retries_end_at_the_deadline_and_with_what_will_not_change() -> None:
    asked = itertools.count()

    def away() -> None:
        next(asked)
        raise Unavailable("away")

    def wrong() -> None:
        next(asked)
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest):
        retry_until(wrong, until=soon())
    assert next(asked) == 1
    with pytest.raises(Unavailable):
        retry_until(away, until=soon(0.05))
    assert next(asked) > 3


def test_rows_are_handed_out_again_as_long_as_they_are_few() -> None:
    taken = iter([rows("a"), rows("b"), rows("c")])
    replay = Replay(taken)
    first = iter(replay)
    assert [next(first).to_pydict(), next(first).to_pydict()] == [{"value": ["a"]}, {"value": ["b"]}]
    assert [batch.column(0)[0].as_py() for batch in replay] == ["a", "b", "c"]
    assert replay.whole


def test_many_rows_are_not_kept() -> None:
    batches = [rows(b"x" * 1000) for _ in range(5)]
    replay = Replay(batches, bytes_max=batches[0].nbytes * 3)
    sending = iter(replay)
    whole = []
    for _ in sending:
        whole.append(replay.whole)
    assert whole == [True, True, True, False, False]


@pytest.mark.parametrize("trouble", [["batch"], ["stage"], ["stage!"], ["batch", "stage", "drop"], ["stage", "drop", "stage", "drop"]])
def test_staging_starts_again_under_another_handle(trouble: list[str]) -> None:
    broker = FakeBroker(trouble=trouble)
    handle, size = stage(broker, "h", iter([rows("a"), rows("b")]), topic="orders", write=Write("app", 1, EPOCH), order=0, until=soon())
    assert handle != "h" and size.records == 2
    broker.publish("app", 1, [handle])
    assert broker.values == ["a", "b"] and not broker.staged


def test_staging_gives_up_at_the_deadline_and_leaves_nothing_behind() -> None:
    broker = FakeBroker(trouble=["stage"] * 1000)
    with pytest.raises(Unavailable):
        stage(broker, "h", iter([rows("a")]), topic="orders", write=Write("app", 1), order=0, until=soon(0.05))
    assert not broker.staged


def test_staging_gives_up_when_the_rows_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "Replay", lambda batches: Replay(batches, bytes_max=10))
    broker = FakeBroker(trouble=["stage"])
    with pytest.raises(Unavailable):
        stage(broker, "h", iter([rows(b"x" * 100)]), topic="orders", write=Write("app", 1), order=0, until=soon())
    assert broker.calls == ["batch", "stage", "drop"]


def test_a_failure_of_the_rows_themselves_drops_the_handle() -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield rows("a")
        raise ZeroDivisionError

    broker = FakeBroker()
    with pytest.raises(ZeroDivisionError):
        stage(broker, "h", failing(), topic="orders", write=Write("app", 1), order=0, until=soon())
    assert broker.dead == {"h"} and not broker.staged
