"""Comparison of the columns of a batch with those of a table: equal, added, or in conflict."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from headrace.spark.pipelines.tables import TableError


def widened(rows: pa.Schema, into: Mapping[pa.DataType, pa.DataType], what: str) -> pa.Schema:
    """Return the columns in types that a table supports: times in UTC, numbers converted by `into`, all nullable."""
    return pa.schema([pa.field(field.name, _held(field.type, into, field.name, what), nullable=True) for field in rows])


def _held(kind: pa.DataType, into: Mapping[pa.DataType, pa.DataType], name: str, what: str) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(inner.name, _held(inner.type, into, f"{name}.{inner.name}", what)) for inner in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _held(kind.value_type, into, name, what)))
    if pa.types.is_map(kind):
        return pa.map_(_held(kind.key_type, into, name, what), _held(kind.item_type, into, name, what))
    if pa.types.is_null(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind):
        raise TableError(f"column {name}: {what} has no type for {kind}; cast it in the step")
    return into.get(kind, kind)


def added_columns(held: pa.Schema, rows: pa.Schema, table: str) -> list[pa.Field]:
    """Return the columns that the table does not have yet. Raises `TableError` for a different type. A missing column is null."""
    found: list[pa.Field] = []
    for field in rows:
        index = held.get_field_index(field.name)
        if index < 0:
            found.append(field)
        elif not _same(held.field(index).type, field.type):
            raise TableError(
                f"column {field.name} of {table} is {held.field(index).type}, but the rows have {field.type}; cast it in the step"
            )
    return found


def _same(held: pa.DataType, given: pa.DataType) -> bool:
    """Return whether types are equal to a reader, apart from memory layout and the names of list elements."""
    return _plain(held) == _plain(given)


def _plain(kind: pa.DataType) -> object:
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return "timestamp", bool(kind.tz)
    if pa.types.is_struct(kind):
        return tuple((inner.name, _plain(inner.type)) for inner in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "list", _plain(kind.value_type)
    if pa.types.is_map(kind):
        return "map", _plain(kind.key_type), _plain(kind.item_type)
    return kind
