"""Members of a group: how much a member may hold, and which partitions it owns. Pure functions and counters.

A group has one of two modes. *ordered*: every partition belongs to one member, which receives its records in order. *shared*: every
member takes from every partition, and each record is settled by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

Mode: TypeAlias = Literal["ordered", "shared"]

CREDIT_RECORDS: Final = 32
"""Unsettled records that a new member may hold. Small, so that members share a backlog even if one of them joins first."""
ROUND_FAST_MS: Final = 40
ROUND_SLOW_MS: Final = 160
"""A member that settles its whole credit within the first time gets twice as much; one that needs longer than the second, half."""
PATIENCE_MS: Final = 1_000
"""A member that settles nothing for so long, with its credit used up, gets twice as much: it may wait for more before it settles."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Peer behind a member."""

    protocol: str
    user: str
    address: str


class Credit:
    """Number of unsettled records that a member may hold.

    It adapts to the speed of the member, so that it covers some 40 ms of work: a slow member holds `CREDIT_RECORDS`, and the rest of a
    backlog is left to the others; a fast one is not slowed down by its round-trip time. A member that settles many records at once gets
    as many as it needs for that.
    """

    __slots__ = ("_began", "_is_stretched", "_left", "_records_first", "_records_max", "_records_min", "_was_used_up", "records")

    def __init__(self, records: int, records_max: int, now: int) -> None:
        self.records = self._records_first = self._records_min = min(records, records_max)
        self._records_max = records_max
        self._is_stretched = False
        self._begin(now)

    def _begin(self, now: int) -> None:
        self._began, self._left, self._was_used_up = now, self.records, False

    def used_up(self) -> None:
        """Note that the member could hold more."""
        self._was_used_up = True

    def stretch(self) -> None:
        """Give a member that settles nothing twice as much."""
        self.records = self._records_min = min(self.records * 2, self._records_max)
        self._is_stretched = True

    def settled(self, count: int, held: int, now: int) -> None:
        """Count records that were settled at once, of `held`. After as many as the credit, adapt it to the time that they took."""
        if self._is_stretched and 8 * count < held:
            # It settles few records at a time after all, and is only slow.
            self.records = self._records_min = self._records_first
            self._is_stretched = False
        self._left -= count
        if self._left > 0:
            return
        took_ms = now - self._began
        if took_ms > ROUND_SLOW_MS:
            self.records = max(self.records // 2, self._records_min)
        elif took_ms <= ROUND_FAST_MS and self._was_used_up:
            self.records = min(self.records * 2, self._records_max)
        self._begin(now)


class Owner(Protocol):
    """A member that may own partitions."""

    def accepts(self, partition: int) -> bool: ...


M = TypeVar("M", bound=Owner)


def assign(partitions: Iterable[int], members: Sequence[M], current: Mapping[int, M]) -> dict[int, M]:
    """Return the owner of each partition: evenly, and with as few changes to `current` as possible.

    A partition that no member accepts has no owner.
    """
    owned: dict[M, list[int]] = {member: [] for member in members}
    free: list[int] = []
    for partition in partitions:
        owner = current.get(partition)
        is_kept = owner is not None and owner in owned and owner.accepts(partition)
        (owned[owner] if is_kept and owner is not None else free).append(partition)
    for partition in free:
        takers = [member for member in members if member.accepts(partition)]
        if takers:
            owned[min(takers, key=lambda member: len(owned[member]))].append(partition)
    while _level(owned):
        pass
    return {partition: member for member, mine in owned.items() for partition in mine}


def _level(owned: dict[M, list[int]]) -> bool:
    """Move one partition from a member with many to one with at least two fewer. Return False if that is not possible."""
    by_load = sorted(owned, key=lambda member: len(owned[member]))
    for rich in reversed(by_load):
        for poor in by_load:
            if len(owned[rich]) <= len(owned[poor]) + 1:
                break
            for partition in reversed(owned[rich]):
                if poor.accepts(partition):
                    owned[rich].remove(partition)
                    owned[poor].append(partition)
                    return True
    return False
