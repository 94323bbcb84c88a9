"""Lateness counts from the delivery time of a message to its arrival."""

from __future__ import annotations

import pytest

from benchmarks.delayed import Deliveries, figures
from headrace.bench.children import BenchFailed


def test_lateness_is_arrival_minus_delivery_time() -> None:
    assert Deliveries({0: 1_000, 1: 1_010}, {1: 1_060.0, 0: 1_000.5}).lateness() == pytest.approx([0.0005, 0.050])


def test_an_early_message_ends_the_benchmark() -> None:
    with pytest.raises(BenchFailed, match=r"3\.0 ms before its delivery time"):
        Deliveries({0: 1_000}, {0: 997.0}).lateness()


def test_the_target_applies_to_the_latest_message() -> None:
    quiet, busy, machine = figures([[0.001, 0.002]], [[0.001, 0.060]], [[0.004]])
    assert busy.value == pytest.approx(60)
    assert busy.met is False
    assert quiet.met is machine.met is None
