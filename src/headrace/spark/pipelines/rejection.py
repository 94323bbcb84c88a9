"""Rejection: move rows to the dead letters of their topic, with a reason.

The rows must have the columns `topic`, `partition` and `offset`. A record that is rejected again, because its batch is repeated or two
sinks read it, remains one dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import ConfigError
from headrace.flight.client import Servers
from headrace.spark.connection import connect

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ORIGIN: Final = ("topic", "partition", "offset")
REASON: Final = "pipeline"
_ERROR: Final = "__error"
_REASON_CHARACTERS_MAX: Final = 1000
_pipeline_servers: Servers | None = None


def use_servers(servers: Servers) -> None:
    """Set the servers for `reject` and `each`. The planner calls this before any step."""
    global _pipeline_servers
    _pipeline_servers = servers


def reject(frame: DataFrame, why: Column | str, *, servers: Servers | None = None) -> DataFrame:
    """Move rows where `why` is not null to the dead letters, with `why` as the reason: a column or an SQL expression.

    reject(orders, "case when amount < 0 then 'the amount is negative' end")
    """
    from pyspark.sql import functions as F

    _check_origin(frame, "reject")
    reason = F.expr(why) if isinstance(why, str) else why
    return frame.withColumn(_ERROR, reason.cast("string")).mapInArrow(Rejecter(servers or _servers()), frame.schema)


def expect(frame: DataFrame, conditions: Mapping[str, str], servers: Servers) -> DataFrame:
    """Reject rows that fail a condition; the reason names the first one. A null condition counts as failed."""
    from pyspark.sql import functions as F

    first = F.coalesce(
        *(F.when(~F.coalesce(F.expr(condition), F.lit(False)), F.lit(f"not met: {name}")) for name, condition in conditions.items())
    )
    return reject(frame, first, servers=servers)


def each(
    frame: DataFrame, function: Callable[[dict[str, Any]], Mapping[str, Any] | None], schema: str, *, servers: Servers | None = None
) -> DataFrame:
    """Call a function with each row as a dict; return the results as rows with the columns of `schema`. None drops the row.

    A row for which the function raises is moved to the dead letters with the exception as the reason, and the batch continues. The function
    runs in Python for each row: at most a few hundred thousand rows per second and core. SQL and `reject` are faster.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    _check_origin(frame, "each")
    columns = StructType.fromDDL(schema)
    assert isinstance(columns, StructType), "columns, not a single type"
    wanted = to_arrow_schema(columns, timezone="UTC")
    return frame.mapInArrow(Caller(servers or _servers(), function, wanted.serialize().to_pybytes()), schema)


@dataclass(frozen=True, slots=True)
class Rejecter:
    """Task of `reject`."""

    servers: Servers

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            errors = batch.column(_ERROR)
            kept = batch.drop_columns([_ERROR])
            if errors.null_count < len(errors):
                bad = pc.is_valid(errors)
                move_to_dead_letters(self.servers, kept.filter(bad), errors.filter(bad))
                kept = kept.filter(pc.invert(bad))
            yield kept


@dataclass(frozen=True, slots=True)
class Caller:
    """Task of `each`."""

    servers: Servers
    function: Callable[[dict[str, Any]], Mapping[str, Any] | None]
    schema: bytes

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        for batch in batches:
            made, errors = self._called(batch)
            rows = self._checked(made, errors, schema)
            if errors:
                places = sorted(errors)
                bad = batch.take(pa.array(places, pa.int64()))
                move_to_dead_letters(self.servers, bad, pa.array([errors[place] for place in places], pa.string()))
            if rows.num_rows:
                yield rows

    def _called(self, batch: pa.RecordBatch) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """Return the results and the errors of the function, by row index."""
        made: dict[int, dict[str, Any]] = {}
        errors: dict[int, str] = {}
        for place, row in enumerate(batch.to_pylist()):
            try:
                result = self.function(row)
            except Exception as failure:  # user code may raise any exception; it is the reason of the dead letter
                errors[place] = _reason(failure)
            else:
                if result is not None:
                    made[place] = dict(result)
        return made, errors

    def _checked(self, made: dict[int, dict[str, Any]], errors: dict[int, str], schema: pa.Schema) -> pa.RecordBatch:
        """Convert the results to Arrow. If that fails, convert one by one and add the failing rows to the errors."""
        try:
            return pa.RecordBatch.from_pylist(list(made.values()), schema=schema)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            pass
        for place, row in list(made.items()):
            try:
                pa.RecordBatch.from_pylist([row], schema=schema)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
                errors[place] = _reason(failure)
                del made[place]
        return pa.RecordBatch.from_pylist(list(made.values()), schema=schema)


def _reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"[:_REASON_CHARACTERS_MAX]


def move_to_dead_letters(servers: Servers, rows: pa.RecordBatch, errors: pa.Array) -> None:
    """Move the records of these rows to the dead letters, by topic."""
    topics = _origin(rows, "topic")
    for topic in pc.unique(topics).to_pylist():
        mine = pc.equal(topics, topic)
        letters = pa.RecordBatch.from_arrays(
            [
                _origin(rows, "partition").filter(mine).cast(pa.int32()),
                _origin(rows, "offset").filter(mine).cast(pa.int64()),
                errors.filter(mine).cast(pa.string()),
                pa.array([REASON] * pc.sum(mine).as_py(), pa.string()),
            ],
            names=["partition", "offset", "error", "reason"],
        )
        connect(servers).dead_letters(topic, letters)


def _origin(rows: pa.RecordBatch, name: str) -> pa.Array:
    """Return a record column, which is called `record_NAME` if the value has a field of that name."""
    return rows.column(f"record_{name}" if f"record_{name}" in rows.schema.names else name)


def _servers() -> Servers:
    if _pipeline_servers is None:
        raise ConfigError("reject and each need the argument servers outside a pipeline")
    return _pipeline_servers


def _check_origin(frame: DataFrame, what: str) -> None:
    missing = [name for name in ORIGIN if name not in frame.columns]
    if missing:
        raise ConfigError(f"{what} needs the columns topic, partition and offset to find the record; missing: {', '.join(missing)}")
