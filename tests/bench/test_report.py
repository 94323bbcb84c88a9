"""The report has the median, whether it meets the target, and the machine."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from headrace import __version__
from headrace.bench.facts import Facts, filesystem_of, gather, sync_times
from headrace.bench.report import Figure, Report, Target, human, percentile


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    return gather(tmp_path)


def test_the_facts_describe_this_machine(facts: Facts, tmp_path: Path) -> None:
    assert facts.headrace == __version__
    assert facts.cores >= 1
    assert facts.memory_bytes > 1 << 20
    assert facts.filesystem == filesystem_of(tmp_path)
    assert 0 < facts.fdatasync_p50_ms <= facts.fdatasync_p99_ms
    assert facts.date.endswith("+00:00")
    assert list(tmp_path.iterdir()) == [], "a probe removes its file"


def test_the_filesystem_is_the_one_the_mount_table_has_for_the_device(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        "20 1 0:19 / /proc rw - proc proc rw\n"
        f"26 1 {os.major(device)}:{os.minor(device)} / /srv rw,relatime shared:1 - xfs /dev/sda1 rw\n"
        f"27 1 {os.major(device)}:{os.minor(device) + 1} / /tmp rw - tmpfs tmpfs rw\n"
    )
    assert filesystem_of(tmp_path, table) == "xfs"


def test_a_filesystem_that_is_in_no_mount_table_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text("20 1 0:19 / /proc rw - proc proc rw\n")
    assert filesystem_of(tmp_path, tmp_path / "mountinfo") == "unknown"
    assert filesystem_of(tmp_path, tmp_path / "no such file") == "unknown"


def test_a_figure_is_the_median_of_its_runs() -> None:
    assert Figure("f", "s", [5.0, 1.0, 2.0]).value == 2.0


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [(Target(at_least=2), 2.0, True), (Target(at_least=2), 1.9, False), (Target(at_most=2), 2.0, True), (Target(at_most=2), 2.1, False)],
)
def test_a_target_is_met_at_its_bound_and_not_beyond_it(target: Target, value: float, met: bool) -> None:
    assert Figure("f", "s", [value], target).met is met


def test_the_json_holds_facts_config_and_figures(facts: Facts) -> None:
    report = Report("publish", facts, {"records": 7})
    report.add(Figure("f", "records/s", [1.0, 3.0, 2.0], Target(at_least=2), {"p99": 0.5}))
    loaded = json.loads(report.to_json())
    assert loaded["config"] == {"records": 7}
    assert loaded["facts"]["cpu"] == facts.cpu
    assert loaded["figures"] == [
        {
            "name": "f",
            "value": 2.0,
            "unit": "records/s",
            "runs": [1.0, 3.0, 2.0],
            "target": {"at_least": 2, "met": True},
            "notes": {"p99": 0.5},
        }
    ]


def test_the_table_shows_figures_and_machine_but_no_histogram(facts: Facts) -> None:
    report = Report("publish", facts, {})
    report.add(Figure("figg publish", "records/s", [812_345.0], Target(at_least=600_000), {"p99": 0.25, "hdr": "H" * 300}))
    written = io.StringIO()
    report.show(Console(width=200, file=written))
    text = written.getvalue()
    assert "812.3 k" in text
    assert "≥ 600.0 k ✓" in text
    assert facts.cpu in text
    assert "HHH" not in text


def test_shown_numbers_have_three_or_four_significant_digits() -> None:
    shown = [human(value) for value in (0, 0.3519, 4.2, 352, 1500, 83_100, 1_240_000, 2.5e9)]
    assert shown == ["0", "0.352", "4.2", "352", "1500", "83.1 k", "1.24 M", "2.50 G"]


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 99.9, 100)] == [1, 50, 99, 100, 100]
    assert percentile([7.0], 50) == 7.0


@pytest.mark.parametrize("filled", [False, True])
def test_raw_syncs_take_time_and_leave_no_file(filled: bool, tmp_path: Path) -> None:
    times = sync_times(tmp_path, 300, 5, filled=filled)
    assert len(times) == 5
    assert min(times) > 0
    assert list(tmp_path.iterdir()) == []
