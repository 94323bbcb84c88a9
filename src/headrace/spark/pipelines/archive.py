"""Archive pipeline from a topic to a table, for `headrace pipeline archive`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.spark.pipelines.keys import InvalidKey
from headrace.spark.pipelines.model import Pipeline

_LABEL_CHARACTERS_MAX: Final = 80
"""Below the 100 characters of a pipeline name."""


def archive_pipeline(
    topic: str, kind: str, directory: str, *, format: str = "raw", schema: str = "", starting: str = "earliest", **head: object
) -> Pipeline:
    """Return the pipeline from a topic to a table in `directory`. `head` may set the checkpoint. Raises `ConfigError`."""
    place = Path(directory).expanduser().absolute()
    label = _label(topic)
    # A directory may hold the archives of several topics, each with its own checkpoint.
    head.setdefault("checkpoint", str(place.with_name(f"{place.name}.checkpoint") / label))
    source: dict[str, object] = {"topic": topic, "format": format, "starting": starting}
    if schema:
        source["schema"] = schema
    # An archive keeps the whole record.
    source["options"] = {"includeHeaders": True}
    try:
        pipeline = Pipeline(f"archive.{label}", **head).at(Path.cwd())
        pipeline.source("records", **source)
        pipeline.sink(
            "table", "records", kind=kind, path=str(place), **({"table": f"headrace.{_name(topic)}"} if kind == "iceberg" else {})
        )
        pipeline.check()
    except InvalidKey as failure:
        raise ConfigError(str(failure)) from None
    return pipeline


def _label(topic: str) -> str:
    """Return a directory name that is unique to the topic."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", topic)
    if plain == topic and len(plain) <= _LABEL_CHARACTERS_MAX:
        return plain
    return f"{plain[:_LABEL_CHARACTERS_MAX]}-{hashlib.blake2b(topic.encode(), digest_size=4).hexdigest()}"


def _name(topic: str) -> str:
    """Return a valid table name for a catalog."""
    return re.sub(r"[^A-Za-z0-9_]", "_", topic)
