"""Columns of a put. The server checks them, and a client before it creates a topic for them."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from headrace.errors import InvalidRequest
from headrace.flight.arrays import is_bytes

COLUMNS: Final = ("key", "value", "headers", "partition", "timestamp", "topic")
_EXPECTED: Final = {
    "key": "binary or string",
    "value": "binary or string",
    "topic": "string",
    "headers": "list<struct<key: string, value: binary>>",
    "partition": "an integer",
    "timestamp": "a timestamp",
}


def check_put_schema(schema: pa.Schema, *, topic: str | None) -> None:
    """Check the columns of a put to this topic; None: the column `topic` has it. Raises `InvalidRequest`, which names the column."""
    names = column_names(schema)
    for index, name in enumerate(names):
        if name not in COLUMNS:
            raise InvalidRequest(f"unknown column {name[:60]!r}; expected {', '.join(COLUMNS)}")
        if name in names[:index]:
            raise InvalidRequest(f"duplicate column {name!r}")
        if not _fits(name, schema.field(index).type):
            raise InvalidRequest(f"column {name!r} is {str(schema.field(index).type)[:200]}; expected {_EXPECTED[name]}")
    if "value" not in names:
        raise InvalidRequest("the column 'value' is missing")
    if topic is None and "topic" not in names:
        raise InvalidRequest("no topic: set it in the request or add a column 'topic'")


def column_names(schema: pa.Schema) -> list[str]:
    """Return the names of the columns. Raises `InvalidRequest` for a name that is not UTF-8, which Arrow does not check."""
    try:
        return list(schema.names)
    except UnicodeDecodeError as failure:
        raise InvalidRequest(f"the name of a column is not UTF-8: {failure.object[:60]!r}") from None


def _fits(name: str, kind: pa.DataType) -> bool:
    if name == "partition":
        return bool(pa.types.is_integer(kind))
    if name == "timestamp":
        return bool(pa.types.is_timestamp(kind))
    if name == "topic":
        inner = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner))
    if name == "headers":
        return _are_headers(kind)
    return is_bytes(kind)


def _are_headers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    pair = kind.value_type
    try:
        names = [pair.field(index).name for index in range(pair.num_fields)]
    except UnicodeDecodeError:
        return False
    return names == ["key", "value"] and all(is_bytes(pair.field(index).type) for index in (0, 1))
