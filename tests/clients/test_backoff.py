"""Delays between attempts to connect."""

from __future__ import annotations

import pytest

from headrace.clients.backoff import chance, exponential


def test_the_first_attempt_is_immediate_and_later_ones_double_up_to_thirty_seconds() -> None:
    wait = exponential(chance=lambda: 0.5)
    assert [wait(attempt) for attempt in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert wait(10_000) == 30


@pytest.mark.parametrize("luck, factor", [(0.0, 0.8), (0.5, 1.0), (0.999999, 1.2)])
def test_jitter_is_a_fifth_up_or_down(luck: float, factor: float) -> None:
    assert exponential(chance=lambda: luck)(4) == pytest.approx(8 * factor, rel=1e-5)


def test_chance_is_between_zero_and_one_and_not_constant() -> None:
    drawn = {chance() for _ in range(100)}
    assert len(drawn) > 50 and all(0 <= number < 1 for number in drawn)
