"""How a query is doing, from what Spark reports after each batch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class QueryState:
    """One query, as `status` shows it. Rates are rows a second of the last batch; sizes are of now; totals are of this run."""

    name: str
    state: str = "starting"
    """starting, running, waiting (to be started again), finished, stopped, failed"""
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
        """With one more report, which Spark gives as JSON."""
        report: dict[str, Any] = json.loads(progress)
        durations = report.get("durationMs") or {}
        lag = lag_of(report.get("sources") or [])
        if "addBatch" not in durations:
            # Nothing has come in. Such a report has the number of the batch that will be next.
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
    """When the report was made; later ones sort behind earlier ones."""
    return str(json.loads(progress)["timestamp"])


def lag_of(sources: list[dict[str, Any]]) -> int | None:
    """Records that the topics hold and the query has not read; None before anything is known."""
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
    """As our source writes them; another source has another shape, and no lag that could be told."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    if not isinstance(given, dict) or not given or not all(isinstance(partitions, dict) for partitions in given.values()):
        return None
    return given


def _number(value: object) -> float:
    """Spark leaves a rate out, or says NaN or Infinity, when no time has passed."""
    if not isinstance(value, (int, float)) or value != value or value in (float("inf"), float("-inf")):
        return 0.0
    return float(value)
