"""Decide who may have a connection: limits for all, for one address and for one user, and a reserve for administrators.

When the places for everybody are taken, a few connections are admitted all the same: each of them has until the deadline for logging in to
show that it is an administrator's. One address gets only a part of the reserve, so that it takes several to keep administrators out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headrace.net.counters import NetCounters


class Place(Enum):
    """What a connection was admitted to."""

    REGULAR = "regular"
    RESERVED = "reserved"
    """It is kept only for an administrator."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`reserved` of `connections_max` are for administrators. A `per_user_max` of 0 is no limit."""

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


def admit(limits: AdmissionLimits, counters: NetCounters, host: str) -> Place | str:
    """Return the place of a new connection from this host, or why there is none."""
    refusal = _full(limits, counters, host)
    if refusal is None:
        return Place.REGULAR
    is_room = counters.open < limits.connections_max and counters.reserved_open < limits.reserved
    if is_room and counters.reserved_by_host.get(host, 0) < limits.reserved_per_ip_max:
        return Place.RESERVED
    return refusal


def _full(limits: AdmissionLimits, counters: NetCounters, host: str) -> str | None:
    if counters.open - counters.reserved_open >= limits.regular_max:
        return f"too many connections: {limits.regular_max} are open"
    if counters.open_by_host.get(host, 0) - counters.reserved_by_host.get(host, 0) >= limits.per_ip_max:
        return f"too many connections from one address: {limits.per_ip_max} are open"
    return None


def log_in(limits: AdmissionLimits, counters: NetCounters, host: str, place: Place, user: str, *, is_admin: bool) -> Place | str:
    """Return the place of a connection whose user is known now, or why it has to go. It is counted for the user by whoever calls."""
    if is_admin:
        return place
    if limits.per_user_max and counters.open_by_user.get(user, 0) >= limits.per_user_max:
        return f"too many connections of one user: {limits.per_user_max} are open"
    if place is Place.REGULAR:
        return place
    refusal = _full(limits, counters, host)
    return Place.REGULAR if refusal is None else f"{refusal}, and the rest is reserved for administrators"
