"""Health of the threads and tasks that work in the background: which of them fail, why, and how often in a row.

A background step that fails is reported here and retried with backoff. The state is `ok` while the last attempt of every step
succeeded, `degraded` while a step is being retried, and `failed` once writing has ended. Reports come from any thread.
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
"""Unexpected failures in a row, about four minutes with the backoff between them, after which a step of the log is given up."""


class HealthState(enum.Enum):
    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Problem:
    """A background step that fails."""

    step: str
    reason: str
    failures: int
    """In a row."""

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
        """Called, on any thread, when a step begins to fail, recovers, or ends writing."""

    def report(self) -> HealthReport:
        with self._lock:
            return self._report()

    def _report(self) -> HealthReport:
        problems = tuple(self._problems.values())
        if self._ended is not None:
            return HealthReport(HealthState.FAILED, (self._ended, *problems))
        return HealthReport(HealthState.DEGRADED if problems else HealthState.OK, problems)

    def failures(self, step: str) -> int:
        """How often a step has failed in a row; 0 if its last attempt succeeded."""
        problem = self._problems.get(step)
        return problem.failures if problem else 0

    def failed(self, step: str, reason: str) -> int:
        """A step failed and will be retried. Returns how often it has failed in a row."""
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
        """Writing has ended for good."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = Problem("writing", reason, 1)
            report = self._report()
        self.changed(report)


def retry_seconds(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return float(min(RETRY_SECONDS_MIN * 2 ** min(failures - 1, 10), RETRY_SECONDS_MAX))
