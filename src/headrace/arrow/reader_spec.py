"""Reader specification as plain data. Spark pickles it to the tasks, which create the reader and cache it for the next task.

A value in Confluent's framing has a header before the encoded value:

    0       1             5
    +-------+-------------+----------------+
    | magic | schema id   | encoded value  |
    | 0     | u32, big    | rest           |
    +-------+-------------+----------------+

The id belongs to the registry of the writer, which the reader does not ask: the definition comes from elsewhere. Protobuf has an index of
the message between id and value, which is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from headrace.errors import InvalidRequest
from headrace.schemas.contract import SchemaType
from headrace.schemas.json_reading import JsonReader
from headrace.schemas.shapes import Kind, Reader, Shape, reader_of

FORMATS: Final = ("raw", "json", "avro", "protobuf", "string")
FRAMINGS: Final = ("none", "confluent")
_FRAMED: Final = ("avro", "json")
_HEADER_BYTES: Final = 5


@dataclass(frozen=True, slots=True)
class ReaderSpec:
    """Specification of a reader: a definition with its other versions, or a JSON shape from the user."""

    format: str
    definition: bytes = b""
    others: tuple[bytes, ...] = ()
    shape: Shape | None = None
    framing: str = "none"

    def reader(self) -> Reader:
        """Return the cached reader. Raises `InvalidSchema`."""
        return _reader(self)


def check_framing(format: str, framing: str) -> None:
    """Raise `InvalidRequest` for a framing that values of this format cannot have."""
    if framing not in FRAMINGS:
        raise InvalidRequest(f"unknown framing {framing!r}; expected {' or '.join(FRAMINGS)}")
    if framing == "confluent" and format not in _FRAMED:
        raise InvalidRequest(f"framing confluent is for values in {' and '.join(_FRAMED)}, but the format is {format}")


@lru_cache(maxsize=32)
def _reader(spec: ReaderSpec) -> Reader:
    if spec.framing == "confluent":
        return _FramedReader(_reader(replace(spec, framing="none")))
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


class _FramedReader:
    """Reader of values in Confluent's framing."""

    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        self.shape = inner.shape

    def read(self, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, str]]:
        unframed = {index: _unframed(value) for index, value in enumerate(values) if value is not None and not _is_framed(value)}
        rows, faults = self._inner.read(
            [None if value is None or index in unframed else value[_HEADER_BYTES:] for index, value in enumerate(values)]
        )
        return rows, faults | unframed


def _is_framed(value: bytes) -> bool:
    return len(value) >= _HEADER_BYTES and value[0] == 0


def _unframed(value: bytes) -> str:
    return (
        f"no Confluent framing: expected a zero byte and a schema id of 4 bytes, got {value[:_HEADER_BYTES].hex(' ') or 'an empty value'}"
    )
