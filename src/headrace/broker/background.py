"""Supervision of the broker's background tasks.

No caller awaits these tasks, so their exceptions would go unnoticed. `supervise` reports the outcome of a task to the engine's health,
which `Broker.status` shows. A task handles the errors it expects (a full disk); after an unexpected one, the timer that started the
task starts it again.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from headrace.engine.contract import Health


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
