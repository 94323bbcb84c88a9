"""Fetching: a read that may wait for records to come."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.contract import Batch, Bounds


@dataclass(slots=True)
class Fetched:
    """The answer to a fetch."""

    batches: list[Batch]
    bounds: Bounds
    next_offset: int
    """Where to read on. Behind the last batch, and behind records that were left out because they had expired."""
