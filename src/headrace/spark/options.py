"""Every option of the format `headrace`, in one table. `docs/spark.md` shows the same table, and a test compares them.

The names are those of Spark's Kafka source and sink, so that a job moves by changing the format and the address. Spark hands over
texts under lower-case names; an option that is not in the table is refused, because a misspelt limit that is silently ignored is
found out in production.
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
    """One row of the table; `default` and `meaning` are for people, `used_by` is batch, stream, read, write or all."""

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
    Option("user", "none", "all", "whom to log in as"),
    Option(
        "password", "none", "all", "the password, or where it is: `file:PATH` or `env:VARIABLE` of the driver. Without `user`: an API key"
    ),
    Option("password.file", "none", "all", "a file of the driver that holds the password"),
    Option("tls", "false", "all", "encrypt; also if the address begins with `grpc+tls://`"),
    Option("tls.ca", "those of the system", "all", "a PEM file with the authorities to trust, on the driver and on every executor"),
    Option("tls.serverName", "the host", "all", "the name the certificate has to carry"),
    Option("tls.certificate", "none", "all", "a PEM file with the certificate to show, there too"),
    Option("tls.key", "none", "all", "a PEM file with its key, there too"),
    Option("kafka.request.timeout.ms", "30000", "all", "how long one request may take", aliases=("request.timeout.ms",)),
    Option(
        "kafka.security.protocol", "PLAINTEXT", "all", "`SSL` and `SASL_SSL` turn on `tls`; user and password may come from a JAAS text"
    ),
    Option("kafka.sasl.jaas.config", "none", "all", 'user and password as a Kafka job gives them: `… username="u" password="p";`'),
    Option("kafka.sasl.mechanism", "PLAIN", "all", "`PLAIN` and `SCRAM-…` mean user and password; others are refused"),
    Option("kafka.ssl.truststore.location", "none", "all", "the same as `tls.ca`, if `kafka.ssl.truststore.type` is `PEM`"),
    Option("kafka.ssl.truststore.type", "PEM", "all", "`PEM`; others are refused"),
    Option(
        "kafka.ssl.keystore.location", "none", "all", "`tls.certificate` and `tls.key` in one file, if `kafka.ssl.keystore.type` is `PEM`"
    ),
    Option("kafka.ssl.keystore.type", "PEM", "all", "`PEM`; others are refused"),
)

SOURCE_OPTIONS: Final = (
    Option("subscribe", "one of the three", "read", "topics, separated by commas"),
    Option(
        "subscribePattern",
        "one of the three",
        "read",
        "a regular expression (of Python) that a topic's whole name has to match; dead letters (`….dlq`) only if it says `dlq`",
    ),
    Option("assign", "one of the three", "read", 'partitions: `{"orders":[0,1]}`'),
    Option(
        "startingOffsets",
        "`earliest`; streams `latest`",
        "read",
        '`earliest`, `latest` (streams only), or `{"orders":{"0":23,"1":-2}}`, where -2 is earliest and -1 latest. '
        "A stream looks at it in its first run only; partitions that appear later are read from their first record",
    ),
    Option(
        "startingOffsetsByTimestamp",
        "none",
        "read",
        '`{"orders":{"0":1700000000000}}`: the first record of that time (Unix ms) or later. Wins over `startingOffsets`',
    ),
    Option("startingTimestamp", "none", "read", "the same time for every partition. Wins over both"),
    Option("startingOffsetsByTimestampStrategy", "error", "read", "if no record is that young: `error`, or start at the `latest`"),
    Option("endingOffsets", "latest", "batch", "where to stop, exclusive: `latest`, or offsets as above (-1 is latest)"),
    Option("endingOffsetsByTimestamp", "none", "batch", "stop before the first record of that time. No such record: `latest`"),
    Option("endingTimestamp", "none", "batch", "the same time for every partition. Wins over both"),
    Option(
        "failOnDataLoss", "true", "read", "fail if records are gone before they were read (retention, deleted topics), else warn and skip"
    ),
    Option("maxOffsetsPerTrigger", "none", "stream", "records per micro-batch at most, shared out by how much each partition has to give"),
    Option("maxBytesPerTrigger", "none", "stream", "the same in bytes (`64m`), estimated by the partition's average record"),
    Option("minOffsetsPerTrigger", "none", "stream", "wait for so many records; `AvailableNow` does not wait"),
    Option("maxTriggerDelay", "15m", "stream", "wait no longer than this for `minOffsetsPerTrigger`"),
    Option("minPartitions", "none", "read", "cut the offsets into so many tasks, at the borders of batches in the log"),
    Option("maxRecordsPerPartition", "none", "read", "no task reads more records than this"),
    Option("includeHeaders", "false", "all", "a column `headers`"),
    Option("groupIdPrefix", "spark-headrace", "stream", "progress is committed to the group PREFIX-TOPICS, where lag can be seen"),
    Option("kafka.group.id", "none", "stream", "or to this group", aliases=("group.id",)),
    Option("kafkaConsumer.pollTimeoutMs", "120000", "read", "how long a running query waits for a broker that is away"),
    Option("fetchOffset.numRetries", "3", "read", "how often the driver tries again at the start"),
    Option("fetchOffset.retryIntervalMs", "10", "read", "the first pause between two tries; it doubles each time, up to 2 s"),
)

SINK_OPTIONS: Final = (
    Option("topic", "none", "write", "where every row goes; wins over a column `topic`"),
    Option("txnAppId", "none", "write", "with `txnVersion`: a batch job that is run again under the same two is published once"),
    Option("txnVersion", "none", "write", "grows from run to run of the same `txnAppId`"),
    Option(
        "kafka.delivery.timeout.ms", "120000", "write", "how long a write waits for a broker that is away", aliases=("delivery.timeout.ms",)
    ),
)

VALUE_OPTIONS: Final = (
    Option("value.format", "raw", "read", "`json`, `avro`, `protobuf`, `string` or `raw`: typed columns instead of bytes"),
    Option("value.schema", "what the topic requires", "read", "the text of the schema of the values, instead of the registry's"),
    Option("value.version", "the required one", "read", "the version of the required schema that gives the types"),
    Option("badRecords", "fail", "read", "a value that cannot be read: `fail`, `dlq` (move the record to the dead letters) or `null`"),
)

OPTIONS: Final = CONNECTION_OPTIONS + SOURCE_OPTIONS + SINK_OPTIONS + VALUE_OPTIONS

OF_SPARK: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "path", "partition.metadata.cache.ttl.ms"})
"""What Spark, or a Kafka job, may hand over and what has no meaning here."""

REFUSED: Final = {
    "kafka.auto.offset.reset": "use startingOffsets: where a stream begins is decided once, and then by its checkpoint",
    "kafka.key.deserializer": "keys arrive as bytes: use a cast or a function on the column",
    "kafka.value.deserializer": "values arrive as bytes: use value.format, or a function on the column",
    "kafka.key.serializer": "keys are written as bytes: cast the column to string or binary",
    "kafka.value.serializer": "values are written as bytes: cast the column to string or binary",
    "kafka.enable.auto.commit": "the checkpoint decides what was read; progress is committed for display only",
    "kafka.interceptor.classes": "there is no Java client here that could run them",
    "kafka.ssl.keystore.key": "name files instead, in tls.certificate and tls.key",
    "kafka.ssl.keystore.password": "only PEM files without a password are read; name them in tls.certificate and tls.key",
    "kafka.ssl.key.password": "only PEM files without a password are read; name them in tls.certificate and tls.key",
}

_BY_NAME: Final = {name.lower(): option.name for option in OPTIONS for name in (option.name, *option.aliases)}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)?", re.ASCII | re.IGNORECASE)
_DURATION_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE: Final = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)


def option_table(options: tuple[Option, ...]) -> str:
    """As `docs/spark.md` shows it."""
    rows = [
        f"| {' , '.join(f'`{name}`' for name in (one.name, *one.aliases))} | {one.default} | {one.used_by} | {one.meaning} |"
        for one in options
    ]
    return "\n".join(["| option | default | for | meaning |", "|---|---|---|---|", *rows]).replace("` , `", "`, `")


class Options:
    """The options of one read or write, checked for names; values are checked when they are asked for."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given: dict[str, str] = {}
        for spelling, value in given.items():
            name = _canonical(spelling)
            if name is None:
                continue
            if self._given.setdefault(name, value) != value:
                raise ConfigError(f"option {name} is given twice, with different values (also as {spelling})")

    def __repr__(self) -> str:
        """Names only: a value may be a password."""
        return f"Options({', '.join(sorted(self._given))})"

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def text(self, name: str, default: str = "") -> str:
        """As it was given, without spaces around it."""
        assert name in _NAMES, f"{name} is not in the table"
        return self._given.get(name, default).strip()

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name).lower()
        if text not in ("", "true", "false"):
            raise ConfigError(f'option {name} is true or false, not "{text}"')
        return text == "true" if text else default

    def count(self, name: str, default: _T, *, least: int = 1) -> int | _T:
        text = self.text(name)
        if not text:
            return default
        if not re.fullmatch(r"-?\d+", text, re.ASCII) or int(text) < least:
            raise ConfigError(f'option {name} is a number of at least {least}, not "{text}"')
        return int(text)

    def duration_ms(self, name: str, default: int) -> int:
        """`15m`, `30s`, `500ms`; a number alone is milliseconds, as in Spark."""
        text = self.text(name)
        match = _DURATION.fullmatch(text)
        if text and match is None:
            raise ConfigError(f'option {name} is a duration such as 15m, 30s or 500ms, not "{text}"')
        return int(match[1]) * _DURATION_UNITS[(match[2] or "ms").lower()] if match else default

    def size_bytes(self, name: str) -> int | None:
        """`64m`, `1g`, `100000`; the units are powers of 1024, as in Spark."""
        text = self.text(name)
        match = _SIZE.fullmatch(text)
        if text and (match is None or int(match[1]) < 1):
            raise ConfigError(f'option {name} is a size such as 64m or 1g, not "{text}"')
        return int(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " ") if match else None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the words; the first is the default."""
        text = self.text(name, choices[0]).lower()
        if text not in choices:
            raise ConfigError(f'option {name} is {" or ".join(choices)}, not "{text}"')
        return text


_NAMES: Final = frozenset(option.name for option in OPTIONS)


def _canonical(spelling: str) -> str | None:
    """The name in the table; None for what Spark adds and for what only tunes a Kafka client."""
    name = spelling.lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in REFUSED:
        raise ConfigError(f"option {spelling} is not supported: {REFUSED[name]}")
    # A Kafka client knows hundreds of settings for its own buffers and threads; they have nothing to tune here.
    if name in OF_SPARK or name.startswith("kafka."):
        return None
    near = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.7)
    hint = f"; did you mean {_BY_NAME[near[0]]}?" if near else "; docs/spark.md lists them all"
    raise ConfigError(f"there is no option {spelling}{hint}")
