"""Spark data source and sink: the format `headrace`, with the columns and options of Spark's Kafka source.

    import headrace.spark

    spark = headrace.spark.session()
    orders = spark.readStream.format("headrace").option("servers", "127.0.0.1:8815").option("subscribe", "orders").load()

`register(spark)` adds the format to an existing session. Spark also discovers it if this package is installed beside pyspark.
pyspark is imported only when it is used, because its import takes a second.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from headrace.extras import needs
from headrace.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.source import HeadraceSource
    from headrace.spark.source import HeadraceSource as DefaultSource

__all__ = ["DefaultSource", "HeadraceSource", "register", "session"]


def register(spark: SparkSession) -> None:
    """Register the format `headrace` in this session, whether or not Spark has discovered it.

    Spark starts its Python processes as `python3`, which is another Python if a virtual environment is not activated. With a local master
    they then use the Python of this process, unless the variable `PYSPARK_PYTHON` names one. On a cluster, and with Spark Connect, each
    node and the server need a Python with this package.
    """
    with needs("headrace.spark", "pyspark", "pyarrow"):
        from headrace.spark.source import HeadraceSource

    context = getattr(spark, "sparkContext", None)  # a client of Spark Connect has none
    if context is not None and context.master.startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable
    spark.dataSource.register(HeadraceSource)


def __getattr__(name: str) -> object:
    """Import the source on first use. Spark's discovery looks for the name `DefaultSource` in modules called `pyspark_…`."""
    if name in ("DefaultSource", "HeadraceSource"):
        with needs("headrace.spark", "pyspark", "pyarrow"):
            from headrace.spark.source import HeadraceSource

        return HeadraceSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
