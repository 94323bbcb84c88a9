"""Typed values: `value.format` names the format, and the column `value` has the type that the schema defines.

For `json`, `avro` and `protobuf` that is usually a struct: `select("value.*")` returns the fields, and no field collides with `key` or
`topic`. For `string` it is a string. The driver plans (`typed_schema`, `plan`), the tasks decode (`headrace.arrow.values.Decoder`).
"""

from __future__ import annotations

from headrace.spark.values.planning import is_typed, plan, typed_schema

__all__ = ["is_typed", "plan", "typed_schema"]
