"""Benchmarks of internals (`python -m benchmarks.NAME`) run end to end with small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.log import copy_rate
from tests.bench.commands import bench, measured, values


def test_log_reports_every_part(tmp_path: Path) -> None:
    sizes = ("--records", "5000", "--batch", "100", "--log-size", "3 MiB", "--partitions", "10")
    report = measured("benchmarks.log", *sizes, directory=tmp_path)
    shown = values(report)
    for name in (
        "append, durable, batches of 100",
        "append as columns, durable, batches of 10,485",
        "read as columns",
        "read as values",
        "raw: memcpy",
    ):
        assert shown[name] > 0
    assert 0 < shown["recovery, 1 partition"] < 60
    assert 0 < shown["recovery, 10 partitions"] < 60
    assert 0 < shown["flush to 10 partitions, 1 record each ÷ to one"] < 100
    assert shown["read of 10 records from batches of 5,000, at random"] > 0
    assert 0.9 < shown["space of a record, filled one at a time ÷ in bulk"] <= 1.2
    assert shown["read as values by CPU time, filled one at a time ÷ in bulk"] > 0
    assert 10 < shown["idle memory, 10 partitions"] < 1_000


def test_only_the_named_parts_of_the_log_are_measured(tmp_path: Path) -> None:
    report = measured("benchmarks.log", "--only", "spread", "--partitions", "5", directory=tmp_path)
    assert list(values(report)) == [
        "flush to 5 partitions, 1 record each ÷ to one",
        "flush to 5 partitions, 10 records each ÷ to one",
    ]


def test_the_table_goes_to_stdout(tmp_path: Path) -> None:
    done = bench("benchmarks.log", "--only", "raw", "--batch", "10", "--repeat", "2", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "raw: memcpy" in done.stdout
    assert "fdatasync p50" in done.stdout


def test_the_flight_endpoint_is_measured_beside_a_bare_server(tmp_path: Path) -> None:
    report = measured("benchmarks.flight", "--rows", "20000", "--batch", "3000", "--fill-gb", "0.003", directory=tmp_path)
    read, bare_read, read_ratio, append, bare_append, append_ratio, again, again_ratio, disk, disk_ratio, memory = report["figures"]
    assert read_ratio["value"] == pytest.approx(read["value"] / bare_read["value"])
    assert again["name"] == "flight read, again" and again_ratio["value"] == pytest.approx(again["value"] / bare_read["value"])
    assert append_ratio["value"] == pytest.approx(append["value"] / bare_append["value"])
    assert disk_ratio["value"] == pytest.approx(append["value"] / disk["value"])
    assert (read["target"]["at_least"], append["target"]["at_least"]) == (5_000_000, 3_000_000)
    assert (read_ratio["target"]["at_least"], append_ratio["target"]["at_least"]) == (0.5, 0.6)
    assert memory["value"] >= memory["notes"]["MB after"] > 50 and memory["target"]["at_most"] == 400


@pytest.mark.parametrize(("command", "name"), [("publish", "fujin publish, durable"), ("consume", "fujin consume, pushed")])
def test_a_rate_is_shown_beside_the_raw_ceiling(tmp_path: Path, command: str, name: str) -> None:
    report = measured("benchmarks.quic", command, "--records", "4000", "--connections", "2", "--streams", "2", directory=tmp_path)
    shown = values(report)
    assert list(shown) == [name, f"raw QUIC, {command}", f"{name} ÷ raw"]
    assert shown[name] > 100 and shown[f"raw QUIC, {command}"] > 100
    assert report["config"]["streams"] == 2


def test_memory_is_copied_at_some_speed() -> None:
    assert copy_rate() > 1e6


def test_a_wrong_option_fails_with_the_usage(tmp_path: Path) -> None:
    done = bench("benchmarks.log", "--only", "nothing", directory=tmp_path)
    assert done.returncode == 2
    assert "Usage: python -m benchmarks.log" in done.stderr
