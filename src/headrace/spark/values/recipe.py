"""How values are read, as plain data: it is pickled to the tasks, which make the reader of it and keep that for the next task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.schemas.contract import SchemaType
from headrace.schemas.json_reading import JsonReader
from headrace.schemas.reading import Reader, reader_of
from headrace.schemas.shapes import Kind, Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """Either a definition with other versions of it, or the shape of JSON that a user asked for."""

    format: str
    definition: bytes = b""
    others: tuple[bytes, ...] = ()
    shape: Shape | None = None

    def reader(self) -> Reader:
        """Raises `InvalidSchema`."""
        return _reader(self)


@lru_cache(maxsize=32)
def _reader(recipe: Recipe) -> Reader:
    if recipe.format == "string":
        return _TextReader()
    if recipe.shape is not None:
        return JsonReader(recipe.shape)
    return reader_of(SchemaType(recipe.format), recipe.definition, recipe.others)


class _TextReader:
    """Values that are UTF-8."""

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
