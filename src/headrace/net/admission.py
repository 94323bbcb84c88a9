"""Connection limits: in total, per address and per user, with a reserve for administrators.

When the regular slots are in use, a few reserved slots remain. A connection in a reserved slot must log in as an administrator before
the login deadline. One address gets only a part of the reserve, so that a single address cannot lock administrators out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.net.counters import NetCounters


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
