"""Serve expensive steps of all connections one after the other, one in each turn of the event loop.

A hundred readers of a deep backlog are ready at once. If each were served as soon as it is ready, the loop would encode a hundred replies
before it looks at a socket again. Between two turns everybody else is served.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.limits import FETCHES_AT_ONCE_MAX, OUTPUT_HIGH_WATER_BYTES
from headrace.sessions.contract import Link


class Turn:
    """A step that waits."""

    __slots__ = ("step",)

    def __init__(self, step: Callable[[], None]) -> None:
        self.step: Callable[[], None] | None = step

    def cancel(self) -> None:
        """The step is not taken, if it has not been."""
        self.step = None


class Turns:
    """One for each broker, shared by its sessions."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._is_scheduled = False
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE_MAX)

    @asynccontextmanager
    async def fetching(self, link: Link) -> AsyncIterator[bool]:
        """Hold one of the few places for a fetch; what is fetched has to be sent before the place is left.

        Yields False, without a place to hold, if the peer is not to be fed any more when there is one: many may have found that it is
        before the first of them has sent anything. Whoever gets it waits for `drained` and asks again.
        """
        async with self._fetches:
            yield link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES

    def take(self, step: Callable[[], None]) -> Turn:
        """Call `step` when it is its turn: in the order of the calls, never before this one returns."""
        turn = Turn(step)
        self._waiting.append(turn)
        self._schedule()
        return turn

    async def wait(self) -> None:
        """Return when it is the caller's turn; what it does before it waits again is its step."""
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
