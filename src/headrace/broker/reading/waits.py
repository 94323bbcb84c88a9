"""Waiting for records: one caller, at most one timer, woken as often as there may be something new."""

from __future__ import annotations

import asyncio

from headrace.broker.timers import Later
from headrace.errors import BrokerError
from headrace.limits import FETCH_WAIT_MS_MAX


class Wait:
    """Register it first and look once more before the first `for_more`: a wake-up between two looks is kept, never lost."""

    def __init__(self, later: Later, wait_ms: int) -> None:
        self._is_over = False
        self._error: BrokerError | None = None
        self._woken = asyncio.Event()
        self._timer = later(min(wait_ms, FETCH_WAIT_MS_MAX) / 1000, self.end)

    def wake(self) -> None:
        """There may be something."""
        self._woken.set()

    def end(self, error: BrokerError | None = None) -> None:
        """There is no point in waiting any longer; with an error, because of that."""
        self._is_over = True
        self._error = error
        self._woken.set()

    async def for_more(self) -> bool:
        """True when it is worth looking again, False when the time is over."""
        await self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error
        return not self._is_over

    def stop(self) -> None:
        self._timer.cancel()
