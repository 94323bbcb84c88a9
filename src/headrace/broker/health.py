"""Health of the broker: supervision of its background tasks, and its status.

No caller awaits these tasks, so their exceptions would go unnoticed. `supervise` reports the outcome of a task to the engine's health,
which `Broker.status` shows. A task handles the errors it expects (a full disk); after an unexpected one, the timer that started the
task starts it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.engine.contract import Health, HealthReport


@dataclass(frozen=True, slots=True)
class Status:
    """Counts over all topics except the internal ones."""

    uptime_ms: int
    topics: int
    records: int
    """Records currently stored."""
    written: int
    """Records ever written."""
    health: HealthReport
    """Health of the broker's threads and tasks."""


def supervise(health: Health, step: str, task: asyncio.Task[Any]) -> None:
    """Report the outcome of `task` as that of `step`."""
    task.add_done_callback(partial(_ended, health, step))


def _ended(health: Health, step: str, task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    failure = task.exception()
    if failure is None:
        health.succeeded(step)
    else:
        health.failed(step, repr(failure))
