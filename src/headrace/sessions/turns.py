"""Scheduler for expensive steps of all connections: one step in each turn of the event loop.

A hundred readers of a deep backlog may be ready at once. Without this scheduler the loop would encode a hundred replies before it polls a
socket again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.limits import FETCHES_AT_ONCE_MAX, OUTPUT_HIGH_WATER_BYTES
from headrace.sessions.contract import Link


class Turn:
    """A waiting step."""

    __slots__ = ("step",)

    def __init__(self, step: Callable[[], None]) -> None:
        self.step: Callable[[], None] | None = step

    def cancel(self) -> None:
        """Do not call the step, if it has not been called yet."""
        self.step = None


class Turns:
    """Queue of the waiting steps. Each broker has one, shared by its sessions."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._is_scheduled = False
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE_MAX)

    @asynccontextmanager
    async def fetching(self, link: Link) -> AsyncIterator[bool]:
        """Hold one of the few fetch slots. The caller must send what it fetched before it releases the slot.

        Yields False if the peer's output is above the high-water mark by the time a slot is free. The caller then waits for `drained` and
        tries again.
        """
        async with self._fetches:
            yield link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES

    def take(self, step: Callable[[], None]) -> Turn:
        """Call `step` in a later turn of the loop, in the order of the calls."""
        turn = Turn(step)
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
