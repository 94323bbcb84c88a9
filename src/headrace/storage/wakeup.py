"""Wake-ups between two threads that share the interpreter.

A lock is released with the interpreter held. The kernel often runs the woken thread at once, on the same processor, and that thread then
waits for the interpreter: both threads sleep and wake three times before it goes on. A system call on a descriptor gives the interpreter up
first, so the woken thread finds it free.
"""

from __future__ import annotations

import os
from typing import Final

_COUNTER_BYTES: Final = 8


class Wakeup:
    """Wakes the one thread that waits. Any thread may call `wake`."""

    __slots__ = ("_event", "_is_due", "_is_waiting")

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_due = self._is_waiting = False

    def wake(self) -> None:
        """End the wait, or the next one if no thread waits now."""
        self._is_due = True
        if self._is_waiting:
            self._is_waiting = False
            os.eventfd_write(self._event, 1)

    def wait(self) -> None:
        """Wait for a wake-up. It may also return without one."""
        self._is_waiting = True
        # After `_is_waiting`: a wake-up in between sees it and writes, or is seen here.
        if not self._is_due:
            os.read(self._event, _COUNTER_BYTES)  # `os.eventfd_read` fails when a signal arrives
        self._is_due = self._is_waiting = False

    def forget(self) -> None:
        """Drop a wake-up that came since the last wait. The caller looks for the work that it announced."""
        self._is_due = False

    def close(self) -> None:
        """Close the descriptor. No thread waits any more."""
        os.close(self._event)
