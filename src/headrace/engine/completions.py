"""Completions of flushes, passed from the writer thread to the event loop.

The loop is woken by a descriptor for the reason that `headrace.storage.wakeup` gives. `call_soon_threadsafe` would wake it with the
interpreter held.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from headrace.storage.staged import Completion


class Completions:
    """Calls the completions of each flush on the event loop, then those who watch a log that has grown."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._flushes: deque[tuple[list[Completion], list[int]]] = deque()
        self._watchers: dict[int, set[Callable[[], None]]] = {}
        self._event = os.eventfd(0, os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._flushed)

    def deliver(self, completions: list[Completion], advanced: list[int]) -> None:
        """Take the results of a whole flush and the logs whose end moved. Any thread may call this."""
        self._flushes.append((completions, advanced))
        os.eventfd_write(self._event, 1)

    def _flushed(self) -> None:
        os.eventfd_read(self._event)
        self._complete()

    def _complete(self) -> None:
        for _ in range(len(self._flushes)):
            completions, advanced = self._flushes.popleft()
            try:
                for done, result in completions:
                    done(result)
                if self._watchers:
                    for log in self._watchers.keys() & advanced:
                        self.wake(log)
            except Exception as failure:
                # A defect must not cost other flushes their replies.
                self._loop.call_exception_handler({"message": "the completion of an append failed", "exception": failure})

    def watch(self, log: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` whenever the log has grown, until the returned function is called."""
        self._watchers.setdefault(log, set()).add(wake)

        def unwatch() -> None:
            watching = self._watchers.get(log)
            if watching is not None:
                watching.discard(wake)
                if not watching:
                    del self._watchers[log]

        return unwatch

    def wake(self, log: int) -> None:
        """Call those who watch this log."""
        for wake in list(self._watchers.get(log, ())):
            wake()

    def forget(self, log: int) -> None:
        """Drop those who watch a deleted log."""
        self._watchers.pop(log, None)

    def close(self) -> None:
        """Call the remaining completions. The store is closed."""
        self._loop.remove_reader(self._event)
        self._complete()
        os.close(self._event)
