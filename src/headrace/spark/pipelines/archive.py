"""A topic as a table: the pipeline that `headrace pipeline archive` runs, of the same model as any other."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.spark.pipelines.keys import Misfit
from headrace.spark.pipelines.model import Pipeline

_LABEL_CHARACTERS_MAX: Final = 80
"""The name of a pipeline may have a hundred."""


def archive_pipeline(
    topic: str, kind: str, directory: str, *, format: str = "raw", schema: str = "", starting: str = "earliest", **head: object
) -> Pipeline:
    """From a topic to a table in `directory`; its checkpoint is beside it unless `head` says where. Raises `ConfigError`."""
    place = Path(directory).expanduser().absolute()
    label = _label(topic)
    # A directory may hold the archives of several topics, and each has to know how far it is by itself.
    head.setdefault("checkpoint", str(place.with_name(f"{place.name}.checkpoint") / label))
    source: dict[str, object] = {"topic": topic, "format": format, "starting": starting}
    if schema:
        source["schema"] = schema
    # Who archives bytes wants all of a record; who archives columns wants those, and where they came from.
    source["options"] = {"includeHeaders": True}
    try:
        pipeline = Pipeline(f"archive.{label}", **head).at(Path.cwd())
        pipeline.source("records", **source)
        pipeline.sink(
            "table", "records", kind=kind, path=str(place), **({"table": f"headrace.{_name(topic)}"} if kind == "iceberg" else {})
        )
        pipeline.check()
    except Misfit as failure:
        raise ConfigError(str(failure)) from None
    return pipeline


def _label(topic: str) -> str:
    """A name that a directory can have; no two topics share it."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", topic)
    if plain == topic and len(plain) <= _LABEL_CHARACTERS_MAX:
        return plain
    return f"{plain[:_LABEL_CHARACTERS_MAX]}-{hashlib.blake2b(topic.encode(), digest_size=4).hexdigest()}"


def _name(topic: str) -> str:
    """What a catalog takes as the name of a table."""
    return re.sub(r"[^A-Za-z0-9_]", "_", topic)
