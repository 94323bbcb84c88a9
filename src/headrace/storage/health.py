"""Health of background threads and tasks: failing steps, their reasons and the number of consecutive failures.

A failing background step is reported here and retried with backoff. The state is `ok` while the last attempt of every step succeeded,
`degraded` while a step is being retried, and `failed` once writing has stopped. Any thread may report.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

RETRY_SECONDS_MIN: Final = 0.5
RETRY_SECONDS_MAX: Final = 15.0
FAILURES_MAX: Final = 20
"""Consecutive unexpected failures, about four minutes with backoff, after which the log gives up a step."""


class HealthState(enum.Enum):
    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Problem:
    """A failing background step."""

    step: str
    reason: str
    failures: int
    """Consecutive failures."""

    def __str__(self) -> str:
        return f"{self.step}: {self.reason} ({self.failures} failures in a row)"


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The health at one moment."""

    state: HealthState
    problems: tuple[Problem, ...] = ()


class Health:
    """Collects the outcomes of background steps."""

    def __init__(self) -> None:
        self._problems: dict[str, Problem] = {}
        self._ended: Problem | None = None
        self._lock = threading.Lock()
        self.changed: Callable[[HealthReport], None] = lambda report: None
        """Called on any thread when a step starts to fail, recovers, or stops writing."""

    def report(self) -> HealthReport:
        with self._lock:
            return self._report()

    def _report(self) -> HealthReport:
        problems = tuple(self._problems.values())
        if self._ended is not None:
            return HealthReport(HealthState.FAILED, (self._ended, *problems))
        return HealthReport(HealthState.DEGRADED if problems else HealthState.OK, problems)

    def failures(self, step: str) -> int:
        """Return the consecutive failures of a step; 0 if its last attempt succeeded."""
        problem = self._problems.get(step)
        return problem.failures if problem else 0

    def failed(self, step: str, reason: str) -> int:
        """Report a failure that will be retried. Returns the number of consecutive failures."""
        with self._lock:
            before = self._problems.get(step)
            failures = before.failures + 1 if before else 1
            self._problems[step] = Problem(step, reason, failures)
            report = self._report()
        if before is None or before.reason != reason:
            self.changed(report)
        return failures

    def succeeded(self, step: str) -> None:
        if step not in self._problems:
            return
        with self._lock:
            self._problems.pop(step, None)
            report = self._report()
        self.changed(report)

    def ended(self, reason: str) -> None:
        """Report that writing has stopped permanently."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = Problem("writing", reason, 1)
            report = self._report()
        self.changed(report)


def retry_seconds(failures: int) -> float:
    """Return the pause after this many consecutive failures."""
    return float(min(RETRY_SECONDS_MIN * 2 ** min(failures - 1, 10), RETRY_SECONDS_MAX))
