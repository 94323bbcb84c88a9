"""What a broker says about itself."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.contract import HealthReport


@dataclass(frozen=True, slots=True)
class Status:
    """Numbers over all topics but the internal ones."""

    uptime_ms: int
    topics: int
    records: int
    """Those that are kept."""
    written: int
    """Those that ever were."""
    health: HealthReport
    """Whether the threads and tasks behind the broker do their work, and why not."""
