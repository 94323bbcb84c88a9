"""Batch operations of the read paths."""

from __future__ import annotations

from typing import Final

from headrace.engine.contract import Batch
from headrace.records import NEVER

STEP_RECORDS_MAX: Final = 5_000
"""Records that a read path handles in one step: a few milliseconds even if they are small, or every second one has expired."""


def unexpired(batches: list[Batch], now: int) -> list[Batch]:
    """Return the batches without expired records. Costs nothing if no record has an expiry."""
    if not any(batch.expires for batch in batches):
        return batches
    return [part for batch in batches for part in _living_stretches(batch, now)]


def _living_stretches(batch: Batch, now: int) -> list[Batch]:
    expiries = batch.expiries()
    if expiries is None or min(expiries) > now:
        return [batch]
    if NEVER not in expiries and max(expiries) <= now:
        return []
    living = [expiry == NEVER or expiry > now for expiry in expiries]
    if all(living):
        return [batch]
    stretches: list[Batch] = []
    start = None
    for index, alive in enumerate([*living, False]):
        if alive and start is None:
            start = index
        elif not alive and start is not None:
            stretches.append(batch.window(start, index))
            start = None
    return stretches
