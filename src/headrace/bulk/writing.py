"""From Arrow record batches to runs of the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from headrace.errors import InvalidRequest
from headrace.records import Headers, Run

COLUMNS: Final = ("key", "value", "headers", "partition", "timestamp", "topic")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run and where it goes; None: the broker chooses."""

    topic: str
    partition: int | None
    run: Run


class Cutter:
    """Checks the schema of a put once, then turns each of its record batches into pieces."""

    def __init__(self, schema: pa.Schema, topic: str | None, partition: int | None) -> None:
        for name in schema.names:
            if name not in COLUMNS:
                raise InvalidRequest(f"column {name[:60]!r} is not known; there are {', '.join(COLUMNS)}")
        if "value" not in schema.names:
            raise InvalidRequest("a column 'value' is needed")
        self._names = list(schema.names)
        self._topic, self._partition = topic, partition

    def pieces(self, batch: pa.RecordBatch) -> Iterator[Piece]:
        columns = {name: batch.column(index) for index, name in enumerate(self._names)}
        values = columns["value"].cast(pa.binary()).to_pylist()
        keys = columns["key"].cast(pa.binary()).to_pylist() if "key" in columns else None
        headers: list[Headers] | None = None
        if "headers" in columns:
            headers = [tuple((pair["key"], pair["value"] or b"") for pair in row or ()) for row in columns["headers"].to_pylist()]
        times = columns["timestamp"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64()).to_pylist() if "timestamp" in columns else None
        places = columns["partition"].to_pylist() if "partition" in columns else [self._partition] * len(values)
        topics = columns["topic"].to_pylist() if "topic" in columns else [self._topic] * len(values)
        found: dict[tuple[str, int | None], list[int]] = {}
        for index, place in enumerate(zip(topics, places, strict=True)):
            found.setdefault(place, []).append(index)
        for (topic, partition), indexes in found.items():
            run = Run(
                [values[index] for index in indexes],
                None if keys is None else [keys[index] for index in indexes],
                None if headers is None else [headers[index] for index in indexes],
                None if times is None else [times[index] for index in indexes],
            )
            yield Piece(topic, partition, run)
