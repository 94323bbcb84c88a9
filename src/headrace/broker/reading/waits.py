"""Wait for records: one caller and at most one timer, woken each time there may be new records."""

from __future__ import annotations

import asyncio

from headrace.broker.timers import Later
from headrace.errors import BrokerError
from headrace.limits import FETCH_WAIT_MS_MAX


class Wait:
    """A wait with an optional deadline. Register it, then look once more before the first `for_more`: a wake-up between two looks is
    kept."""

    def __init__(self, later: Later, wait_ms: int) -> None:
        self._is_over = False
        self._error: BrokerError | None = None
        self._woken = asyncio.Event()
        self._timer = later(min(wait_ms, FETCH_WAIT_MS_MAX) / 1000, self.end)

    def wake(self) -> None:
        """Signal that there may be records."""
        self._woken.set()

    def end(self, error: BrokerError | None = None) -> None:
        """End the wait, with an error if one is given."""
        self._is_over = True
        self._error = error
        self._woken.set()

    async def for_more(self) -> bool:
        """Return True when it is worth looking again, False when the time is over."""
        await self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error
        return not self._is_over

    def stop(self) -> None:
        self._timer.cancel()
