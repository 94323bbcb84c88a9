"""Discovery of the format `headrace`: Spark imports every module whose name begins with `pyspark_`."""

from headrace.spark import DefaultSource

__all__ = ["DefaultSource"]
