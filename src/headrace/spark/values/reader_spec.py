"""Reader specification as plain data. Spark pickles it to the tasks, which create the reader and cache it for the next task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.schemas.contract import SchemaType
from headrace.schemas.json_reading import JsonReader
from headrace.schemas.shapes import Kind, Reader, Shape, reader_of


@dataclass(frozen=True, slots=True)
class ReaderSpec:
    """Specification of a reader: a definition with its other versions, or a JSON shape from the user."""

    format: str
    definition: bytes = b""
    others: tuple[bytes, ...] = ()
    shape: Shape | None = None

    def reader(self) -> Reader:
        """Return the cached reader. Raises `InvalidSchema`."""
        return _reader(self)


@lru_cache(maxsize=32)
def _reader(spec: ReaderSpec) -> Reader:
    if spec.format == "string":
        return _TextReader()
    if spec.shape is not None:
        return JsonReader(spec.shape)
    return reader_of(SchemaType(spec.format), spec.definition, spec.others)


class _TextReader:
    """Reader of UTF-8 values."""

    shape = Kind.STRING

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        faults: dict[int, str] = {}
        rows: list[Any] = []
        for value in values:
            try:
                rows.append(None if value is None else value.decode())
            except UnicodeDecodeError as error:
                faults[len(rows)] = f"not UTF-8: {error.reason} at byte {error.start}"
                rows.append(None)
        return rows, faults
