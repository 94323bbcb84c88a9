"""Limits on expensive work of all connections together: one step in each turn of the event loop, and few slots for what takes longer.

A hundred readers of a deep backlog may be ready at once. Without this scheduler the loop would encode a hundred replies before it polls a
socket again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.limits import FETCHES_AT_ONCE_MAX, FLYMQ_INFLATIONS_MAX

_BUSY_SECONDS: Final = 0.05
"""Longest pause between steps that count as one stretch of work."""


class Turn:
    """A waiting step."""

    __slots__ = ("step",)

    def __init__(self, step: Callable[[], None]) -> None:
        self.step: Callable[[], None] | None = step

    def cancel(self) -> None:
        """Do not call the step, if it has not been called yet."""
        self.step = None


class Turns:
    """Queue of the waiting steps, and the slots. Each broker has one, shared by its sessions. Slots are given first come, first served.

    `busy` is called with True at the first step, and with False when there was none for a while.
    """

    def __init__(self, busy: Callable[[bool], None] = lambda is_busy: None) -> None:
        self._busy = busy
        self._is_busy = self._had_step = False
        self._waiting: deque[Turn] = deque()
        self._is_scheduled = False
        self.fetches = asyncio.Semaphore(FETCHES_AT_ONCE_MAX)
        """Slots of fetches, from the read to the send: their memory does not count as output yet."""
        self.inflations = asyncio.Semaphore(FLYMQ_INFLATIONS_MAX)
        """Slots of threads that decompress."""
        self.searches = asyncio.Semaphore(1)
        """Slot of the search that uses the processor."""

    def take(self, step: Callable[[], None]) -> Turn:
        """Call `step` in a later turn of the loop, in the order of the calls."""
        turn = Turn(step)
        self._had_step = True
        if not self._is_busy:
            self._look_for_steps()
        self._waiting.append(turn)
        self._schedule()
        return turn

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = self.take(lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            turn.cancel()

    def _look_for_steps(self) -> None:
        """Report when the steps begin, and when they have ended. One change of the report for each would cost more than a short step."""
        had_step, self._had_step = self._had_step, False
        if had_step is not self._is_busy:
            self._is_busy = had_step
            self._busy(had_step)
        if had_step:
            asyncio.get_running_loop().call_later(_BUSY_SECONDS, self._look_for_steps)

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_scheduled = False
        while self._waiting:
            step = self._waiting.popleft().step
            if step is not None:
                self._schedule()
                step()
                return
