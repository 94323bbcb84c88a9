"""Topics as Arrow tables, for pandas, Polars, DuckDB and pyarrow.

    import headrace.arrow

    table = headrace.arrow.read("orders", start="2026-11-15T10:00", value_format="auto").read_all()

A read ends at the end of the topic at the time of the call, also while others write.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import InvalidRequest, UnknownPartition
from headrace.extras import needs

with needs("headrace.arrow", "numpy", "pyarrow"):
    import pyarrow as pa

    from headrace.arrow.reader_spec import FORMATS, ReaderSpec, check_framing
    from headrace.arrow.rows import record_batches
    from headrace.arrow.values import BAD_RECORDS, ERROR_COLUMN, Decoder, UnreadableRecord, arrow_type
    from headrace.flight.client import ALL, READ_SCHEMA, Appended, FlightClient, PartitionState, Servers

if TYPE_CHECKING:
    from headrace.arrow.rows import Rows

__all__ = ["Servers", "UnreadableRecord", "read", "write"]

Position = int | str | datetime.date | Mapping[int, int]
"""An offset in every partition, an offset for each partition, a time, or the word "earliest" or "latest"."""

_DEFAULT_SERVERS: Final = "127.0.0.1:8815"
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_Range = tuple[int, int, int]
"""Partition, first offset, end offset."""


def read(
    topic: str,
    *,
    servers: str | Servers = _DEFAULT_SERVERS,
    user: str = "",
    password: str = "",
    api_key: str = "",
    tls: bool = False,
    ca_file: str = "",
    partitions: Sequence[int] | None = None,
    start: Position = "earliest",
    stop: Position = "latest",
    columns: Sequence[str] = ALL,
    rows_max: int = 65_536,
    value_format: str = "raw",
    value_schema: str | bytes = "",
    value_version: int = 0,
    value_framing: str = "none",
    bad_records: str = "fail",
) -> pa.RecordBatchReader:
    """Return the rows of a topic, partition by partition, fetched lazily.

    `start` and `stop` are offsets, "earliest", "latest", or times: `datetime` objects or ISO 8601 texts such as "2026-11-15T10:00", in UTC
    unless they name another offset. A time means the first record at that time or later. A position outside a partition is moved to its
    first or end offset, without an error.

    With `value_format` ("json", "avro", "protobuf", "string", or "auto" for the format of the topic's schema) the column `value` is
    typed as in the Spark source, by `value_schema` or else by the schema that the topic requires, in `value_version` or the required
    version. `value_framing` "confluent" skips the schema id before each value. `bad_records` decides what happens to a value that cannot
    be decoded: "fail", "dlq" (move it to the dead letters) or "null" (null, with the reason in the column `_error`).

    Raises `InvalidRequest`, `UnknownTopic`, `UnknownPartition`, `LoginFailed`, and `Unavailable` if no broker answers. Reading raises
    `UnreadableRecord` for a bad record.
    """
    for name in columns:
        if name not in READ_SCHEMA.names:
            raise InvalidRequest(f"unknown column {name!r}; expected {', '.join(READ_SCHEMA.names)}")
    if isinstance(partitions, int):
        raise InvalidRequest(f"partitions: expected a list such as [{partitions}], got {partitions!r}")
    _check_value_arguments(value_format, value_schema, value_version, value_framing, bad_records)
    positions = _position("start", start), _position("stop", stop)
    client = FlightClient(_servers(servers, user, password, api_key, tls, ca_file))
    try:
        ranges = _ranges(client, topic, partitions, *positions)
        schema = pa.schema([READ_SCHEMA.field(name) for name in columns])
        if value_format == "raw":
            return pa.RecordBatchReader.from_batches(schema, _rows(client, topic, ranges, columns, rows_max))
        spec, is_registered = _reader_spec(client, topic, value_format, value_schema, value_version, value_framing)
        decoder = _decoder(schema, spec, bad_records, refreshes_schema=is_registered)
        rows = _rows(client, topic, ranges, decoder.columns, rows_max)
        return pa.RecordBatchReader.from_batches(decoder.schema, (decoder.decode(batch, topic, client) for batch in rows))
    except BaseException:
        client.close()
        raise


def write(
    topic: str,
    rows: Rows,
    *,
    servers: str | Servers = _DEFAULT_SERVERS,
    user: str = "",
    password: str = "",
    api_key: str = "",
    tls: bool = False,
    ca_file: str = "",
    partition: int | None = None,
) -> Appended:
    """Append rows with the column `value` and optionally `key`, `headers`, `partition`, `timestamp`.

    `rows` is a pandas or Polars DataFrame, a pyarrow Table, RecordBatch or RecordBatchReader, an iterable of record batches, or any other
    object with the method `__arrow_c_stream__`. The topic is created if the broker allows that, after `rows` was checked. When this
    returns, the rows are as durable as the topic guarantees. Raises `InvalidRequest` and the errors of `FlightClient.append`.
    """
    if partition is not None and partition < 0:
        raise InvalidRequest(f"partition: expected a number from 0 on, got {partition!r}")
    batches = record_batches(rows)
    with FlightClient(_servers(servers, user, password, api_key, tls, ca_file)) as client:
        client.ensure_topic(topic)
        return client.append(topic, batches, partition=partition)


def _servers(servers: str | Servers, user: str, password: str, api_key: str, tls: bool, ca_file: str) -> Servers:
    """Return the servers with the login. Raises `InvalidRequest`."""
    if api_key and (user or password):
        raise InvalidRequest("api_key and user or password are both set: set only one of them")
    if bool(user) != bool(password):
        raise InvalidRequest(f"{'password' if user else 'user'} is missing: a login needs user and password")
    given: dict[str, Any] = {}
    if user or api_key:
        given |= {"user": user, "password": password or api_key}
    if tls or ca_file:
        given |= {"tls": True}
    if ca_file:
        given |= {"ca_file": ca_file}
    return Servers.parse(servers, **given) if isinstance(servers, str) else replace(servers, **given)


# Positions


def _position(name: str, given: Position) -> Position:
    """Return an offset, offsets, a word or a time with a time zone. Raises `InvalidRequest`."""
    if isinstance(given, str) and given not in ("earliest", "latest"):
        try:
            given = datetime.datetime.fromisoformat(given)
        except ValueError:
            raise InvalidRequest(
                f"{name}: expected an offset, 'earliest', 'latest' or a time such as '2026-11-15T10:00', got {given!r}"
            ) from None
    if isinstance(given, datetime.datetime):
        return given if given.tzinfo is not None else given.replace(tzinfo=datetime.UTC)
    if isinstance(given, datetime.date):
        return datetime.datetime(given.year, given.month, given.day, tzinfo=datetime.UTC)
    offsets = given.values() if isinstance(given, Mapping) else () if isinstance(given, str) else (given,)
    for offset in offsets:
        if not isinstance(offset, int):
            raise InvalidRequest(f"{name}: expected an offset, a text or a time, got {offset!r}")
    return given


def _ranges(client: FlightClient, topic: str, partitions: Sequence[int] | None, start: Position, stop: Position) -> list[_Range]:
    """Return the ranges to read, without empty ones. Raises `UnknownTopic`, `UnknownPartition`."""
    held = dict(enumerate(client.describe([topic])[topic].partitions))
    for partition in partitions or ():
        if partition not in held:
            raise UnknownPartition(topic, partition)
    chosen = held if partitions is None else {partition: held[partition] for partition in partitions}
    firsts, ends = _offsets(client, topic, chosen, start), _offsets(client, topic, chosen, stop)
    return [(partition, firsts[partition], ends[partition]) for partition in chosen if firsts[partition] < ends[partition]]


def _offsets(client: FlightClient, topic: str, held: Mapping[int, PartitionState], position: Position) -> dict[int, int]:
    """Return the offset of the position in each partition, within its bounds."""
    if position == "latest":
        return {partition: state.end for partition, state in held.items()}
    found: Mapping[int, int] = {}
    if isinstance(position, datetime.datetime):
        milliseconds = -((_EPOCH - position) // datetime.timedelta(milliseconds=1))  # rounded up: no earlier record is read
        times = client.offset_for_time(topic, dict.fromkeys(held, milliseconds)) if held else {}
        found = {partition: held[partition].end if offset is None else offset for partition, offset in times.items()}
    elif isinstance(position, Mapping):
        found = position
    elif isinstance(position, int):
        found = dict.fromkeys(held, position)
    return {partition: min(max(found.get(partition, 0), state.first), state.end) for partition, state in held.items()}


def _rows(client: FlightClient, topic: str, ranges: Iterable[_Range], columns: Sequence[str], rows_max: int) -> Iterator[pa.RecordBatch]:
    with client:
        for partition, first, end in ranges:
            yield from client.read(topic, partition, first, end, columns=columns, rows_max=rows_max)


# Typed values


def _check_value_arguments(format: str, schema: str | bytes, version: int, framing: str, bad_records: str) -> None:
    """Check the arguments that need no broker. Raises `InvalidRequest`."""
    if format not in (*FORMATS, "auto"):
        raise InvalidRequest(f"value_format: expected {', '.join(FORMATS)} or auto, got {format!r}")
    if bad_records not in BAD_RECORDS:
        raise InvalidRequest(f"bad_records: expected {' or '.join(BAD_RECORDS)}, got {bad_records!r}")
    if format == "auto" and schema:
        raise InvalidRequest("value_format: 'auto' is the format of the topic's schema; with value_schema, name the format")
    if schema and version:
        raise InvalidRequest("value_schema and value_version are both set: a definition has no versions, set only one")
    for name, given in (("value_schema", schema), ("value_version", version), ("value_framing", framing != "none")):
        if given and format in ("raw", "string"):
            raise InvalidRequest(f"{name} has no effect with value_format {format!r}: set value_format")


def _reader_spec(client: FlightClient, topic: str, format: str, schema: str | bytes, version: int, framing: str) -> tuple[ReaderSpec, bool]:
    """Return the reader spec, and whether it is from the registry. Raises `InvalidRequest`, `UnknownSchema`."""
    if format != "auto":
        check_framing(format, framing)
    if format == "string" or schema:
        return ReaderSpec(format, schema.encode() if isinstance(schema, str) else schema, framing=framing), False
    found = client.schema(topic, version)
    if found is None:
        raise InvalidRequest(f"topic {topic} has no required schema (headrace schema require): set value_format and value_schema")
    if format not in ("auto", found.kind):
        raise InvalidRequest(f"topic {topic} requires schema {found.name}, which is {found.kind}, but value_format is {format}")
    check_framing(found.kind, framing)
    return ReaderSpec(found.kind, found.definition, found.others, framing=framing), True


def _decoder(schema: pa.Schema, spec: ReaderSpec, bad_records: str, *, refreshes_schema: bool) -> Decoder:
    """Return the decoder of these columns. Raises `InvalidSchema`."""
    kind = arrow_type(spec.reader().shape)
    fields = [pa.field("value", kind) if field.name == "value" else field for field in schema]
    if bad_records == "null":
        fields.append(pa.field(ERROR_COLUMN, pa.string()))
    return Decoder(spec, pa.schema(fields), kind, bad_records, refreshes_schema=refreshes_schema)
