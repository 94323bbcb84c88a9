"""Groups: names under which readers keep how far they have come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group is behind in one partition."""

    topic: str
    partition: int
    committed: int
    end: int
    lag: int
