"""Fixtures of pipeline tests: an empty list of executions, an empty pipeline, and its execution in the shared session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.spark.pipelines import Pipeline
from headrace.spark.pipelines.executions import Execution
from headrace.spark.pipelines.runner import Outcome, Runner
from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Runs = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate directory of executions for this test."""
    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "entries"))
    return tmp_path / "entries"


@pytest.fixture
def pipeline(broker: FlightBroker, tmp_path: Path) -> Pipeline:
    return Pipeline("p", servers=broker.address, checkpoint="state", restart={"backoff": "1 ms"}).at(tmp_path)


@pytest.fixture
def run(spark: SparkSession) -> Iterator[Runs]:
    def run(pipeline: Pipeline, **more: Any) -> Outcome:
        pipeline.check()
        with Execution(pipeline.name, pipeline.checkpoint, file="p.toml", now_ms=0) as mine:
            return Runner(spark, pipeline, mine, **{"once": True, **more}).run()

    yield run
    assert spark.streams.active == [], "a run leaves no query behind"
