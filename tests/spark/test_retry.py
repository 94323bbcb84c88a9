"""The retry policy: retries and their limits."""

from __future__ import annotations

import pytest

from headrace.errors import BrokerError, InvalidRequest, Unavailable
from headrace.spark.options import Options
from headrace.spark.retry import RetryPolicy


class Flaky:
    """Request that fails `failures` times, then succeeds."""

    def __init__(self, failures: int, error: BrokerError | None = None) -> None:
        self.failures, self.calls = failures, 0
        self.error = error or Unavailable("away")

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "here"


QUICK = RetryPolicy(retries=3, pause_seconds=0.0001, timeout_seconds=0.2)


def test_the_first_request_is_retried_a_few_times() -> None:
    assert QUICK.before_start(Flaky(3), ("a:1",)) == "here"
    request = Flaky(4)
    with pytest.raises(
        Unavailable, match=r"no broker answers at a:1,b:2: is its Flight endpoint open there \(headrace serve --listen-flight\)\? away"
    ):
        QUICK.before_start(request, ("a:1", "b:2"))
    assert request.calls == 4


def test_a_running_query_retries_for_a_while() -> None:
    request = Flaky(10**9)
    with pytest.raises(Unavailable, match="away"):
        QUICK.while_running(request)
    assert request.calls > 4
    assert QUICK.while_running(Flaky(5)) == "here"


def test_a_error_is_not_retried() -> None:
    for retried in (QUICK.while_running, lambda request: QUICK.before_start(request, ())):
        request = Flaky(1, InvalidRequest("no"))
        with pytest.raises(InvalidRequest):
            retried(request)
        assert request.calls == 1


def test_the_options_have_kafkas_names_and_defaults() -> None:
    assert RetryPolicy.of(Options({})) == RetryPolicy(3, 0.01, 120.0)
    given = {"fetchOffset.numRetries": "0", "fetchOffset.retryIntervalMs": "5", "kafkaConsumer.pollTimeoutMs": "700"}
    assert RetryPolicy.of(Options(given)) == RetryPolicy(0, 0.005, 0.7)
