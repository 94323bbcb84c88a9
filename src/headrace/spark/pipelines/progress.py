"""State of a query, from Spark's progress reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class QueryState:
    """State of one query for `status`. Rates are rows per second of the last batch; sizes are current; totals are of this execution."""

    name: str
    state: str = "starting"
    """starting, running, waiting (for a restart), finished, stopped, failed"""
    batch: int | None = None
    rows_total: int = 0
    input_rate: float = 0.0
    processing_rate: float = 0.0
    batch_ms: int = 0
    lag: int | None = None
    state_rows: int = 0
    state_bytes: int = 0
    failures: int = 0
    error: str = ""

    def after(self, progress: str) -> QueryState:
        """Return the state after one more progress report in JSON."""
        report: dict[str, Any] = json.loads(progress)
        durations = report.get("durationMs") or {}
        lag = lag_of(report.get("sources") or [])
        if "addBatch" not in durations:
            # No batch has run. Such a report has the number of the next batch.
            return replace(self, input_rate=0.0, processing_rate=0.0, lag=lag)
        operators = report.get("stateOperators") or []
        return replace(
            self,
            batch=int(report["batchId"]),
            rows_total=self.rows_total + int(report.get("numInputRows") or 0),
            input_rate=_number(report.get("inputRowsPerSecond")),
            processing_rate=_number(report.get("processedRowsPerSecond")),
            batch_ms=int(durations.get("triggerExecution", 0)),
            lag=lag,
            state_rows=sum(int(operator.get("numRowsTotal") or 0) for operator in operators),
            state_bytes=sum(int(operator.get("memoryUsedBytes") or 0) for operator in operators),
        )

    def plain(self) -> dict[str, object]:
        return asdict(self)


def moment_of(progress: str) -> str:
    """Return the timestamp of the report, which sorts by time."""
    return str(json.loads(progress)["timestamp"])


def lag_of(sources: list[dict[str, Any]]) -> int | None:
    """Return the number of unread records of the topics; None if unknown."""
    total: int | None = None
    for source in sources:
        latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
        if latest is None:
            continue
        total = total or 0
        for topic, partitions in latest.items():
            for partition, offset in partitions.items():
                total += max(0, offset - (end or {}).get(topic, {}).get(partition, 0))
    return total


def _offsets(given: object) -> dict[str, dict[str, int]] | None:
    """Decode the offsets of a `headrace` source; None for other sources."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    if not isinstance(given, dict) or not given or not all(isinstance(partitions, dict) for partitions in given.values()):
        return None
    return given


def _number(value: object) -> float:
    """Return 0 for a rate that Spark omits or reports as NaN or Infinity because no time has passed."""
    if not isinstance(value, (int, float)) or value != value or value in (float("inf"), float("-inf")):
        return 0.0
    return float(value)
