"""Limit on concurrent expensive work over all connections, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Slots:
    """`async with slots:` waits for a free slot. Cancelling a waiter removes it from the queue. Not bound to one event loop, so one
    instance serves the whole process."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._pass_on()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
