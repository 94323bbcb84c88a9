"""Figures of `bench fanout`, and its load over both protocols."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from headrace.bench.children import BenchFailed
from headrace.bench.fanout import Deliveries, Fanned, Fanout
from tests.bench.commands import measured


def test_a_latency_counts_from_the_intended_time_of_its_record() -> None:
    deliveries = Deliveries.of(Fanout("figg", 2, rate=10, seconds=0.3, value_bytes=1))
    deliveries.note(0, 1, 0.05)
    deliveries.note(0, 3, 0.25)
    deliveries.note(1, 3, 0.3)
    assert list(deliveries.latencies) == pytest.approx([0.05, 0.15, 0.05, 0.3, 0.2, 0.1])
    assert deliveries.is_done


def test_a_record_too_many_fails_the_benchmark() -> None:
    deliveries = Deliveries.of(Fanout("figg", 1, rate=1, seconds=1, value_bytes=1))
    with pytest.raises(BenchFailed, match="received 2 records, expected 1"):
        deliveries.note(0, 2, 0.1)


def test_the_figures_have_the_targets_of_their_shape() -> None:
    known = Fanned(Fanout("figg", 1_000, rate=100, seconds=1, value_bytes=1), [array("d", [0.009] * 98 + [0.06] * 2)])
    p50, p99 = known.figures()
    assert [p50.value, p99.value] == pytest.approx([9.0, 60.0])
    assert (p50.met, p99.met) == (True, False)
    other = Fanned(Fanout("figg", 5, rate=100, seconds=1, value_bytes=1), [array("d", [0.009])])
    assert [figure.met for figure in other.figures()] == [None, None]


@pytest.mark.parametrize("protocol", ["figg", "fujin"])
def test_every_subscriber_receives_every_record(protocol: str, tmp_path: Path) -> None:
    shape = ("--subscribers", "5", "--rate", "100", "--duration", "0.2")
    report = measured("fanout", "--protocol", protocol, *shape, directory=tmp_path)
    assert [figure["name"] for figure in report["figures"]] == [f"{protocol}, 100/s to 5 subscribers"] * 2
    assert all(figure["value"] > 0 for figure in report["figures"])
