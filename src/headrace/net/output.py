"""One bound for what waits unsent on all connections together.

Each connection has bounds of its own, but ten thousand peers that ask and never read would hold ten thousand times as much. Above the
common bound a connection that has unsent bytes is not fed further ones, and from a quarter above it nobody is; a peer that has taken
nothing for a while is disconnected then, the one with the most unsent bytes first. Those that had to wait are fed again in the order
they came.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from headrace.limits import OUTPUT_BUFFER_BYTES_MAX, OUTPUT_CHECK_SECONDS, OUTPUT_FREE_BYTES, OUTPUT_STALL_SECONDS

_HARD_QUARTERS: Final = 5
"""From so many quarters of the bound on, not even those are fed who have nothing unsent."""


class Holder(Protocol):
    """A connection with unsent bytes."""

    @property
    def waiting_bytes(self) -> int:
        """What waits unsent now."""

    @property
    def kept_bytes(self) -> int:
        """What is held in memory for it: a write that was taken in part is held as a whole."""

    def feed(self) -> None:
        """Go on: there is room again."""

    def disconnect(self, reason: str) -> None:
        """End at once; what is unsent is lost."""


class _Entry:
    __slots__ = ("progressed", "size_bytes", "waiting_bytes")

    def __init__(self, now: float) -> None:
        self.size_bytes = self.waiting_bytes = 0
        self.progressed = now
        """When the peer was last seen to take something."""


class OutputBudget:
    """Shared by all listeners of a server. A connection with less than `OUTPUT_FREE_BYTES` unsent is not counted."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.disconnected = 0
        self._bytes_max = 0
        self._entries: dict[Holder, _Entry] = {}
        self._waiting: dict[Holder, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._feeding: asyncio.Handle | None = None

    def update(self, holder: Holder, kept_bytes: int, bytes_max: int) -> None:
        """Count what is kept for this connection now; `bytes_max` is the bound for all of them."""
        entry = self._entries.get(holder)
        if entry is None:
            if kept_bytes <= OUTPUT_FREE_BYTES:
                return
            loop = asyncio.get_running_loop()
            entry = self._entries[holder] = _Entry(loop.time())
            self._bytes_max = bytes_max
            if self._timer is None:
                self._timer = loop.call_later(OUTPUT_CHECK_SECONDS, self._look)
        self.unsent_bytes += kept_bytes - entry.size_bytes
        entry.size_bytes = kept_bytes
        self._feed_soon()

    def left(self, holder: Holder) -> None:
        """The connection is gone."""
        entry = self._entries.pop(holder, None)
        if entry is not None:
            self.unsent_bytes -= entry.size_bytes
        self._waiting.pop(holder, None)
        self._feed_soon()

    def has_to_wait(self, holder: Holder, unsent_bytes: int, bytes_max: int) -> bool:
        """Whether this connection must not be fed now. If so, its `feed` is called when it may be."""
        quarters = 4 if unsent_bytes else _HARD_QUARTERS
        if self.unsent_bytes * 4 <= bytes_max * quarters:
            return False
        self._waiting[holder] = None
        return True

    def _look(self) -> None:
        """Count anew: a transport tells nobody when it has sent a part of what it holds."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = None
        for holder, entry in list(self._entries.items()):
            waiting_bytes, kept_bytes = holder.waiting_bytes, holder.kept_bytes
            if waiting_bytes < entry.waiting_bytes:
                entry.progressed = now
            entry.waiting_bytes = waiting_bytes
            self.unsent_bytes += kept_bytes - entry.size_bytes
            entry.size_bytes = kept_bytes
            if kept_bytes <= OUTPUT_FREE_BYTES:
                self.unsent_bytes -= kept_bytes
                del self._entries[holder]
        if self.unsent_bytes > self._bytes_max:
            self._make_room(now)
        self._feed()
        if self._entries or self._waiting:
            self._timer = loop.call_later(OUTPUT_CHECK_SECONDS, self._look)

    def _make_room(self, now: float) -> None:
        stalled = [(entry.size_bytes, now - entry.progressed, holder) for holder, entry in self._entries.items()]
        stalled = [found for found in stalled if found[1] >= OUTPUT_STALL_SECONDS]
        for size_bytes, seconds, holder in sorted(stalled, key=lambda found: found[0], reverse=True):
            if self.unsent_bytes <= self._bytes_max:
                return
            self.disconnected += 1
            total_bytes = self.unsent_bytes
            self.left(holder)
            holder.disconnect(
                f"peer does not read: {size_bytes} bytes unsent, nothing taken for {seconds:.0f} s, "
                f"and all connections together have {total_bytes} bytes unsent"
            )

    def _feed_soon(self) -> None:
        """Not now: whoever reports is in the middle of something."""
        if self._waiting and self._feeding is None and self.unsent_bytes <= self._bytes_max:
            self._feeding = asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        """Let some of those go on that had to wait, as many as there is room for if each takes a whole buffer."""
        self._feeding = None
        room = self._bytes_max - self.unsent_bytes
        for holder in list(self._waiting)[: max(0, 1 + room // OUTPUT_BUFFER_BYTES_MAX) if room >= 0 else 0]:
            self._waiting.pop(holder, None)
            holder.feed()
