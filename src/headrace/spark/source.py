"""The format `headrace`: what Spark asks for when a job says `spark.read|readStream|write|writeStream.format("headrace")`.

Spark makes one object of this class per `load()` or `start()`, in a process of its own, and pickles it to others. So it holds the
options and nothing else; readers and writers connect where they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


class HeadraceSource(DataSource):
    """Topics of a broker as rows."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from headrace.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from headrace.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)
