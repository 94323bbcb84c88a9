"""Typed values: `value.format` says what the values are, and the column `value` then has the type that their schema gives them.

For `json`, `avro` and `protobuf` that is a struct (or whatever the root of the schema is), so that `select("value.*")` gives the
fields, and no field can collide with `key`, `topic`, `offset` …; for `string` it is text. The driver plans (`typed_schema`, `plan`), the
tasks decode (`Decoder.decode`).
"""

from __future__ import annotations

from headrace.spark.values.decoder import ERROR_COLUMN, Decoder, UnreadableRecord
from headrace.spark.values.planning import is_typed, plan, typed_schema

__all__ = ["ERROR_COLUMN", "Decoder", "UnreadableRecord", "is_typed", "plan", "typed_schema"]
