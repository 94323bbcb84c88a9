"""Timers as an argument, so that a test can turn the clock by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias


class Timer(Protocol):
    """What `asyncio.loop.call_later` returns; only `cancel` is used."""

    def cancel(self) -> None: ...


Later: TypeAlias = Callable[[float, Callable[[], object]], Timer]
"""Seconds from now, and what to call then: the shape of `asyncio.loop.call_later`."""

Clock: TypeAlias = Callable[[], int]
"""Unix time in milliseconds."""
