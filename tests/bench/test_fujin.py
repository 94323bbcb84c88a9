"""`headrace bench … --protocol fujin`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.commands import bench, measured, values


@pytest.mark.parametrize(("command", "name"), [("publish", "fujin publish, durable"), ("consume", "fujin consume, pushed")])
def test_a_rate_is_reported(tmp_path: Path, command: str, name: str) -> None:
    report = measured(command, "--protocol", "fujin", "--records", "4000", "--connections", "2", "--streams", "2", directory=tmp_path)
    assert list(values(report)) == [name]
    assert values(report)[name] > 100
    assert report["config"]["streams"] == 2


def test_round_trips_have_percentiles_and_the_machine_beside_them(tmp_path: Path) -> None:
    report = measured("latency", "--protocol", "fujin", "--round-trips", "50", directory=tmp_path)
    trips, machine, above = report["figures"]
    assert trips["name"] == "fujin one at a time, durable"
    for figure in (trips, machine):
        assert 0 < figure["value"] <= figure["notes"]["max"]
    assert above["value"] == pytest.approx(trips["value"] - machine["value"])


@pytest.mark.parametrize(
    "arguments",
    [("--protocol", "fujin", "--window", "5"), ("--protocol", "fujin", "--server", "x:1"), ("--protocol", "figg", "--streams", "2")],
)
def test_an_option_of_the_other_transport_fails(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = bench("publish", *arguments, directory=tmp_path)
    assert done.returncode == 2 and "for protocols over" in done.stderr
