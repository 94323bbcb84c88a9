"""Replies in the order of their requests, even if a later reply is known first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slot:
    """Place of one reply. `frames` is None until the reply is known, and may be empty."""

    __slots__ = ("frames",)

    def __init__(self) -> None:
        self.frames: bytes | None = None


class Outbox:
    """Holds a reply back until every earlier reply is known.

    A publish occupies a slot until it is durable, even if it gets no reply. A PONG waits behind the slots of all earlier publishes, so it
    confirms that they are durable.
    """

    __slots__ = ("_ready", "_send", "_slots", "_waiters")

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._slots: deque[Slot] = deque()
        self._ready: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def owed(self) -> int:
        """Number of replies that have not been sent."""
        return len(self._slots)

    @property
    def is_settled(self) -> bool:
        return not self._slots

    def reserve(self) -> Slot:
        slot = Slot()
        self._slots.append(slot)
        return slot

    def fill(self, slot: Slot, frames: bytes) -> None:
        """Set the reply of the slot, and send the replies that waited for it."""
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
        """Queue a known reply. It leaves with the next `flush`, or after the slots before it."""
        if self._slots:
            self.reserve().frames = frames
        else:
            self._ready.append(frames)

    def flush(self) -> None:
        """Send everything that is ready in one call."""
        if self._ready:
            frames = b"".join(self._ready)
            self._ready.clear()
            if frames:
                self._send(frames)

    async def settled(self) -> None:
        """Wait until all replies are sent."""
        if self._slots:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
