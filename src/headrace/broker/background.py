"""Supervision of the broker's background tasks.

Nobody awaits these tasks, so an exception in one of them would be seen by nobody. `supervise` reports the outcome of a task to the
health of the engine, which `Broker.status` shows. What a task does about an error it expects (a full disk) is its own affair; an
unexpected one is retried by the timer that started the task.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from headrace.engine.contract import Health


def supervise(health: Health, step: str, task: asyncio.Task[Any]) -> None:
    """Report how `task` ends as the outcome of `step`."""
    task.add_done_callback(partial(_ended, health, step))


def _ended(health: Health, step: str, task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    failure = task.exception()
    if failure is None:
        health.succeeded(step)
    else:
        health.failed(step, repr(failure))
