"""Arrow types of values: the same as those of the Spark source."""

from __future__ import annotations

import pytest
from pyspark.sql.pandas.types import to_arrow_type

from headrace.arrow.values import arrow_type
from headrace.schemas.shapes import Decimal, Field, Kind, ListOf, MapOf, Record, Shape
from headrace.spark.values.types import spark_type

SHAPES: list[Shape] = [
    *Kind,
    Decimal(20, 2),
    ListOf(Kind.INT64),
    MapOf(ListOf(Kind.STRING), Kind.INT32),
    Record((Field("id", Kind.INT64), Field("parts", ListOf(Record((Field("day", Kind.DATE),)))))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_value_has_the_same_arrow_type_in_python_and_in_spark(shape: Shape) -> None:
    assert arrow_type(shape) == to_arrow_type(spark_type(shape), timezone="UTC")
