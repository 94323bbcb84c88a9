"""When a query that failed is started again: pure arithmetic, given the time and the failure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.spark.pipelines.diagnosis import Diagnosis
from headrace.spark.pipelines.model import Restart


@dataclass(frozen=True, slots=True)
class Verdict:
    """Wait so long and start again; or, with a reason, never."""

    wait_ms: int = 0
    surrender: str = ""
    is_poison: bool = False


@dataclass(slots=True)
class Restarts:
    """The failures of one query."""

    policy: Restart
    count: int = 0
    _times: deque[int] = field(default_factory=deque)
    _batch: str = ""
    _likeness: str = ""
    _same: int = 0
    _row: int = 0

    def failed(self, now_ms: int, batch: str, why: Diagnosis) -> Verdict:
        """`batch`: what names the one it died in; empty if that is not known."""
        self.count += 1
        self._row += 1
        self._times.append(now_ms)
        while self._times[0] <= now_ms - self.policy.window:
            self._times.popleft()
        if why.is_engine_lost:
            return Verdict(surrender="Spark cannot be started again from here")
        # A broker that is away fails every batch in the same way; that is no fault of the batch.
        if batch and not (why.kind and why.retriable):
            is_same = (batch, why.likeness) == (self._batch, self._likeness)
            self._same = self._same + 1 if is_same else 1
            self._batch, self._likeness = batch, why.likeness
            if self._same >= self.policy.same_batch:
                return Verdict(surrender=f"it failed {self._same} times in the same way", is_poison=True)
        if len(self._times) > self.policy.attempts:
            return Verdict(surrender=f"it failed {len(self._times)} times within {self.policy.window / 1000:g} s")
        return Verdict(min(self.policy.backoff << min(self._row - 1, 30), self.policy.backoff_max))

    def succeeded(self) -> None:
        """A batch went through: pauses begin small again, and whatever failed before is past."""
        self._row = 0
        self._batch, self._likeness, self._same = "", "", 0
