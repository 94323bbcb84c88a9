"""The format `headrace`: what Spark asks for when a job says `spark.read|readStream|write|writeStream.format("headrace")`.

Spark makes one object of this class per `load()` or `start()`, in a process of its own, and pickles it to others. So it holds the
options and nothing else; readers and writers connect where they run. Everything is imported when it is asked for: each of Spark's
processes needs only a part, and each of them starts with this module.
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
    """Topics of a broker as rows."""

    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> StructType:
        """Asked for by `load()`, so this is where a mistake in the options, an unknown topic or a silent broker is told first."""
        from headrace.spark.connection import connect
        from headrace.spark.endurance import Endurance
        from headrace.spark.options import Options
        from headrace.spark.servers import servers_of
        from headrace.spark.subscription import Subscription
        from headrace.spark.values import typed_schema

        options = Options(self.options)
        servers, subscription = servers_of(options), Subscription.of(options)
        client = connect(servers)
        # A stream that may lose records must be able to start again without a topic that is gone.
        look: Callable[[], object] = client.topics if not options.flag("failOnDataLoss", True) else partial(subscription.states, client)
        Endurance.of(options).at_first(look, servers.addresses)
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
