"""The rate of the sample traffic."""

from __future__ import annotations

import pytest

from headrace.demo.traffic import Pacer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_pace_holds_however_the_ticks_fall() -> None:
    clock = Clock()
    pacer = Pacer(10.0, clock)
    sent = 0
    for _ in range(1_000):
        clock.now += 0.013
        sent += pacer.due()
    assert sent == pytest.approx(130, abs=1)


def test_a_stall_is_not_made_up_for_by_a_flood() -> None:
    clock = Clock()
    pacer = Pacer(100.0, clock)
    clock.now = 3_600.0
    assert pacer.due() == 100


def test_the_rate_follows_what_is_sent() -> None:
    clock = Clock()
    pacer = Pacer(100.0, clock)
    rates = []
    for _ in range(50):
        clock.now += 0.1
        rates.append(pacer.rate(20))
    assert rates[0] < rates[-1] == pytest.approx(200, rel=0.01)
