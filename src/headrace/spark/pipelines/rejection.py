"""Rows that a pipeline refuses go to the dead letters of the topic they came from, with the reason; the others go on.

The rows must still know where they came from: the columns `topic`, `partition` and `offset`. A record that is refused again, because
its batch runs again or because two sinks read it, is one dead letter all the same.
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
_servers_of_run: Servers | None = None


def use_servers(servers: Servers) -> None:
    """Whose dead letters `reject` and `each` mean; the runner says so before it calls any step."""
    global _servers_of_run
    _servers_of_run = servers


def reject(frame: DataFrame, why: Column | str, *, servers: Servers | None = None) -> DataFrame:
    """Send rows to the dead letters where `why` is not null; it is the reason. `why` is a column or an SQL expression.

    reject(orders, "case when amount < 0 then 'the amount is negative' end")
    """
    from pyspark.sql import functions as F

    _check_origin(frame, "reject")
    reason = F.expr(why) if isinstance(why, str) else why
    return frame.withColumn(_ERROR, reason.cast("string")).mapInArrow(Rejecter(servers or _servers()), frame.schema)


def expect(frame: DataFrame, conditions: Mapping[str, str], servers: Servers) -> DataFrame:
    """Keep rows that meet all conditions; the reason names the first that is not met. A condition that is null is not met."""
    from pyspark.sql import functions as F

    first = F.coalesce(
        *(F.when(~F.coalesce(F.expr(condition), F.lit(False)), F.lit(f"not met: {name}")) for name, condition in conditions.items())
    )
    return reject(frame, first, servers=servers)


def each(
    frame: DataFrame, function: Callable[[dict[str, Any]], Mapping[str, Any] | None], schema: str, *, servers: Servers | None = None
) -> DataFrame:
    """Call a function for each row, as a dict, and go on with what it returns, of the given columns; None leaves the row out.

    A row for which it raises an exception goes to the dead letters, with the exception as the reason, and does not fail the batch.
    It is Python for each row: a few hundred thousand a second and core at best. SQL and `reject` do more.
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
    """What a task of `reject` runs."""

    servers: Servers

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            errors = batch.column(_ERROR)
            kept = batch.drop_columns([_ERROR])
            if errors.null_count < len(errors):
                bad = pc.is_valid(errors)
                bury(self.servers, kept.filter(bad), errors.filter(bad))
                kept = kept.filter(pc.invert(bad))
            yield kept


@dataclass(frozen=True, slots=True)
class Caller:
    """What a task of `each` runs."""

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
                bury(self.servers, bad, pa.array([errors[place] for place in places], pa.string()))
            if rows.num_rows:
                yield rows

    def _called(self, batch: pa.RecordBatch) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """What the function made of each row, by its place in the batch, and why it made nothing of others."""
        made: dict[int, dict[str, Any]] = {}
        errors: dict[int, str] = {}
        for place, row in enumerate(batch.to_pylist()):
            try:
                result = self.function(row)
            except Exception as failure:  # whatever the user's code raises is the reason of the dead letter
                errors[place] = _reason(failure)
            else:
                if result is not None:
                    made[place] = dict(result)
        return made, errors

    def _checked(self, made: dict[int, dict[str, Any]], errors: dict[int, str], schema: pa.Schema) -> pa.RecordBatch:
        """The rows as columns. Only if they do not fit, one by one: those that are to blame join the errors."""
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


def bury(servers: Servers, rows: pa.RecordBatch, errors: pa.Array) -> None:
    """Move the records of these rows to the dead letters, topic by topic."""
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
    """A value may have a field of that name; then the record's own has another."""
    return rows.column(f"record_{name}" if f"record_{name}" in rows.schema.names else name)


def _servers() -> Servers:
    if _servers_of_run is None:
        raise ConfigError("reject and each need servers=… outside of a pipeline")
    return _servers_of_run


def _check_origin(frame: DataFrame, what: str) -> None:
    missing = [name for name in ORIGIN if name not in frame.columns]
    if missing:
        raise ConfigError(f"{what} needs the columns topic, partition and offset to find the record again; {', '.join(missing)} is missing")
