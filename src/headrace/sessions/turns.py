"""Turns at work that is expensive for everybody: so many at a time over all connections, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Turns:
    """`async with turns:` waits for a turn. A waiter that is cancelled loses its place. Not bound to one event loop, so that it may be
    shared by everything in a process."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
