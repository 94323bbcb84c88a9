"""Publishing: from a run of records to its place in the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Published:
    """Where a run landed."""

    partition: int
    """Of the first record."""
    base_offset: int
    """Of the first record."""
    count: int
    timestamp: int
    """Unix ms of the first record."""
    placements: list[tuple[int, int]] | None = None
    """(partition, offset) of each record, where the run did not land as one piece; None where it did."""

    def placement(self, index: int) -> tuple[int, int]:
        """(partition, offset) of the record with this index in the run."""
        if self.placements is not None:
            return self.placements[index]
        return self.partition, self.base_offset + index


@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """Who published a run, and the sequence number of its first record; the following records count up from it."""

    id: str
    sequence: int
