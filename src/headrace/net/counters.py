"""What the network counts: plain integers, read by the metrics whenever they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.net.output import OutputBudget

REASONS_MAX: Final = 128
"""Distinct reasons counted by name; later ones are counted as `other`, so that no peer can grow the table."""


@dataclass(slots=True)
class NetCounters:
    """Shared by all listeners of a server, so that the connection limits hold for all of them together."""

    accepted: int = 0
    open: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    opened_with_tls: int = 0
    reading_pauses: int = 0
    """How often a peer had to wait because it wrote faster than the broker could keep, or did not read its answers."""
    accept_pauses: int = 0
    """How often accepting paused because file descriptors or memory had run out."""
    reserved_open: int = 0
    """Of the open connections, those in the reserve for administrators."""
    unfinished_bytes: int = 0
    """What connections hold of frames that are not whole yet."""
    opened_by_door: dict[str, int] = field(default_factory=dict)
    open_by_door: dict[str, int] = field(default_factory=dict)
    open_by_host: dict[str, int] = field(default_factory=dict)
    open_by_user: dict[str, int] = field(default_factory=dict)
    """Connections that have logged in, administrators' not included."""
    reserved_by_host: dict[str, int] = field(default_factory=dict)
    output: OutputBudget = field(default_factory=OutputBudget)
    closed: dict[str, int] = field(default_factory=dict)
    """Connections that ended as connections do, by reason."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Connections ended because of what the peer did or what the broker could not do, by reason."""

    def count_end(self, reason: str, *, error: bool) -> None:
        """Count a connection's end under the part of the reason before its first colon: numbers and names stand behind it."""
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
        _take_one(self.open_by_host, host)

    def enter_reserve(self, host: str) -> None:
        self.reserved_open += 1
        self.reserved_by_host[host] = self.reserved_by_host.get(host, 0) + 1

    def leave_reserve(self, host: str) -> None:
        self.reserved_open -= 1
        _take_one(self.reserved_by_host, host)

    def enter_user(self, user: str) -> None:
        self.open_by_user[user] = self.open_by_user.get(user, 0) + 1

    def leave_user(self, user: str) -> None:
        _take_one(self.open_by_user, user)

    def enter_door(self, door: str) -> None:
        self.opened_by_door[door] = self.opened_by_door.get(door, 0) + 1
        self.open_by_door[door] = self.open_by_door.get(door, 0) + 1

    def leave_door(self, door: str) -> None:
        self.open_by_door[door] -= 1


def _take_one(counts: dict[str, int], name: str) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]
