"""`headrace pipeline` and `headrace sql` without Spark: invalid files, ended executions, an unreachable broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli import WRONG_USAGE, cli, exit_code
from headrace.cli.sql import plain
from headrace.cli.watching import Watch, line_of, size_text
from headrace.spark.pipelines.executions import AlreadyRunning, Execution, UnknownExecution, ask_to_stop, executions, find, process_birth
from headrace.spark.pipelines.progress import QueryState

SMALL = '[sources.a]\ntopic = "a"\n[sinks.b]\nfrom = "a"\nkind = "console"\n'


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "entries"))
    return tmp_path / "entries"


def headrace(*arguments: str) -> Any:
    return CliRunner().invoke(cli, arguments, prog_name="headrace")


def process(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )


def ran(tmp_path: Path, name: str = "copy", state: str = "finished", **query: object) -> Execution:
    with Execution(name, str(tmp_path / name), file=str(tmp_path / f"{name}.toml"), now_ms=1_000) as run:
        run.write(state, [QueryState("out", **query).plain()], now_ms=2_000, master="local[2]")  # type: ignore[arg-type]
    return run


def test_a_wrong_key_is_one_line_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(SMALL + "moed = 'append'\n")
    for command in ("run", "check"):
        done = process(tmp_path, "pipeline", command, "p.toml")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "headrace: p.toml:6: sinks.b.moed: unknown key; did you mean mode?\n"


def test_an_unreachable_broker_is_reported_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(SMALL)
    for arguments in (("pipeline", "run", "p.toml"), ("pipeline", "check", "p.toml"), ("sql", "select 1")):
        done = process(tmp_path, *arguments, "--servers", "127.0.0.1:1")
        assert done.returncode == 5, done.stderr
        assert done.stderr.splitlines()[-1].startswith("headrace: ")
        assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("target", ["delta", "delta:", "hudi:x", "x"])
def test_an_archive_wants_a_kind_and_a_place(target: str) -> None:
    done = headrace("pipeline", "archive", "orders", "--to", target)
    assert done.exit_code == 2
    assert "expected one of delta:DIR, iceberg:DIR and parquet:DIR" in done.output


def test_a_setting_without_a_value_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(SMALL)
    done = headrace("pipeline", "run", str(tmp_path / "p.toml"), "--conf", "spark.x")
    assert done.exit_code == 1
    assert "--conf spark.x: expected KEY=VALUE" in str(done.exception)


def test_executions_are_listed_with_their_state(tmp_path: Path) -> None:
    assert json.loads(headrace("pipeline", "list", "-o", "json").stdout) == []
    ran(tmp_path, "copy", lag=5, rows_total=10)
    ran(tmp_path, "gone", "failed")
    rows = json.loads(headrace("pipeline", "list", "-o", "json").stdout)
    assert [(row["name"], row["state"], row["lag"], row["sinks"]) for row in rows] == [
        ("copy", "finished", 5, 1),
        ("gone", "failed", None, 1),
    ]
    assert rows[0]["updated"] == "1970-01-01T00:00:02.000Z"
    (tmp_path / "gone" / ".headrace" / "status.json").unlink()
    assert [row["name"] for row in json.loads(headrace("pipeline", "list", "-o", "json").stdout)] == ["copy"]


@pytest.mark.parametrize("by", ["copy", "{directory}/copy", "{directory}/copy.toml"])
def test_an_execution_is_found_by_name_checkpoint_and_file(by: str, tmp_path: Path) -> None:
    ran(tmp_path, input_rate=2.5, rows_total=10, batch=3)
    done = headrace("pipeline", "status", by.format(directory=tmp_path), "-o", "json")
    [row] = json.loads(done.stdout)
    assert (row["pipeline"], row["execution"], row["sink"], row["input_rate"], row["rows_total"], row["batch"]) == (
        "copy",
        "finished",
        "out",
        2.5,
        10,
        3,
    )


def test_a_status_for_people_fits_a_terminal(tmp_path: Path) -> None:
    ran(tmp_path, input_rate=123.4, processing_rate=5678.9, rows_total=123_456_789, batch=1234, lag=99_999, batch_ms=1500)
    done = headrace("pipeline", "status", "copy")
    assert done.exit_code == 0
    assert "copy: finished, pid" in done.stderr
    [head, row] = done.stdout.splitlines()
    assert head.split() == ["pipeline", "sink", "state", "batch", "rows", "in/s", "done/s", "ms", "lag", "kept"]
    assert row.split() == ["copy", "out", "starting", "1234", "123456789", "123", "5679", "1500", "99999", "0"]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_an_unknown_execution_is_not_found_and_the_known_are_named(tmp_path: Path) -> None:
    ran(tmp_path)
    with pytest.raises(UnknownExecution, match="no pipeline orders has run here; there is copy"):
        find("orders")
    assert process(tmp_path, "pipeline", "status", "orders").returncode == 3


def test_an_ended_execution_cannot_be_stopped(tmp_path: Path) -> None:
    ran(tmp_path)
    done = headrace("pipeline", "stop", "copy")
    assert "copy: is not running (finished)" in done.stderr


def test_an_execution_whose_process_ended_is_lost_even_if_its_pid_is_reused(tmp_path: Path) -> None:
    run = ran(tmp_path, state="running")
    assert find("copy")["state"] == "running"
    file = run.directory / "status.json"
    status = json.loads(file.read_text())
    assert status["born"] == process_birth(os.getpid())
    file.write_text(json.dumps({**status, "born": status["born"] - 1}))
    assert find("copy")["state"] == "lost"
    file.write_text(json.dumps({**status, "host": "elsewhere", "born": 1}))
    assert find("copy")["state"] == "running", "another host's process cannot be checked"


def test_a_stop_request_ends_the_execution_and_not_the_next_one(tmp_path: Path) -> None:
    with Execution("copy", str(tmp_path / "copy"), file="", now_ms=0) as run:
        run.write("running", [], now_ms=0)
        before = run.is_stop_wanted
        ask_to_stop(find("copy"))
        assert (before, run.is_stop_wanted) == (False, True)
    with Execution("copy", str(tmp_path / "copy"), file="", now_ms=0) as run:
        assert not run.is_stop_wanted


def test_two_executions_on_one_checkpoint_conflict(tmp_path: Path) -> None:
    with Execution("copy", str(tmp_path / "copy"), file="", now_ms=0) as run:
        run.write("running", [], now_ms=0)
        with pytest.raises(AlreadyRunning, match=f"pipeline copy runs already \\(pid {os.getpid()}\\)"):
            Execution("copy", str(tmp_path / "copy"), file="", now_ms=0).__enter__()


def test_a_checkpoint_elsewhere_has_its_status_here(entries: Path) -> None:
    with Execution("far", "hdfs://somewhere/far", file="", now_ms=0) as run:
        run.write("running", [], now_ms=0)
        assert run.directory.parent == entries
        assert [status["name"] for status in executions()] == ["far"]
        ask_to_stop(find("far"))
        assert run.is_stop_wanted


def test_a_query_is_one_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    state = QueryState("out", "running", 3, 1200, 10.0, 2000.4, 250, 7, 12, 2048)
    assert line_of(state) == ("out: running, batch 3, 1,200 rows, in 10/s, processed 2,000/s, 250 ms, lag 7, state 12 rows in 2.0 KiB")
    assert line_of(QueryState("out", "waiting", failures=2, error="no\nluck")) == r"out: failed (2), will restart: no\nluck"
    with Watch("p", quiet=False) as watch:
        for _ in range(3):
            watch.show([state])
    assert capsys.readouterr().err.count("\n") == 1
    with Watch("p", quiet=True) as watch:
        watch.show([state])
        watch.message("hello")
    assert capsys.readouterr().err == ""


def test_without_pyspark_the_extra_is_named_and_lists_can_still_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pyspark" or name.startswith("headrace.spark")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    done = headrace("sql", "select 1")
    assert str(done.exception) == "headrace sql needs Spark: pip install 'headrace[spark]'"
    assert exit_code(done.exception) == WRONG_USAGE
    assert headrace("pipeline", "list").exit_code == 0


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3072.0 TiB")])
def test_sizes_are_short(size: int, text: str) -> None:
    assert size_text(size) == text


def test_values_of_a_query_are_printed_as_json_can_say_them() -> None:
    when = datetime(2026, 11, 15, 10, tzinfo=UTC)
    row = {"a": when, "b": [b"text", b"\xff"], "c": {"d": Decimal("1.50")}, "e": float("nan"), "f": None, "g": when.date(), "h": 1.5}
    assert plain(row) == {
        "a": "2026-11-15T10:00:00+00:00", "b": ["text", "base64:/w=="], "c": {"d": "1.50"}, "e": "NaN",
        "f": None, "g": "2026-11-15", "h": 1.5,
    }  # fmt: skip
