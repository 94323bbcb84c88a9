"""Data source for `spark.read|readStream|write|writeStream.format("headrace")`.

Spark creates one object of this class per `load()` or `start()`, in a separate process, and pickles it to other processes. So it holds only
the options; readers and writers connect in the process that uses them. Each of Spark's processes imports this module and needs only a part
of the package, so the methods import what they use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

    from headrace.spark.reading import RangeReader


class HeadraceSource(DataSource):
    """The data source `headrace`: records of topics as rows."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> StructType:
        """Return the schema. `load()` calls this first, so it reports wrong options, unknown topics and an unavailable broker."""
        from headrace.spark.connection import connect
        from headrace.spark.options import Options
        from headrace.spark.retry import RetryPolicy
        from headrace.spark.servers import servers_of
        from headrace.spark.subscription import Subscription
        from headrace.spark.values import typed_schema

        options = Options(self.options)
        servers, subscription = servers_of(options), Subscription.of(options)
        client = connect(servers)
        # With failOnDataLoss=false a stream must restart after one of its topics was deleted.
        look: Callable[[], object] = client.topics if not options.flag("failOnDataLoss", True) else partial(subscription.states, client)
        RetryPolicy.of(options).before_start(look, servers.addresses)
        return typed_schema(options, client)

    def reader(self, schema: StructType) -> DataSourceReader:
        from headrace.spark.batch_reader import BatchReader

        return BatchReader(self._range_reader(schema, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from headrace.spark.stream_reader import StreamReader

        return StreamReader(self._range_reader(schema, streaming=True))

    def _range_reader(self, schema: StructType, *, streaming: bool) -> RangeReader:
        from headrace.spark.columns import check_columns
        from headrace.spark.connection import connect
        from headrace.spark.options import Options
        from headrace.spark.read_settings import ReadSettings
        from headrace.spark.reading import RangeReader
        from headrace.spark.values import is_typed, plan

        options = Options(self.options)
        settings = ReadSettings.of(options, streaming=streaming)
        if is_typed(options):
            decoder = plan(options, schema, connect(settings.servers))
            return RangeReader(settings, decoder.columns, schema, decoder)
        return RangeReader(settings, check_columns(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from headrace.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from headrace.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)
