"""How much of what is there goes into the next micro-batch.

Limits are shared out in proportion to what each partition has to give, so that all of them reach the end at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.spark.offsets import Place


def share(available: Mapping[Place, int], records_max: int) -> dict[Place, int]:
    """As much of each as its part of the whole, `records_max` together, or everything if that is less.

    Rounded down, and what is left over goes to those that lost most by the rounding: the sum is exact, so a backlog of
    n records takes ceil(n / records_max) batches, and a partition with little is never passed over twice.
    """
    total = sum(available.values())
    if total <= records_max:
        return dict(available)
    taken = {place: records_max * count // total for place, count in available.items()}
    by_loss = sorted(available, key=lambda place: (-(records_max * available[place] % total), place))
    for place in by_loss[: records_max - sum(taken.values())]:
        taken[place] += 1
    return taken


def records_within(available: Mapping[Place, int], record_bytes: Mapping[Place, float], bytes_max: int) -> int:
    """How many of these records, taken in proportion, make up about `bytes_max`; one at least, or nothing would move."""
    total = sum(available.values())
    total_bytes = sum(count * record_bytes[place] for place, count in available.items())
    return total if total_bytes <= bytes_max else max(1, int(total * (bytes_max / total_bytes)))


class Patience:
    """`minOffsetsPerTrigger` with `maxTriggerDelay`: hold a batch back until it is worth it, or has waited long enough.

    The first batch of a run is not held back: nobody knows how long its records have been waiting.
    """

    def __init__(self, records_min: int | None, delay_ms: int) -> None:
        self._records_min, self._delay_ms = records_min, delay_ms
        self._last_ms: float | None = None

    def enough(self, records: int, *, now_ms: float) -> bool:
        """Whether to go on with so many; the clock starts again if so."""
        if not records:
            return False
        few = self._records_min is not None and records < self._records_min
        if few and self._last_ms is not None and now_ms - self._last_ms < self._delay_ms:
            return False
        self._last_ms = now_ms
        return True
