"""The retry policy: delays, attempts and deadline."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRequest, Unavailable
from headrace.retry import chance, exponential, retry


def test_the_first_attempt_is_immediate_and_later_ones_double_up_to_five_seconds() -> None:
    wait = exponential(chance=lambda: 0.5)
    assert [wait(attempt) for attempt in range(9)] == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert wait(10_000) == 5


@pytest.mark.parametrize("luck, factor", [(0.0, 0.8), (0.5, 1.0), (0.999999, 1.2)])
def test_jitter_is_a_fifth_up_or_down(luck: float, factor: float) -> None:
    assert exponential(chance=lambda: luck)(4) == pytest.approx(0.8 * factor, rel=1e-5)


def test_chance_is_between_zero_and_one_and_not_constant() -> None:
    drawn = {chance() for _ in range(100)}
    assert len(drawn) > 50 and all(0 <= number < 1 for number in drawn)


def test_a_retriable_error_is_retried_after_growing_delays_until_it_gives_up() -> None:
    slept: list[float] = []
    reported: list[str] = []

    def request() -> str:
        if len(slept) < 3:
            raise Unavailable("away")
        return "here"

    backoff = exponential(chance=lambda: 0.5)
    answer = retry(
        request, give_up=lambda failures, wait: False, backoff=backoff, report=lambda e: reported.append(str(e)), sleep=slept.append
    )
    assert (answer, reported) == ("here", ["away"])
    assert slept == pytest.approx([0.1, 0.2, 0.4])
    slept.clear()
    with pytest.raises(Unavailable):
        retry(request, give_up=lambda failures, wait: failures == 2, backoff=backoff, sleep=slept.append)
    assert slept == pytest.approx([0.1])


def test_an_error_that_another_attempt_does_not_change_is_raised_at_once() -> None:
    def request() -> str:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest):
        retry(request, give_up=lambda failures, wait: False, sleep=lambda seconds: pytest.fail("slept"))
