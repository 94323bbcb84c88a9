"""Driver side of typed values: the schema of the read from options and registry, with errors before any task starts."""

from __future__ import annotations

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from headrace.arrow.reader_spec import FORMATS, FRAMINGS, ReaderSpec, check_framing
from headrace.arrow.values import BAD_RECORDS, ERROR_COLUMN, Decoder
from headrace.errors import ConfigError, InvalidRequest, InvalidSchema, UnknownSchema
from headrace.flight.client import FlightClient, TopicSchema
from headrace.spark.columns import check_columns, raw_schema
from headrace.spark.options import Options
from headrace.spark.retry import RetryPolicy
from headrace.spark.servers import servers_of
from headrace.spark.subscription import Subscription
from headrace.spark.values.types import check_part, json_shape, spark_type


def is_typed(options: Options) -> bool:
    """Return whether values are decoded. Raises `ConfigError` for options that would have no effect."""
    typed = options.choice("value.format", FORMATS) != "raw"
    for name in ("value.schema", "value.version", "value.framing", "badRecords"):
        if not typed and name in options:
            raise ConfigError(f"option {name} needs value.format")
    return typed


def typed_schema(options: Options, client: FlightClient) -> StructType:
    """Return the schema of `load()` when the user gives none. Raises `ConfigError`, `UnknownTopic`."""
    schema = raw_schema(headers=options.flag("includeHeaders", False))
    if not is_typed(options):
        return schema
    value = spark_type(_registered(options, client)[0].reader().shape)
    fields = [StructField("value", value) if field.name == "value" else field for field in schema.fields]
    if options.choice("badRecords", BAD_RECORDS) == "null":
        fields.append(StructField(ERROR_COLUMN, StringType()))
    return StructType(fields)


def plan(options: Options, schema: StructType, client: FlightClient) -> Decoder:
    """Return the decoder for this schema, from the user or from `typed_schema`. Raises `ConfigError`, `UnknownTopic`."""
    bad_records = options.choice("badRecords", BAD_RECORDS)
    value = _value_of(schema, bad_records)
    format = options.choice("value.format", FORMATS)
    refreshes_schema = False
    if value is not None and format == "json" and not _has_schema(options, client):
        spec = ReaderSpec(format, shape=json_shape(value), framing=_framing(options))
    else:
        spec, refreshes_schema = _registered(options, client)
        given = spark_type(spec.reader().shape)
        if value is not None and format == "json" and value != given:
            spec, refreshes_schema = ReaderSpec(format, shape=json_shape(value), framing=spec.framing), False
        elif value is not None:
            check_part(value, given)
    values = StructType([StructField("value", spark_type(spec.reader().shape) if value is None else value)])
    kind = to_arrow_schema(values, timezone="UTC").field("value").type
    given_schema = to_arrow_schema(schema, timezone="UTC")
    return Decoder(spec, given_schema, kind, bad_records, RetryPolicy.of(options).while_running, refreshes_schema)


def _value_of(schema: StructType, bad_records: str) -> DataType | None:
    """Return the type of the column `value`, if selected. Check the other columns."""
    others = [field for field in schema.fields if field.name not in ("value", ERROR_COLUMN)]
    check_columns(StructType(others))
    value: DataType | None = None
    for field in schema.fields:
        if field.name == ERROR_COLUMN and (bad_records != "null" or field.dataType != StringType()):
            raise ConfigError(f"column {ERROR_COLUMN} must be a string and needs badRecords=null")
        if field.name == "value":
            value = field.dataType
            if not field.nullable:
                raise ConfigError("the schema has value as not null, but it may be null in a record")
    if isinstance(value, BinaryType):
        raise ConfigError("the schema has value as binary, but value.format defines another type; remove one of the two")
    return value


def _has_schema(options: Options, client: FlightClient) -> bool:
    return "value.schema" in options or any(found is not None for _, found in _schemas(options, client, 0))


def _registered(options: Options, client: FlightClient) -> tuple[ReaderSpec, bool]:
    """Return the reader spec from the option `value.schema` or from the registry, and whether it is the latter."""
    format, framing = options.choice("value.format", FORMATS), _framing(options)
    if format == "string":
        return ReaderSpec(format), False
    if "value.schema" in options:
        if "value.version" in options:
            raise ConfigError("options value.schema and value.version are both set: a definition has no versions, set only one")
        return _checked(ReaderSpec(format, options.text("value.schema").encode(), framing=framing), "option value.schema"), False
    found = _required(options, client, format)
    spec = ReaderSpec(format, found.definition, found.others, framing=framing)
    return _checked(spec, f"schema {found.name} version {found.version}"), True


def _framing(options: Options) -> str:
    framing = options.choice("value.framing", FRAMINGS)
    try:
        check_framing(options.choice("value.format", FORMATS), framing)
    except InvalidRequest as error:
        raise ConfigError(f"option value.framing: {error}") from None
    return framing


def _required(options: Options, client: FlightClient, format: str) -> TopicSchema:
    """Return the schema that the topics require. They must agree on the schema, not on its version."""
    first, best = "", None
    for topic, found in _schemas(options, client, options.count("value.version", 0)):
        if found is None:
            given = " in .schema(…), or as the option value.schema" if format == "json" else " as the option value.schema"
            raise ConfigError(f"topic {topic} has no required schema (headrace schema require), so value.format {format} needs one{given}")
        if found.kind != format:
            raise ConfigError(f"topic {topic} requires schema {found.name}, which is {found.kind}, but value.format is {format}")
        if best is not None and best.name != found.name:
            raise ConfigError(f"topics {first} and {topic} require two schemas, {best.name} and {found.name}: read them separately")
        if best is None or found.version > best.version:
            first, best = first or topic, found
    if best is None:
        raise ConfigError("no topic exists yet whose schema could be used: set the option value.schema")
    return best


def _schemas(options: Options, client: FlightClient, version: int) -> list[tuple[str, TopicSchema | None]]:
    """Return the required schema of each topic. Raises `ConfigError` with similar names for a topic that does not exist."""

    def request() -> list[tuple[str, TopicSchema | None]]:
        return [(topic, client.schema(topic, version)) for topic in Subscription.of(options).states(client)]

    try:
        return RetryPolicy.of(options).before_start(request, servers_of(options).addresses)
    except UnknownSchema as error:
        raise ConfigError(f"option value.version: {error}") from None


def _checked(spec: ReaderSpec, origin: str) -> ReaderSpec:
    try:
        spec.reader()
    except InvalidSchema as error:
        raise ConfigError(f"{origin}: {error}") from None
    return spec
