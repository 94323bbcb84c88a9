"""A topic as a table: the pipeline that `headrace pipeline archive` runs, of the same model as any other."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.errors import ConfigError
from headrace.spark.pipelines.keys import Misfit
from headrace.spark.pipelines.model import Pipeline


def archive_pipeline(
    topic: str, kind: str, directory: str, *, format: str = "raw", schema: str = "", starting: str = "earliest", **head: object
) -> Pipeline:
    """From a topic to a table in `directory`; its checkpoint is beside it unless `head` says where. Raises `ConfigError`."""
    place = Path(directory).expanduser().absolute()
    label = re.sub(r"[^A-Za-z0-9._-]", "-", topic)
    head.setdefault("checkpoint", str(place.with_name(f"{place.name}.checkpoint")))
    source: dict[str, object] = {"topic": topic, "format": format, "starting": starting}
    if schema:
        source["schema"] = schema
    # Who archives bytes wants all of a record; who archives columns wants those, and where they came from.
    source["options"] = {"includeHeaders": True}
    try:
        pipeline = Pipeline(f"archive.{label}"[:100], **head).at(Path.cwd())
        pipeline.source("records", **source)
        pipeline.sink(
            "table", "records", kind=kind, path=str(place), **({"table": f"headrace.{_name(topic)}"} if kind == "iceberg" else {})
        )
        pipeline.check()
    except Misfit as failure:
        raise ConfigError(str(failure)) from None
    return pipeline


def _name(topic: str) -> str:
    """What a catalog takes as the name of a table."""
    return re.sub(r"[^A-Za-z0-9_]", "_", topic)
