"""Network counters: plain integers that the metrics read.

Connection limits: in total, per address and per user, with a reserve for administrators.

When the regular slots are in use, a few reserved slots remain. A connection in a reserved slot must log in as an administrator before
the login deadline. One address gets only a part of the reserve, so that a single address cannot lock administrators out.

Limit for the unsent bytes of all connections together.

Each connection has its own limit, but ten thousand peers that never read would use ten thousand times as much. Above the common limit,
connections with unsent bytes get no more output; from a quarter above it, no connection does. Peers that have read nothing for a while
are then disconnected, the one with the most unsent bytes first. Connections that had to wait resume in the order they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from headrace.limits import END_LINES_PER_MINUTE_MAX, OUTPUT_BUFFER_BYTES_MAX, OUTPUT_CHECK_SECONDS, OUTPUT_FREE_BYTES, OUTPUT_STALL_SECONDS

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


class Slot(Enum):
    """The kind of slot that a connection occupies."""

    REGULAR = "regular"
    RESERVED = "reserved"
    """Only an administrator may keep it."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`reserved` of `connections_max` are for administrators. 0 `per_user_max`: no limit."""

    connections_max: int
    per_ip_max: int
    per_user_max: int
    reserved: int

    @property
    def regular_max(self) -> int:
        return max(1, self.connections_max - self.reserved)

    @property
    def reserved_per_ip_max(self) -> int:
        return max(1, self.reserved // 4)


def admit(limits: AdmissionLimits, counters: NetCounters, host: str) -> Slot | str:
    """Return the slot of a new connection from this host, or the reason for rejecting it."""
    reason = _full(limits, counters, host)
    if reason is None:
        return Slot.REGULAR
    is_room = counters.open < limits.connections_max and counters.reserved_open < limits.reserved
    if is_room and counters.reserved_by_host.get(host, 0) < limits.reserved_per_ip_max:
        return Slot.RESERVED
    return reason


def _full(limits: AdmissionLimits, counters: NetCounters, host: str) -> str | None:
    if counters.open - counters.reserved_open >= limits.regular_max:
        return f"too many connections: {limits.regular_max} are open"
    if counters.open_by_host.get(host, 0) - counters.reserved_by_host.get(host, 0) >= limits.per_ip_max:
        return f"too many connections from one address: {limits.per_ip_max} are open"
    return None


def log_in(limits: AdmissionLimits, counters: NetCounters, host: str, slot: Slot, user: str, *, is_admin: bool) -> Slot | str:
    """Return the slot of a connection after its login, or the reason for closing it. The caller counts it for the user."""
    if is_admin:
        return slot
    if limits.per_user_max and counters.open_by_user.get(user, 0) >= limits.per_user_max:
        return f"too many connections of one user: {limits.per_user_max} are open"
    if slot is Slot.REGULAR:
        return slot
    reason = _full(limits, counters, host)
    return Slot.REGULAR if reason is None else f"{reason}, and the rest is reserved for administrators"


LINE_KEYS_MAX: Final = 1_024
"""Reasons whose log lines are counted. The one that was logged longest ago leaves first."""
REASONS_MAX: Final = 128
"""Distinct reasons counted by name. Further ones count as `other`, so that peers cannot grow the table."""


class LineLimit:
    """Limits the log lines about one thing to a few a minute. The next line tells how many were left out."""

    def __init__(self, lines_max: int = END_LINES_PER_MINUTE_MAX) -> None:
        self._lines_max = lines_max
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """By key: start of the minute, lines since then."""

    def left_out(self, key: Hashable, now: float) -> int | None:
        """Return the number of lines left out since the last one, or None to leave this one out too."""
        began, count = self._lines.pop(key, (now, 0))
        fresh = now - began >= 60
        self._lines[key] = (now, 1) if fresh else (began, count + 1)
        if len(self._lines) > LINE_KEYS_MAX:
            del self._lines[next(iter(self._lines))]
        if not fresh and count >= self._lines_max:
            return None
        return max(0, count - self._lines_max) if fresh else 0


@dataclass(slots=True)
class NetCounters:
    """Counters shared by all listeners of a server, so that the connection limits apply to all of them together."""

    accepted: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    opened_with_tls: int = 0
    reading_pauses: int = 0
    """Times that reading paused because a peer sent faster than the broker could write, or did not read its replies."""
    accept_pauses: int = 0
    """Times that accepting paused because file descriptors or memory were exhausted."""
    relayed: int = 0
    """Connections that were handed over to the coordinator."""
    relays_open: int = 0
    reserved_open: int = 0
    """Open connections in the reserve for administrators."""
    unfinished_bytes: int = 0
    """Received bytes of incomplete frames."""
    opened_by_protocol: dict[str, int] = field(default_factory=dict)
    open_by_protocol: dict[str, int] = field(default_factory=dict)
    open_by_host: dict[str, int] = field(default_factory=dict)
    open_by_user: dict[str, int] = field(default_factory=dict)
    """Connections that have logged in, without those of administrators."""
    reserved_by_host: dict[str, int] = field(default_factory=dict)
    output: OutputBudget = field(default_factory=OutputBudget)
    end_lines: LineLimit = field(default_factory=LineLimit)
    closed: dict[str, int] = field(default_factory=dict)
    """Connections that ended normally, by reason."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Connections that ended with an error of the peer or the broker, by reason."""

    def count_end(self, reason: str, *, error: bool) -> None:
        """Count the end of a connection under the part of the reason before the first colon: details follow it."""
        table = self.rejected if error else self.closed
        label = reason.partition(":")[0]
        if label not in table and len(table) >= REASONS_MAX:
            label = "other"
        table[label] = table.get(label, 0) + 1

    def enter(self, host: str) -> None:
        self.open += 1
        self.open_by_host[host] = self.open_by_host.get(host, 0) + 1

    def leave(self, host: str) -> None:
        self.open -= 1
        _decrement(self.open_by_host, host)

    def enter_reserve(self, host: str) -> None:
        self.reserved_open += 1
        self.reserved_by_host[host] = self.reserved_by_host.get(host, 0) + 1

    def leave_reserve(self, host: str) -> None:
        self.reserved_open -= 1
        _decrement(self.reserved_by_host, host)

    def enter_user(self, user: str) -> None:
        self.open_by_user[user] = self.open_by_user.get(user, 0) + 1

    def leave_user(self, user: str) -> None:
        _decrement(self.open_by_user, user)

    def enter_protocol(self, protocol: str) -> None:
        self.opened_by_protocol[protocol] = self.opened_by_protocol.get(protocol, 0) + 1
        self.open_by_protocol[protocol] = self.open_by_protocol.get(protocol, 0) + 1

    def leave_protocol(self, protocol: str) -> None:
        self.open_by_protocol[protocol] -= 1


def _decrement(counts: dict[str, int], name: str) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]
