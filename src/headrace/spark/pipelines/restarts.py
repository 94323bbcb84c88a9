"""Restart decisions for a failed query, from the time and the failure alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace import retry
from headrace.spark.pipelines.diagnosis import Diagnosis
from headrace.spark.pipelines.model import Restart


@dataclass(frozen=True, slots=True)
class Decision:
    """Restart after `wait_ms`, or give up for a reason."""

    wait_ms: int = 0
    give_up: str = ""
    is_poison: bool = False


@dataclass(slots=True)
class Restarts:
    """Failures of one query, and the decisions about them."""

    policy: Restart
    chance: Callable[[], float] = retry.chance
    count: int = 0
    _times: deque[int] = field(default_factory=deque)
    _batch: str = ""
    _signature: str = ""
    _same: int = 0
    _consecutive: int = 0

    def failed(self, now_ms: int, batch: str, why: Diagnosis) -> Decision:
        """Count a failure and decide. `batch` identifies the failed batch; empty if unknown."""
        self.count += 1
        self._consecutive += 1
        self._times.append(now_ms)
        while self._times[0] <= now_ms - self.policy.window:
            self._times.popleft()
        if why.is_engine_lost:
            return Decision(give_up="the Spark process cannot be restarted from here")
        # An unavailable broker fails every batch in the same way, so it does not count against the batch.
        if batch and not (why.kind and why.retriable):
            is_same = (batch, why.signature) == (self._batch, self._signature)
            self._same = self._same + 1 if is_same else 1
            self._batch, self._signature = batch, why.signature
            if self._same >= self.policy.same_batch:
                return Decision(give_up=f"it failed {self._same} times in the same way", is_poison=True)
        if len(self._times) > self.policy.attempts:
            return Decision(give_up=f"it failed {len(self._times)} times within {self.policy.window / 1000:g} s")
        backoff = retry.exponential(
            first_seconds=self.policy.backoff / 1000, seconds_max=self.policy.backoff_max / 1000, chance=self.chance
        )
        return Decision(round(backoff(self._consecutive) * 1000))

    def succeeded(self) -> None:
        """Reset the backoff and the failed batch after a successful batch."""
        self._consecutive = 0
        self._batch, self._signature, self._same = "", "", 0
