"""Spark reads topics and writes them: the format `headrace`, with the columns and options of Spark's Kafka source.

    import headrace.spark

    spark = headrace.spark.session()
    orders = spark.readStream.format("headrace").option("servers", "127.0.0.1:8815").option("subscribe", "orders").load()

A session of your own learns the format by `register(spark)`, or by itself if this package is installed beside pyspark.
pyspark is imported when it is needed: looking at options, or at what a machine has, takes no second of start-up.
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
    """Teach this session the format `headrace`, whatever discovery finds or fails to find."""
    with needs("headrace.spark", "pyspark", "pyarrow"):
        from headrace.spark.source import HeadraceSource

    spark.dataSource.register(HeadraceSource)


def __getattr__(name: str) -> object:
    """`DefaultSource` is the name by which Spark's discovery finds a source in a module `pyspark_…`."""
    if name in ("DefaultSource", "HeadraceSource"):
        with needs("headrace.spark", "pyspark", "pyarrow"):
            from headrace.spark.source import HeadraceSource

        return HeadraceSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
