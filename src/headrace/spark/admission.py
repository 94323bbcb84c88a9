"""Admission: the number of records that the next micro-batch reads.

Limits are divided in proportion to the backlog of each partition, so that all partitions catch up at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.spark.offsets import TopicPartition


def apportion(available: Mapping[TopicPartition, int], records_max: int) -> dict[TopicPartition, int]:
    """Divide `records_max` among the partitions in proportion to `available`.

    Counts are rounded down, and the remainder goes to the partitions with the largest rounding loss. The sum is exact, so a backlog of
    n records takes ceil(n / records_max) batches, and a small partition is never skipped twice.
    """
    total = sum(available.values())
    if total <= records_max:
        return dict(available)
    taken = {place: records_max * count // total for place, count in available.items()}
    by_loss = sorted(available, key=lambda place: (-(records_max * available[place] % total), place))
    for place in by_loss[: records_max - sum(taken.values())]:
        taken[place] += 1
    return taken


def records_within(available: Mapping[TopicPartition, int], record_bytes: Mapping[TopicPartition, float], bytes_max: int) -> int:
    """Return how many of these records, taken in proportion, have about `bytes_max` bytes; at least one, so that the query advances."""
    total = sum(available.values())
    total_bytes = sum(count * record_bytes[place] for place, count in available.items())
    return total if total_bytes <= bytes_max else max(1, int(total * (bytes_max / total_bytes)))


class TriggerDelay:
    """Minimum batch size: `minOffsetsPerTrigger` with `maxTriggerDelay`.

    The first batch of an execution is not delayed, because the age of its records is unknown.
    """

    def __init__(self, records_min: int | None, delay_ms: int) -> None:
        self._records_min, self._delay_ms = records_min, delay_ms
        self._last_ms: float | None = None

    def enough(self, records: int, *, now_ms: float) -> bool:
        """Return whether to start a batch of this size; if so, restart the delay."""
        if not records:
            return False
        few = self._records_min is not None and records < self._records_min
        if few and self._last_ms is not None and now_ms - self._last_ms < self._delay_ms:
            return False
        self._last_ms = now_ms
        return True
