"""Limit for the unsent bytes of all connections together.

Each connection has its own limit, but ten thousand peers that never read would use ten thousand times as much. Above the common limit,
connections with unsent bytes get no more output; from a quarter above it, no connection does. Peers that have read nothing for a while
are then disconnected, the one with the most unsent bytes first. Connections that had to wait resume in the order they came.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from headrace.limits import OUTPUT_BUFFER_BYTES_MAX, OUTPUT_CHECK_SECONDS, OUTPUT_FREE_BYTES, OUTPUT_STALL_SECONDS

_HARD_QUARTERS: Final = 5
"""From this many quarters of the limit on, connections without unsent bytes wait too."""


class Holder(Protocol):
    """A connection with unsent bytes."""

    @property
    def waiting_bytes(self) -> int:
        """The unsent bytes."""

    @property
    def kept_bytes(self) -> int:
        """The memory in use: a partly sent write stays in memory as a whole."""

    def feed(self) -> None:
        """Resume output."""

    def disconnect(self, reason: str) -> None:
        """Close immediately and drop the unsent bytes."""


class _Entry:
    __slots__ = ("progressed", "size_bytes", "waiting_bytes")

    def __init__(self, now: float) -> None:
        self.size_bytes = self.waiting_bytes = 0
        self.progressed = now
        """When the peer last read something."""


class OutputBudget:
    """The limit, shared by all listeners of a server. A connection with at most `OUTPUT_FREE_BYTES` unsent is not counted."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.disconnected = 0
        self._bytes_max = 0
        self._entries: dict[Holder, _Entry] = {}
        self._waiting: dict[Holder, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._feeding: asyncio.Handle | None = None

    def update(self, holder: Holder, kept_bytes: int, bytes_max: int) -> None:
        """Set the memory in use by this connection; `bytes_max` is the limit for all of them."""
        entry = self._entries.get(holder)
        if entry is None:
            if kept_bytes <= OUTPUT_FREE_BYTES:
                return
            loop = asyncio.get_running_loop()
            entry = self._entries[holder] = _Entry(loop.time())
            self._bytes_max = bytes_max
            if self._timer is None:
                self._timer = loop.call_later(OUTPUT_CHECK_SECONDS, self._check)
        self.unsent_bytes += kept_bytes - entry.size_bytes
        entry.size_bytes = kept_bytes
        self._feed_soon()

    def left(self, holder: Holder) -> None:
        """Remove a closed connection."""
        entry = self._entries.pop(holder, None)
        if entry is not None:
            self.unsent_bytes -= entry.size_bytes
        self._waiting.pop(holder, None)
        self._feed_soon()

    def must_wait(self, holder: Holder, unsent_bytes: int, bytes_max: int) -> bool:
        """Return whether this connection must wait. If so, `feed` is called when it may resume."""
        quarters = 4 if unsent_bytes else _HARD_QUARTERS
        if self.unsent_bytes * 4 <= bytes_max * quarters:
            return False
        self._waiting[holder] = None
        return True

    def _check(self) -> None:
        """Update all entries: a transport does not report that it has sent a part of its buffer."""
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
            self._timer = loop.call_later(OUTPUT_CHECK_SECONDS, self._check)

    def _make_room(self, now: float) -> None:
        stalled = [(entry.size_bytes, now - entry.progressed, holder) for holder, entry in self._entries.items()]
        stalled = [entry for entry in stalled if entry[1] >= OUTPUT_STALL_SECONDS]
        for size_bytes, seconds, holder in sorted(stalled, key=lambda entry: entry[0], reverse=True):
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
        """Schedule `_feed`: the caller is not reentrant."""
        if self._waiting and self._feeding is None and self.unsent_bytes <= self._bytes_max:
            self._feeding = asyncio.get_running_loop().call_soon(self._feed)

    def _feed(self) -> None:
        """Resume as many waiting connections as there is room for if each fills its buffer."""
        self._feeding = None
        room = self._bytes_max - self.unsent_bytes
        for holder in list(self._waiting)[: max(0, 1 + room // OUTPUT_BUFFER_BYTES_MAX) if room >= 0 else 0]:
            self._waiting.pop(holder, None)
            holder.feed()
