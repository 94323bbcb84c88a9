"""Status of a broker."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.contract import HealthReport


@dataclass(frozen=True, slots=True)
class Status:
    """Counts over all topics except the internal ones."""

    uptime_ms: int
    topics: int
    records: int
    """Records currently stored."""
    written: int
    """Records ever written."""
    health: HealthReport
    """Health of the broker's threads and tasks."""
