"""Replies in the order of their requests, although some are known later than others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slot:
    """The place of one reply. `frames` is None until it is known; it may turn out to be nothing at all."""

    __slots__ = ("frames",)

    def __init__(self) -> None:
        self.frames: bytes | None = None


class Outbox:
    """Holds a reply back until every reply before it is known.

    A publish takes a slot until it is durable, whether or not it will have anything to say. That makes a PONG the barrier it
    is meant to be: it stands behind the slots of all earlier publishes, so it leaves when they are durable and not before.
    """

    __slots__ = ("_ready", "_send", "_slots", "_waiters")

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._slots: deque[Slot] = deque()
        self._ready: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def owed(self) -> int:
        """Replies that have not left: unknown, or behind one that is."""
        return len(self._slots)

    @property
    def is_settled(self) -> bool:
        return not self._slots

    def reserve(self) -> Slot:
        slot = Slot()
        self._slots.append(slot)
        return slot

    def fill(self, slot: Slot, frames: bytes) -> None:
        """The reply of that slot is known; what it held back leaves."""
        slot.frames = frames
        slots, ready = self._slots, self._ready
        while slots and (known := slots[0].frames) is not None:
            ready.append(known)
            slots.popleft()
        self.flush()
        if not slots:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    def reply(self, frames: bytes) -> None:
        """A reply that is known now. It leaves with the next `flush`, or with the slot it has to wait for."""
        if self._slots:
            self.reserve().frames = frames
        else:
            self._ready.append(frames)

    def flush(self) -> None:
        """One send for everything that is ready."""
        if self._ready:
            frames = b"".join(self._ready)
            self._ready.clear()
            if frames:
                self._send(frames)

    async def settled(self) -> None:
        """Wait until no reply is owed."""
        if self._slots:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
