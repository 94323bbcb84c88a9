"""`headrace bench … --protocol fujin`: beside what its QUIC library can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.commands import bench, measured, values


@pytest.mark.parametrize(("command", "name"), [("publish", "fujin publish, durable"), ("consume", "fujin consume, pushed")])
def test_a_rate_is_shown_beside_the_raw_ceiling(tmp_path: Path, command: str, name: str) -> None:
    told = measured(command, "--protocol", "fujin", "--records", "4000", "--connections", "2", "--streams", "2", directory=tmp_path)
    shown = values(told)
    assert list(shown) == [name, f"raw QUIC, {command}", f"{name} ÷ raw"]
    assert shown[name] > 100 and shown[f"raw QUIC, {command}"] > 100
    assert told["config"]["streams"] == 2


def test_round_trips_are_shown_with_percentiles_beside_the_machine(tmp_path: Path) -> None:
    told = measured("latency", "--protocol", "fujin", "--round-trips", "50", directory=tmp_path)
    trips, machine, above = told["figures"]
    assert trips["name"] == "fujin one at a time, durable"
    for figure in (trips, machine):
        assert 0 < figure["value"] <= figure["notes"]["max"]
    assert above["value"] == pytest.approx(trips["value"] - machine["value"])


@pytest.mark.parametrize(
    "arguments",
    [("--protocol", "fujin", "--window", "5"), ("--protocol", "fujin", "--server", "x:1"), ("--protocol", "figg", "--streams", "2")],
)
def test_what_a_transport_does_not_have_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = bench("publish", *arguments, directory=tmp_path)
    assert done.returncode == 2 and "for protocols over" in done.stderr
