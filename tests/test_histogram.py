from __future__ import annotations

import pytest

from headrace.histogram import FEW_SECONDS, SECONDS, Histogram


def test_fewer_buckets_hold_the_same_observations() -> None:
    fine, expected = Histogram(), Histogram(FEW_SECONDS)
    for value in (0.0001, 0.001, 0.0011, 0.005, 0.006, 0.1, 0.2, 1.0, 1.1, 99.0):
        fine.observe(value)
        expected.observe(value)
    assert set(FEW_SECONDS) < set(SECONDS)
    coarse = fine.coarse(FEW_SECONDS)
    assert (coarse.counts, coarse.total) == (expected.counts, expected.total)


def test_a_sum_of_histograms_has_the_observations_of_both() -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for histogram, value in ((one, 0.002), (other, 0.002), (other, 50.0)):
        histogram.observe(value)
        both.observe(value)
    one.add(other)
    assert (one.counts, one.count) == (both.counts, 3) and one.total == pytest.approx(both.total)
    assert other.count == 2
