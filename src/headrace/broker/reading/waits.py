"""Waits of readers: for records at the end of a partition, and for the end offsets of partitions to move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeAlias

from headrace.broker.settings import Later
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, Unavailable, UnknownTopic
from headrace.limits import FETCH_WAIT_MS_MAX

Ends: TypeAlias = Mapping[str, Mapping[int, int]]
"""Topic → partition → known end offset."""


class Wait:
    """A wait with an optional deadline. Register it, then look once more before the first `for_more`: a wake-up between two looks is
    kept."""

    def __init__(self, later: Later, wait_ms: int) -> None:
        self._is_over = False
        self._error: BrokerError | None = None
        self._woken = asyncio.Event()
        self._timer = later(min(wait_ms, FETCH_WAIT_MS_MAX) / 1000, self.end)

    def wake(self) -> None:
        """Signal that there may be records."""
        self._woken.set()

    def end(self, error: BrokerError | None = None) -> None:
        """End the wait, with an error if one is given."""
        self._is_over = True
        self._error = error
        self._woken.set()

    async def for_more(self) -> bool:
        """Return True when it is worth looking again, False when the time is over."""
        await self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error
        return not self._is_over

    def stop(self) -> None:
        self._timer.cancel()


class Watermarks:
    """Callers that wait for the end offset of a partition to move. Each waits for any number of topics and reads no records."""

    def __init__(self, engine: Engine, *, later: Later, waiting_max: int) -> None:
        self._engine = engine
        self._later = later
        self._waiting_max = waiting_max
        self._waiting: dict[Wait, Ends] = {}
        self._is_draining = False

    def have_moved(self, ends: Ends) -> bool:
        """Return whether a partition has grown beyond its known end or is unknown. Raises `UnknownTopic`."""
        for name, known in ends.items():
            topic = self._engine.topics().get(name)
            if topic is None:
                raise UnknownTopic(name)
            for partition in range(topic.partitions):
                if partition not in known or self._engine.bounds(name, partition).end > known[partition]:
                    return True
        return False

    async def moved(self, ends: Ends, wait_ms: int) -> bool:
        """Return True as soon as an end moves, False when the time is over first."""
        if wait_ms <= 0 or self._is_draining or self.have_moved(ends):
            return self.have_moved(ends)
        if len(self._waiting) >= self._waiting_max:
            raise Unavailable(f"{self._waiting_max} callers are waiting already")
        wait = Wait(self._later, wait_ms)
        unwatch: list[Callable[[], None]] = []
        try:
            self._waiting[wait] = ends
            for name, known in ends.items():
                unwatch += [self._engine.watch(name, partition, wait.wake) for partition in known if self._has(name, partition)]
            while not self.have_moved(ends):
                if not await wait.for_more():
                    return self.have_moved(ends)
            return True
        finally:
            wait.stop()
            del self._waiting[wait]
            for stop in unwatch:
                stop()

    def _has(self, name: str, partition: int) -> bool:
        topic = self._engine.topics().get(name)
        return topic is not None and partition < topic.partitions

    def topic_changed(self, name: str) -> None:
        """Wake the waiting callers: the topic may have more partitions."""
        for wait, ends in self._waiting.items():
            if name in ends:
                wait.wake()

    def topic_gone(self, gone: UnknownTopic) -> None:
        for wait, ends in self._waiting.items():
            if gone.topic in ends:
                wait.end(gone)

    def drain(self) -> None:
        """Answer all waiting callers now."""
        self._is_draining = True
        for wait in self._waiting:
            wait.end()
