"""Table of all options of the format `headrace`. `docs/spark.md` shows the same table, and a test compares them.

The names are those of Spark's Kafka source and sink, so that a Kafka job only changes the format and the address. Spark passes strings
under lower-case names. An option that is not in the table is an error, because an ignored misspelt limit fails in production.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from headrace.errors import ConfigError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `default` and `meaning` are documentation; `used_by` is batch, stream, read, write or all."""

    name: str
    default: str
    used_by: str
    meaning: str
    aliases: tuple[str, ...] = ()


CONNECTION_OPTIONS: Final = (
    Option(
        "kafka.bootstrap.servers",
        "required",
        "all",
        "addresses of the Flight endpoint, `host:port,…`; the port is 8815 if left out",
        aliases=("bootstrap.servers", "servers"),
    ),
    Option("user", "none", "all", "user name"),
    Option(
        "password", "none", "all", "the password, or its location on the driver: `file:PATH` or `env:VARIABLE`. Without `user`: an API key"
    ),
    Option("password.file", "none", "all", "file on the driver that holds the password"),
    Option("tls", "false", "all", "use TLS; also on if the address begins with `grpc+tls://`"),
    Option("tls.ca", "the system's", "all", "PEM file with the trusted certificate authorities, on the driver and on every executor"),
    Option("tls.serverName", "the host", "all", "the name expected in the server certificate"),
    Option("tls.certificate", "none", "all", "PEM file with the client certificate, on the driver and on every executor"),
    Option("tls.key", "none", "all", "PEM file with the key of the client certificate, on the driver and on every executor"),
    Option("kafka.request.timeout.ms", "30000", "all", "timeout of one request", aliases=("request.timeout.ms",)),
    Option(
        "kafka.security.protocol", "PLAINTEXT", "all", "`SSL` and `SASL_SSL` turn on `tls`; `kafka.sasl.jaas.config` may hold the login"
    ),
    Option("kafka.sasl.jaas.config", "none", "all", 'user and password as in a Kafka job: `… username="u" password="p";`'),
    Option("kafka.sasl.mechanism", "PLAIN", "all", "`PLAIN` or `SCRAM-…`: log in with user and password; others are an error"),
    Option("kafka.ssl.truststore.location", "none", "all", "the same as `tls.ca`, if `kafka.ssl.truststore.type` is `PEM`"),
    Option("kafka.ssl.truststore.type", "PEM", "all", "`PEM`; others are an error"),
    Option(
        "kafka.ssl.keystore.location", "none", "all", "`tls.certificate` and `tls.key` in one file, if `kafka.ssl.keystore.type` is `PEM`"
    ),
    Option("kafka.ssl.keystore.type", "PEM", "all", "`PEM`; others are an error"),
)

SOURCE_OPTIONS: Final = (
    Option("subscribe", "one of the three", "read", "topics, separated by commas"),
    Option(
        "subscribePattern",
        "one of the three",
        "read",
        "a Python regular expression that matches the whole name of a topic; dead letters (`….dlq`) only if it contains `dlq`",
    ),
    Option("assign", "one of the three", "read", 'partitions: `{"orders":[0,1]}`'),
    Option(
        "startingOffsets",
        "`earliest`; streams `latest`",
        "read",
        '`earliest`, `latest` (streams only), or `{"orders":{"0":23,"1":-2}}`, where -2 is earliest and -1 latest. '
        "A stream uses it only when it has no checkpoint; partitions added later are read from their first record",
    ),
    Option(
        "startingOffsetsByTimestamp",
        "none",
        "read",
        '`{"orders":{"0":1700000000000}}`: the first record of that time (Unix ms) or later. Overrides `startingOffsets`',
    ),
    Option("startingTimestamp", "none", "read", "the same time for every partition. Overrides both"),
    Option("startingOffsetsByTimestampStrategy", "error", "read", "if there is no such record: `error`, or start at `latest`"),
    Option("endingOffsets", "latest", "batch", "the end, exclusive: `latest`, or offsets as above (-1 is latest)"),
    Option("endingOffsetsByTimestamp", "none", "batch", "end before the first record of that time. No such record: `latest`"),
    Option("endingTimestamp", "none", "batch", "the same time for every partition. Overrides both"),
    Option("failOnDataLoss", "true", "read", "fail if unread records no longer exist (retention, deleted topics); `false`: warn and skip"),
    Option("maxOffsetsPerTrigger", "none", "stream", "maximum records per micro-batch, in proportion to the backlog of each partition"),
    Option("maxBytesPerTrigger", "none", "stream", "the same in bytes (`64m`), estimated from the average record size of the partition"),
    Option("minOffsetsPerTrigger", "none", "stream", "minimum records per micro-batch; ignored by `AvailableNow`"),
    Option("maxTriggerDelay", "15m", "stream", "maximum wait for `minOffsetsPerTrigger`"),
    Option("minPartitions", "none", "read", "split the offsets into this many tasks, at batch boundaries where there are any"),
    Option("maxRecordsPerPartition", "none", "read", "maximum records per task"),
    Option("localFiles", "true", "read", "read the files of a broker on the same machine, if the task may open them"),
    Option("includeHeaders", "false", "all", "add a column `headers`"),
    Option("groupIdPrefix", "spark-headrace", "stream", "progress is committed to the group PREFIX-TOPICS, which shows the lag"),
    Option("kafka.group.id", "none", "stream", "progress is committed to this group instead", aliases=("group.id",)),
    Option("kafkaConsumer.pollTimeoutMs", "120000", "read", "how long a running query retries while the broker is unavailable"),
    Option("fetchOffset.numRetries", "3", "read", "number of retries before the query starts"),
    Option("fetchOffset.retryIntervalMs", "10", "read", "the first pause between retries; it doubles each time, up to 5 s"),
)

SINK_OPTIONS: Final = (
    Option("topic", "none", "write", "the topic of every row; overrides a column `topic`"),
    Option("txnAppId", "none", "write", "with `txnVersion`: a batch job repeated with the same two values is published once"),
    Option("txnVersion", "none", "write", "a number that grows with each write of the same `txnAppId`"),
    Option(
        "kafka.delivery.timeout.ms",
        "120000",
        "write",
        "how long a write retries while the broker is unavailable",
        aliases=("delivery.timeout.ms",),
    ),
)

VALUE_OPTIONS: Final = (
    Option("value.format", "raw", "read", "`json`, `avro`, `protobuf`, `string` or `raw`: typed columns instead of bytes"),
    Option("value.schema", "the topic's", "read", "definition of the schema of the values, instead of the registered one"),
    Option("value.version", "the required one", "read", "version of the topic's schema that defines the types"),
    Option(
        "value.framing",
        "none",
        "read",
        "`confluent`: a value begins with a zero byte and a schema id of 4 bytes, as Confluent's serializers write; for `avro` and `json`",
    ),
    Option("badRecords", "fail", "read", "action for a value that cannot be decoded: `fail`, `dlq` (move to the dead letters) or `null`"),
)

OPTIONS: Final = CONNECTION_OPTIONS + SOURCE_OPTIONS + SINK_OPTIONS + VALUE_OPTIONS

IGNORED: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "path", "partition.metadata.cache.ttl.ms"})
"""Options that Spark or a Kafka job may pass and that have no effect."""

TEMPORARY_VIEW: Final = (
    "Spark keeps no options for a table of a Python source. Use CREATE TEMPORARY VIEW … USING headrace OPTIONS (servers …, subscribe …)"
)

UNSUPPORTED: Final = {
    "kafka.auto.offset.reset": "use startingOffsets for the first start; later starts use the checkpoint",
    "kafka.key.deserializer": "keys are read as bytes: use a cast or a function on the column",
    "kafka.value.deserializer": "values are read as bytes: use value.format, or a function on the column",
    "kafka.key.serializer": "keys are written as bytes: cast the column to string or binary",
    "kafka.value.serializer": "values are written as bytes: cast the column to string or binary",
    "kafka.enable.auto.commit": "the checkpoint decides what was read; progress is committed for monitoring only",
    "kafka.interceptor.classes": "the client is not a Java client and cannot run them",
    "kafka.ssl.keystore.key": "set the files tls.certificate and tls.key instead",
    "kafka.ssl.keystore.password": "only PEM files without a password are supported; set tls.certificate and tls.key",
    "kafka.ssl.key.password": "only PEM files without a password are supported; set tls.certificate and tls.key",
}

_BY_NAME: Final = {name.lower(): option.name for option in OPTIONS for name in (option.name, *option.aliases)}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)?", re.ASCII | re.IGNORECASE)
_DURATION_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)


def option_table(options: tuple[Option, ...]) -> str:
    """Return the Markdown table of `docs/spark.md`."""
    rows = [
        f"| {' , '.join(f'`{name}`' for name in (one.name, *one.aliases))} | {one.default} | {one.used_by} | {one.meaning} |"
        for one in options
    ]
    return "\n".join(["| option | default | for | meaning |", "|---|---|---|---|", *rows]).replace("` , `", "`, `")


class Options:
    """Options of one read or write. The constructor checks the names, each accessor the value."""

    def __init__(self, given: Mapping[str, str]) -> None:
        if "provider" in given:  # Spark passes the properties of the table as options, and drops all options when the table is read
            raise ConfigError(f"CREATE TABLE … USING headrace is not supported: {TEMPORARY_VIEW}")
        self._given: dict[str, str] = {}
        for spelling, value in given.items():
            name = _canonical(spelling)
            if name is None:
                continue
            if self._given.setdefault(name, value) != value:
                raise ConfigError(f"option {name} is given twice, with different values (also as {spelling})")

    def __repr__(self) -> str:
        """Show names only: a value may be a password."""
        return f"Options({', '.join(sorted(self._given))})"

    def __bool__(self) -> bool:
        return bool(self._given)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def text(self, name: str, default: str = "") -> str:
        """Return the value, stripped."""
        assert name in _NAMES, f"{name} is not in the table"
        return self._given.get(name, default).strip()

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name).lower()
        if text not in ("", "true", "false"):
            raise ConfigError(f'option {name}: expected true or false, got "{text}"')
        return text == "true" if text else default

    def count(self, name: str, default: _T, *, least: int = 1) -> int | _T:
        text = self.text(name)
        if not text:
            return default
        if not re.fullmatch(r"-?\d+", text, re.ASCII) or int(text) < least:
            raise ConfigError(f'option {name}: expected a number of at least {least}, got "{text}"')
        return int(text)

    def duration_ms(self, name: str, default: int) -> int:
        """Parse `15m`, `30s`, `500ms`; a number without a unit is milliseconds, as in Spark."""
        text = self.text(name)
        match = _DURATION.fullmatch(text)
        if text and match is None:
            raise ConfigError(f'option {name}: expected a duration such as 15m, 30s or 500ms, got "{text}"')
        return int(match[1]) * _DURATION_UNITS[(match[2] or "ms").lower()] if match else default

    def size_bytes(self, name: str) -> int | None:
        """Parse `64m`, `1g`, `100000`; the units are powers of 1024, as in Spark."""
        text = self.text(name)
        match = _SIZE.fullmatch(text)
        if text and (match is None or int(match[1]) < 1):
            raise ConfigError(f'option {name}: expected a size such as 64m or 1g, got "{text}"')
        return int(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " ") if match else None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of `choices`; the first is the default."""
        text = self.text(name, choices[0]).lower()
        if text not in choices:
            raise ConfigError(f'option {name}: expected {" or ".join(choices)}, got "{text}"')
        return text


_NAMES: Final = frozenset(option.name for option in OPTIONS)


def _canonical(spelling: str) -> str | None:
    """Return the name in the table; None for options that have no effect."""
    name = spelling.lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in UNSUPPORTED:
        raise ConfigError(f"option {spelling} is not supported: {UNSUPPORTED[name]}")
    # A Kafka client has hundreds of settings for its own buffers and threads.
    if name in IGNORED or name.startswith("kafka."):
        return None
    near = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.7)
    hint = f"; did you mean {_BY_NAME[near[0]]}?" if near else "; docs/spark.md lists all options"
    raise ConfigError(f"there is no option {spelling}{hint}")
