"""Restart decisions, and diagnosis of Spark failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import StreamingQueryException

from headrace.errors import Unavailable, UnknownTopic
from headrace.spark.pipelines.checkpoint import unfinished
from headrace.spark.pipelines.diagnosis import Diagnosis, diagnose, diagnose_text, offsets_of
from headrace.spark.pipelines.model import Restart
from headrace.spark.pipelines.progress import QueryState, lag_of, moment_of
from headrace.spark.pipelines.restarts import Decision, Restarts

POLICY = Restart(attempts=5, window=60_000, backoff=100, backoff_max=1_000, same_batch=3)
AWAY = Diagnosis("no answer", "unavailable", retriable=True)


def test_pauses_double_up_to_the_longest() -> None:
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    waits = [restarts.failed(now, str(batch), Diagnosis(f"fault {batch}")).wait_ms for now, batch in enumerate(range(5))]
    assert waits == [100, 200, 400, 800, 1_000]


def test_more_failures_than_allowed_within_the_window_end_it() -> None:
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    for now in range(5):
        assert not restarts.failed(now, str(now), Diagnosis(f"fault {now}")).give_up
    assert restarts.failed(6, "6", Diagnosis("fault 6")).give_up == "it failed 6 times within 60 s"


def test_failures_that_are_long_past_do_not_count() -> None:
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    for round in range(20):
        decision = restarts.failed(round * 30_000, str(round), Diagnosis(f"fault {round}"))
        assert not decision.give_up
        restarts.succeeded()
        assert decision.wait_ms == 100


def test_the_same_batch_failing_in_the_same_way_is_poison() -> None:
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    text = "ValueError: row 7 in stage 3.0 (TID 12) at 0x7f01"
    assert not restarts.failed(0, "4", Diagnosis(text)).is_poison
    assert not restarts.failed(1, "4", Diagnosis(text.replace("3.0", "5.0").replace("12", "19"))).is_poison
    decision = restarts.failed(2, "4", Diagnosis(text.replace("7f01", "7f99")))
    assert decision == Decision(give_up="it failed 3 times in the same way", is_poison=True)


def test_another_failure_or_another_batch_resets_the_count() -> None:
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    for now, (batch, text) in enumerate([("4", "a"), ("4", "a"), ("4", "b"), ("5", "b"), ("5", "b")]):
        assert not restarts.failed(now, batch, Diagnosis(text)).is_poison
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    for now in range(2):
        restarts.failed(now, "4", Diagnosis("a"))
    restarts.succeeded()
    assert not restarts.failed(3, "4", Diagnosis("a")).is_poison


def test_a_broker_that_is_away_is_no_fault_of_the_batch() -> None:
    restarts = Restarts(POLICY, chance=lambda: 0.5)
    for now in range(5):
        assert not restarts.failed(now, "4", AWAY).give_up
    assert restarts.failed(6, "4", AWAY) == Decision(give_up="it failed 6 times within 60 s")


def test_without_its_java_nothing_can_be_started_again() -> None:
    for failure in (Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError(111, "Connection refused")):
        found = diagnose(failure)
        assert found.is_engine_lost
        assert Restarts(POLICY).failed(0, "", found).give_up


def test_a_connection_that_a_step_could_not_make_is_not_that_to_java() -> None:
    text = IN_A_TASK.replace("KeyError", "ConnectionRefusedError")
    assert diagnose(StreamingQueryException(text)) == Diagnosis("ConnectionRefusedError: 'row bad'")


IN_A_TASK = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "step.py", line 39, in <lambda>
    g(v)
  File "step.py", line 37, in g
    raise KeyError("row bad")
KeyError: 'row bad'
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: [id = b979e805-4edf-40e1-b015-bf1bca1f8bdb, runId = 89ff6d9c-b66b-4893-8532-1f3fb4142f9e]
Current Committed Offsets: {Stream@31d66bc5: {"orders":{"0":5}}}
Current Available Offsets: {Stream@31d66bc5: {"orders":{"0":9}}}

Current State: ACTIVE
"""


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        (IN_A_TASK, "KeyError: 'row bad'", ""),
        (
            "x: Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nheadrace.errors.UnknownTopic: topic 'a' not found\n",
            "topic 'a' not found",
            "unknown_topic",
        ),
        (
            "[UNRESOLVED_COLUMN] A column with name `foo` cannot be resolved. SQLSTATE: 42703; line 1 pos 7;\n'Project ['foo]\n+- View",
            "A column with name `foo` cannot be resolved; line 1 pos 7",
            "",
        ),
        ("\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'selec'. SQLSTATE: 42601 (line 1, pos 0)\n\n== SQL ==\nselec x\n^^^\n",
         "Syntax error at or near 'selec' (line 1, pos 0)", ""),
        ("requirement failed: it does not\n\tat org.apache.spark.X", "requirement failed: it does not", ""),
    ],
)  # fmt: skip
def test_a_failure_comes_down_to_one_line(text: str, line: str, kind: str) -> None:
    found = diagnose_text(text)
    assert (found.text, found.kind) == (line, kind)


def test_our_own_errors_are_taken_at_their_word() -> None:
    assert diagnose(UnknownTopic("a")) == Diagnosis("topic 'a' not found", "unknown_topic", retriable=False)
    assert diagnose(Unavailable("draining")).retriable


def test_the_offsets_of_a_failed_query_are_found() -> None:
    assert offsets_of(IN_A_TASK) == ('{Stream@31d66bc5: {"orders":{"0":5}}}', '{Stream@31d66bc5: {"orders":{"0":9}}}')
    assert offsets_of("nothing") == ("", "")


def test_the_unfinished_batch_of_a_checkpoint_names_its_records(tmp_path: Path) -> None:
    assert unfinished(tmp_path) is None
    (tmp_path / "offsets").mkdir()
    (tmp_path / "commits").mkdir()
    for batch, ends in enumerate([{"0": 10, "1": 4}, {"0": 10, "1": 9, "2": 3}]):
        (tmp_path / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps({'orders': ends})}\n")
        (tmp_path / "offsets" / f".{batch}.crc").touch()
    (tmp_path / "commits" / "0").touch()
    found = unfinished(tmp_path)
    assert found is not None
    assert (found.batch, str(found)) == (1, "orders[1] 4–8, orders[2] 0–2")
    (tmp_path / "commits" / "1").touch()
    assert unfinished(tmp_path) is None


def test_lag_is_what_the_topics_hold_and_the_query_has_not_read() -> None:
    sources: list[dict[str, object]] = [
        {"latestOffset": {"a": {"0": 10, "1": 5}}, "endOffset": {"a": {"0": 7}}},
        {"latestOffset": '{"b": {"0": 4}}', "endOffset": '{"b": {"0": 4}}'},
        {"latestOffset": {"offset": 5, "timestamp": 1}, "endOffset": None},
    ]
    assert lag_of(sources) == 3 + 5
    assert lag_of([{"latestOffset": None}]) is None


def test_a_report_of_spark_becomes_the_state_of_a_query() -> None:
    report = {
        "batchId": 7, "numInputRows": 12, "inputRowsPerSecond": "NaN", "processedRowsPerSecond": 6.5,
        "durationMs": {"triggerExecution": 250, "addBatch": 200}, "timestamp": "2026-11-15T10:00:00.000Z",
        "stateOperators": [{"numRowsTotal": 3, "memoryUsedBytes": 100}, {"numRowsTotal": 1, "memoryUsedBytes": 50}], "sources": [],
    }  # fmt: skip
    state = QueryState("totals", rows_total=5).after(json.dumps(report))
    assert (state.batch, state.rows_total, state.input_rate, state.processing_rate, state.batch_ms) == (7, 17, 0.0, 6.5, 250)
    assert (state.state_rows, state.state_bytes, state.lag) == (4, 150, None)
    idle = {"batchId": 8, "numInputRows": 0, "durationMs": {"triggerExecution": 3}, "timestamp": "2026-11-15T10:00:10.000Z", "sources": []}
    after = state.after(json.dumps(idle))
    assert (after.batch, after.rows_total, after.processing_rate, after.batch_ms, after.state_rows) == (7, 17, 0.0, 250, 4)
    assert moment_of(json.dumps(report)) < moment_of(json.dumps(idle))
    assert state.after(json.dumps({**report, "batchId": 8})).rows_total == 29
