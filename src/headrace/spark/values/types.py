"""Conversion between shapes of values and Spark types. Spark converts its types to Arrow."""

from __future__ import annotations

from typing import Final

from pyspark.sql import types as t

from headrace.errors import ConfigError
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape

_SCALARS: Final[dict[Kind, t.DataType]] = {
    Kind.BOOLEAN: t.BooleanType(),
    Kind.INT8: t.ByteType(),
    Kind.INT16: t.ShortType(),
    Kind.INT32: t.IntegerType(),
    Kind.INT64: t.LongType(),
    Kind.FLOAT32: t.FloatType(),
    Kind.FLOAT64: t.DoubleType(),
    Kind.STRING: t.StringType(),
    Kind.BINARY: t.BinaryType(),
    Kind.DATE: t.DateType(),
    Kind.TIMESTAMP: t.TimestampType(),
    Kind.TIMESTAMP_NTZ: t.TimestampNTZType(),
    Kind.JSON: t.StringType(),
}
_KINDS: Final = {type(spark): kind for kind, spark in _SCALARS.items() if kind is not Kind.JSON}


def spark_type(shape: Shape) -> t.DataType:
    """Return the Spark type. All fields are nullable, because an older version may lack a field that the schema requires."""
    match shape:
        case Kind():
            return _SCALARS[shape]
        case Decimal():
            return t.DecimalType(shape.precision, shape.scale)
        case ListOf():
            return t.ArrayType(spark_type(shape.item))
        case MapOf():
            return t.MapType(_SCALARS[shape.key], spark_type(shape.value))
        case Record():
            return t.StructType([t.StructField(field.name, spark_type(field.shape)) for field in shape.fields])


def json_shape(spark: t.DataType, path: str = "value") -> Shape:
    """Return the shape of JSON values for a Spark type from the user. Raises `ConfigError`."""
    match spark:
        case t.DecimalType():
            return Decimal(spark.precision, spark.scale)
        case t.ArrayType():
            return ListOf(json_shape(spark.elementType, f"{path}[]"))
        case t.MapType() if isinstance(spark.keyType, t.StringType):
            return MapOf(json_shape(spark.valueType, f"{path}{{}}"))
        case t.StructType() if spark.fields:
            return Record(
                tuple(
                    Field(field.name, json_shape(field.dataType, f"{path}.{field.name}"), not field.nullable, field.nullable)
                    for field in spark.fields
                )
            )
    kind = _KINDS.get(type(spark))
    if kind is None:
        raise ConfigError(f"column {path}: JSON cannot be read as {spark.simpleString()}")
    return kind


def check_part(wanted: t.DataType, given: t.DataType, path: str = "value") -> None:
    """Check that the wanted type equals the given one, apart from omitted fields. Raises `ConfigError` for the first difference."""
    if isinstance(wanted, t.StructType) and isinstance(given, t.StructType):
        known = {field.name: field.dataType for field in given.fields}
        for field in wanted.fields:
            if field.name not in known:
                raise ConfigError(f"column {path}.{field.name}: the schema has no such field, only {', '.join(known)}")
            check_part(field.dataType, known[field.name], f"{path}.{field.name}")
    elif isinstance(wanted, t.ArrayType) and isinstance(given, t.ArrayType):
        check_part(wanted.elementType, given.elementType, f"{path}[]")
    elif isinstance(wanted, t.MapType) and isinstance(given, t.MapType) and wanted.keyType == given.keyType:
        check_part(wanted.valueType, given.valueType, f"{path}{{}}")
    elif wanted != given:
        raise ConfigError(f"column {path} is {wanted.simpleString()}, but the schema of the values has {given.simpleString()}")
