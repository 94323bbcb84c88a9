"""Polling for conditions without an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

WAIT_SECONDS: Final = 300.0


async def until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds. Raises `TimeoutError` after `WAIT_SECONDS`."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110  (what is waited for lies behind a socket)
            await asyncio.sleep(0.002)
