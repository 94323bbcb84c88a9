"""Network counters: plain integers that the metrics read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from headrace.limits import END_LINES_PER_MINUTE_MAX
from headrace.net.output import OutputBudget

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
