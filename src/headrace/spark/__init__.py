"""Spark data source and sink: the format `headrace`, with the columns and options of Spark's Kafka source.

    import headrace.spark

    spark = headrace.spark.session()
    orders = spark.readStream.format("headrace").option("servers", "127.0.0.1:8815").option("subscribe", "orders").load()

`register(spark)` adds the format to an existing session. Spark also discovers it if this package is installed beside pyspark.
pyspark is imported only when it is used, because its import takes a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.extras import needs
from headrace.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.source import HeadraceSource
    from headrace.spark.source import HeadraceSource as DefaultSource

__all__ = ["DefaultSource", "HeadraceSource", "register", "session"]


def register(spark: SparkSession) -> None:
    """Register the format `headrace` in this session, whether or not Spark has discovered it."""
    with needs("headrace.spark", "pyspark", "pyarrow"):
        from headrace.spark.source import HeadraceSource

    spark.dataSource.register(HeadraceSource)


def __getattr__(name: str) -> object:
    """Import the source on first use. Spark's discovery looks for the name `DefaultSource` in modules called `pyspark_…`."""
    if name in ("DefaultSource", "HeadraceSource"):
        with needs("headrace.spark", "pyspark", "pyarrow"):
            from headrace.spark.source import HeadraceSource

        return HeadraceSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
