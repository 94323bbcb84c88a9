"""Pipelines from topics to tables and topics, exactly once, declared in one file.

    from headrace.spark.pipelines import Pipeline

`Pipeline` is the model, `load` reads it from a TOML or Python file, `headrace pipeline run FILE` runs it. In a Python step, `reject` and
`each` move rows to the dead letters of their topic instead of failing the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.extras import needs
from headrace.spark.pipelines.files import load
from headrace.spark.pipelines.model import Pipeline, Restart, Sink, Source, Step

if TYPE_CHECKING:
    from headrace.spark.pipelines.rejection import each, reject

__all__ = ["Pipeline", "Restart", "Sink", "Source", "Step", "each", "load", "reject"]


def __getattr__(name: str) -> Any:
    """Import `reject` and `each` on first use, because they need Arrow and listing pipelines does not."""
    if name in ("each", "reject"):
        with needs(f"headrace.spark.pipelines.{name}", "pyarrow"):
            from headrace.spark.pipelines import rejection

        return getattr(rejection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
