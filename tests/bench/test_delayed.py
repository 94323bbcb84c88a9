"""Lateness counts from the time a message was due to its arrival."""

from __future__ import annotations

import pytest

from headrace.bench.delayed import Post, figures
from headrace.bench.faults import BenchFailed


def test_each_message_is_as_late_as_it_came_after_its_time() -> None:
    assert Post({0: 1_000, 1: 1_010}, {1: 1_060.0, 0: 1_000.5}).lateness() == pytest.approx([0.0005, 0.050])


def test_a_message_that_came_early_ends_the_run() -> None:
    with pytest.raises(BenchFailed, match=r"3\.0 ms before its time"):
        Post({0: 1_000}, {0: 997.0}).lateness()


def test_the_latest_message_is_what_the_target_is_about() -> None:
    quiet, busy, machine = figures([[0.001, 0.002]], [[0.001, 0.060]], [[0.004]])
    assert busy.value == pytest.approx(60)
    assert busy.met is False
    assert quiet.met is machine.met is None
