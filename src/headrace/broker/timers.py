"""Timers passed as an argument, so that tests control the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias


class Timer(Protocol):
    """Return type of `asyncio.loop.call_later`; only `cancel` is used."""

    def cancel(self) -> None: ...


Later: TypeAlias = Callable[[float, Callable[[], object]], Timer]
"""Seconds from now and a callback: the signature of `asyncio.loop.call_later`."""

Clock: TypeAlias = Callable[[], int]
"""Unix time in milliseconds."""
