"""Pipelines: topics in, tables and topics out, exactly once, declared in one file.

    from headrace.spark.pipelines import Pipeline

`Pipeline` is the model, `load` reads it from a TOML or Python file, `headrace pipeline run FILE` runs it. Inside a step that is a
function, `reject` and `each` send rows to the dead letters of their topic instead of failing the batch.
"""

from __future__ import annotations

from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.model import Pipeline, Restart, Sink, Source, Step

__all__ = ["Pipeline", "Restart", "Sink", "Source", "Step", "load"]
