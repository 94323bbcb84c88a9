"""Broker configuration: one frozen tree with every key, its default, bounds and meaning. `config_sources.py` reads it.

The configuration never holds a secret, only the file or variable that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace import limits
from headrace.limits import KIB, MIB
from headrace.records import Ack
from headrace.server.kafka import EngineKind, Kafka, Sasl
from headrace.server.settings import (
    AccessMode,
    Bind,
    Binds,
    Choice,
    Count,
    Directory,
    Duration,
    Flag,
    FlyMqDialect,
    FujinHeaders,
    Lines,
    LogFormat,
    LogLevel,
    QuicRetry,
    Reference,
    References,
    SecretReference,
    Setting,
    Size,
    TlsVersion,
    setting,
    settings_of,
)

_GIB: Final = 1024 * MIB
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
_PRINCIPAL: Final = "The user name, as rules refer to it, of a client without a client certificate on this protocol."
TCP_PROTOCOLS: Final = ("flymq", "rustlog", "blipmq", "figg")
"""The protocols of a TCP address."""
QUIC_PROTOCOLS: Final = ("fujin",)
"""The protocols of a QUIC address."""
FLIGHT_PROTOCOLS: Final = ("flight",)
"""The protocols of a Flight address."""
HTTP_PROTOCOLS: Final = ("http",)
"""The protocols of an HTTP address."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Engine, data directory, durability and encryption."""

    engine: EngineKind = setting(
        Choice(EngineKind),
        "embedded",
        "Where the log is. embedded: in the data directory. kafka: in the cluster of section kafka; the data directory then holds only "
        "generated keys and certificates. The flag --engine sets it.",
    )
    path: Path = setting(
        Directory(),
        "./headrace-data",
        "The data directory. Created if absent, locked by one broker at a time. The flag --data sets it. Here and in the other keys, a "
        "relative path in a file is relative to the directory of the file.",
    )
    ack: Ack = setting(
        Choice(Ack),
        "durable",
        "What an acknowledgement guarantees for new topics. durable: fdatasync has returned. written: handed to the operating "
        "system; survives a crash of the process but not of the machine. none: ordered, not yet written.",
    )
    segment_size: int = setting(
        Size(64 * KIB, 4 * _GIB),
        "128 MiB",
        "The size of a segment file of a new topic. Retention deletes whole segments, so smaller segments free space sooner.",
    )
    journal_size: int = setting(
        Size(1 * MIB, 4 * _GIB),
        "64 MiB",
        "The size of one preallocated journal file. When it is full, the broker checkpoints its segments and continues in the next file.",
    )
    checkpoint_interval: int = setting(
        Duration(100, _HOUR),
        "5s",
        "How often segments are synced so that old journal files can be deleted. A shorter interval means less replay after a crash "
        "and more writes.",
    )
    headroom: int = setting(
        Size(0, 1024 * _GIB),
        "256 MiB",
        "Free disk space that records never use. Below it, publishes fail with 'disk full'; reads and deletes continue.",
    )
    key_file: str = setting(
        Reference("the path of a file"),
        "",
        "The file that holds the encryption key: 32 bytes, or 64 hexadecimal digits. With a key, everything written is encrypted "
        "with AES-256-GCM. A data directory written with a key does not open without it.",
    )
    key_env: str = setting(
        Reference("the name of an environment variable", r"(?![0-9A-Fa-f]{64}$)[A-Za-z_][A-Za-z0-9_]*", is_hidden=True),
        "",
        "The environment variable that holds the encryption key as 64 hexadecimal digits. Not together with storage.key_file.",
    )
    compress: bool = setting(Flag(), False, "Compress the batches of new topics with zstd.")
    direct_writes: bool = setting(
        Flag(),
        True,
        "Write large appends past the page cache, unless a reader follows the partition. Their first reader gets them from the disk. "
        "false: through the cache, for a disk that is slower than its readers.",
    )


@dataclass(frozen=True, slots=True)
class Topics:
    """Defaults for new topics."""

    auto_create: bool = setting(Flag(), True, "Create a topic when a client publishes or subscribes to a name that does not exist.")
    partitions: int = setting(Count(1, limits.PARTITIONS_PER_TOPIC_MAX), 1, "Partitions of an automatically created topic.")
    retention: int = setting(
        Duration(_SECOND, 36_500 * _DAY, zero="forever"),
        0,
        "How long records are kept. A segment is deleted once all its records are older.",
    )
    retention_size: int = setting(
        Size(64 * KIB, 1024 * _GIB, zero="no limit"), 0, "How many bytes a partition keeps. Older whole segments are deleted."
    )


@dataclass(frozen=True, slots=True)
class Listen:
    """Listener addresses."""

    tcp: tuple[Bind, ...] = setting(
        Binds(TCP_PROTOCOLS),
        ["127.0.0.1:9092", "127.0.0.1:5555=blipmq", "127.0.0.1:8119=figg"],
        "TCP addresses. An address serves every TCP protocol (the first bytes of a connection select it), or only those named after "
        "'='. An address beyond loopback needs TLS and authentication, or the flag --insecure. The flag --listen replaces the list.",
    )
    quic: tuple[Bind, ...] = setting(
        Binds(QUIC_PROTOCOLS, kind="QUIC", least=0),
        ["127.0.0.1:4848"],
        "QUIC addresses (UDP) for Fujin. Always encrypted: with tls.certificate, or with a self-signed certificate created in the data "
        "directory. Needs the extra headrace[quic]. If the extra or the port is unavailable, the broker logs that and starts without "
        "QUIC, unless this key is set. The flag --listen-quic replaces the list.",
    )
    flight: tuple[Bind, ...] = setting(
        Binds(FLIGHT_PROTOCOLS, kind="flight", least=0),
        ["127.0.0.1:8815"],
        "Addresses of the Flight endpoint (Arrow Flight over gRPC), for Spark, pandas, Polars and DuckDB. Needs the extra "
        "headrace[flight]. If the extra or the port is unavailable, the broker logs that and starts without the endpoint, unless this key "
        "is set. The flag --listen-flight replaces the list.",
    )
    http: tuple[Bind, ...] = setting(
        Binds(HTTP_PROTOCOLS, kind="HTTP", least=0),
        ["127.0.0.1:9644"],
        "HTTP addresses for operators: /metrics for Prometheus, /healthz, /readyz and /status.json. They have no login and show names of "
        "topics and groups. An address beyond loopback needs tls.certificate and tls.client_ca, or the flag --insecure. Needs the extra "
        "headrace[metrics]. If the extra or the port is unavailable, the broker logs that and starts without it, unless this key is set. "
        "The flag --listen-http replaces the list.",
    )


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS: one certificate for all addresses. The broker checks the files every few seconds and on SIGHUP, and uses changed files for
    new connections."""

    certificate: str = setting(
        Reference("the path of a file"),
        "",
        "The server's certificate in PEM, followed by the intermediate certificates. When set, every TCP address requires TLS.",
    )
    key: str = setting(
        Reference("the path of a file"), "", "The private key of tls.certificate in PEM, not encrypted and not readable by others."
    )
    client_ca: str = setting(
        Reference("the path of a file"),
        "",
        "The CA certificates (PEM) that sign client certificates. When set, every client must present a certificate, and its name "
        "(the first URI or DNS name, else the common name) is the user name.",
    )
    ca: str = setting(
        Reference("the path of a file"),
        "",
        "The CA certificates (PEM) that sign those of the other brokers on one Kafka, for connections to the coordinator. Without it, "
        "those of the system.",
    )
    optional: bool = setting(
        Flag(), False, "Allow peers on this machine (loopback) to connect without TLS on the same addresses. All others still need it."
    )
    minimum: TlsVersion = setting(Choice(TlsVersion), "1.3", "The oldest TLS version accepted.")


@dataclass(frozen=True, slots=True)
class Access:
    """Users and permissions."""

    mode: AccessMode = setting(
        Choice(AccessMode),
        "open",
        "open: every client may do everything, so addresses beyond loopback are rejected. enforced: users, roles, rules and API keys "
        "decide. A client without credentials is the user 'anonymous', who has no permission unless a rule grants one.",
    )
    admin_password_file: str = setting(
        Reference("the path of a file"),
        "",
        "The file that holds the first password of the user 'admin', for an unattended first start. Without it, the broker generates a "
        "password and prints it once. Used only while no enabled user has the role 'admin'.",
    )
    audit_retention: int = setting(
        Duration(_HOUR, 36_500 * _DAY, zero="forever"), "90d", "How long the audit log keeps entries. Whole segments are deleted."
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits per connection and for all connections."""

    connections: int = setting(Count(1, 1_000_000), limits.CONNECTIONS_MAX, "Open connections. Further ones are closed immediately.")
    connections_per_ip: int = setting(Count(1, 1_000_000), limits.CONNECTIONS_PER_IP_MAX, "Open connections from one address.")
    connections_per_user: int = setting(
        Count(1, 1_000_000, zero="no limit"),
        limits.CONNECTIONS_PER_USER_MAX,
        "Open connections that have logged in as one user. Administrators have no such limit.",
    )
    connections_reserved: int = setting(
        Count(1, 1_000, zero="none"),
        limits.CONNECTIONS_RESERVED,
        "Connections of limits.connections that are reserved for administrators when access is enforced. When the others are in use, any "
        "client may open a reserved one, but the broker closes it at limits.login_timeout unless an administrator has logged in on it.",
    )
    flight_connections: int = setting(
        Count(1, 1_000_000),
        limits.FLIGHT_CONNECTIONS_MAX,
        "Open connections to the Flight endpoint. The broker closes connections beyond the limit, those without a call first.",
    )
    frame: int = setting(
        Size(1 * KIB, 1 * _GIB),
        limits.FRAME_BYTES_DEFAULT_MAX,
        "The largest Figg frame. A larger one closes the connection. The other protocols define their own limit.",
    )
    handshake_timeout: int = setting(
        Duration(100, _HOUR),
        f"{limits.HANDSHAKE_SECONDS_MAX:g}s",
        "How long a new connection may take to send the bytes that identify its protocol. The broker then closes it.",
    )
    login_timeout: int = setting(
        Duration(100, _HOUR, zero="never"),
        f"{limits.LOGIN_SECONDS_MAX:g}s",
        "How long a connection may stay without a login when access is enforced. The broker then closes it, unless rules grant "
        "permissions to clients without a login. For BlipMQ, limits.handshake_timeout applies instead.",
    )
    frame_timeout: int = setting(
        Duration(100, _HOUR, zero="never"),
        f"{limits.FRAME_CHECK_SECONDS:g}s",
        "How often incomplete frames are checked. The broker closes a peer that sends less than 1 KiB per second of an incomplete frame.",
    )
    unfinished_frames: int = setting(
        Size(1 * MIB, 1024 * _GIB),
        limits.UNFINISHED_BYTES_MAX,
        "Received bytes of incomplete frames, on all connections together. Beyond the limit, the broker closes connections that add to a "
        "large one.",
    )
    idle_timeout: int = setting(
        Duration(_SECOND, 30 * _DAY, zero="never"),
        f"{limits.IDLE_SECONDS_MAX:g}s",
        "How long a peer that has sent pings may be silent before the broker closes its connection. No limit for peers that never ping.",
    )
    output_buffer: int = setting(
        Size(64 * KIB, 1 * _GIB), limits.OUTPUT_BUFFER_BYTES_MAX, "Unsent bytes for one peer before the broker stops sending it records."
    )
    output_total: int = setting(
        Size(1 * MIB, 1024 * _GIB),
        limits.OUTPUT_TOTAL_BYTES_MAX,
        "Unsent bytes for all peers together. Beyond the limit, peers with unsent bytes get no more records, and peers that have read "
        f"nothing for {limits.OUTPUT_STALL_SECONDS:g} seconds are disconnected.",
    )
    in_flight: int = setting(
        Size(64 * KIB, 1 * _GIB),
        limits.IN_FLIGHT_BYTES_MAX,
        "Published but unacknowledged bytes of one connection before the broker stops reading its socket.",
    )
    staged_memory: int = setting(
        Size(64 * MIB, 64 * _GIB),
        limits.STAGED_MEMORY_BYTES_MAX,
        "Memory for records that exactly-once writers, such as Spark's sink, have staged. From three quarters of it on, records move to "
        "disk. A publication of up to 256 MiB, or of up to three quarters of this memory but at most 512 MiB, is one append. A larger one "
        "takes two to three times as long for each record, and readers see it grow.",
    )
    drain_timeout: int = setting(
        Duration(100, _HOUR), "10s", "How long connections may take to finish when the broker stops. Remaining ones are then closed."
    )


@dataclass(frozen=True, slots=True)
class Figg:
    """The Figg protocol."""

    strict_version: bool = setting(
        Flag(), True, "Reject a frame whose version is not 1. false ignores the version, as the original implementation does."
    )
    ack_each: bool = setting(
        Flag(), False, "Send one ACK per PUBLISH. Otherwise one ACK with the highest sequence number may cover several."
    )
    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class RustLog:
    """The RustLog protocol."""

    auto_create: bool = setting(
        Flag(),
        False,
        "Create the topic that a Produce names, if topics.auto_create is true. The original implementation rejects an unknown topic.",
    )
    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class BlipMq:
    """The BlipMQ protocol."""

    keys: tuple[SecretReference, ...] = setting(
        References(),
        [],
        "References to the API keys: each in a file or an environment variable. Without any, the first start generates one, prints it "
        "once and stores it in the data directory. The flag --blipmq-key adds one. NAME= before a reference sets the user name of the key.",
    )
    retry_backoff: int = setting(
        Duration(1, _HOUR), "100ms", "How long the first delivery waits for its ACK. Each further delivery waits twice as long."
    )
    max_retries: int = setting(Count(1, 1_000), 3, "Deliveries of a message before it moves to the dead letters of its topic.")
    subscription_idle: int = setting(
        Duration(_SECOND, 365 * _DAY, zero="never"), "10m", "How long a subscription without an open connection is kept."
    )
    silent_poll: bool = setting(
        Flag(), False, "Do not answer a POLL of an unknown subscription, as the original implementation does. Otherwise answer NACK 404."
    )


@dataclass(frozen=True, slots=True)
class FlyMq:
    """The FlyMQ protocol."""

    dialect: FlyMqDialect = setting(
        Choice(FlyMqDialect),
        "spec",
        "The dialect of a connection until a request identifies its client. spec: the specification. sdk: the original implementation. "
        "go: the same, with errors as bare text, which the original Go client and CLI print as they are.",
    )
    advertise: str = setting(
        Reference("HOST:PORT", r"[^\s\0]+:[0-9]{1,5}"),
        "",
        "The address that the broker reports to clients that request the cluster metadata. Default: the address that the client used.",
    )
    ack_timeout: int = setting(
        Duration(1, _DAY), "30s", "How long a record of a shared group waits for its acknowledgement before it is delivered again."
    )


@dataclass(frozen=True, slots=True)
class Fujin:
    """The Fujin protocol."""

    readers: tuple[str, ...] = setting(
        Lines('"NAME=TOPIC+…;group=GROUP;start=earliest|latest;mode=shared|ordered"'),
        [],
        "Reader names and their topics. The group defaults to the name of the reader, its start to earliest, and its mode to that of its "
        "other members, or shared. A name that is not listed is the topic of that name.",
    )
    writers: tuple[str, ...] = setting(
        Lines('"NAME=TOPIC"'), [], "Writer names and their topics. A name that is not listed is the topic of that name."
    )
    only_named: bool = setting(Flag(), False, "Reject names that fujin.readers and fujin.writers do not list.")
    write_headers: FujinHeaders = setting(
        Choice(FujinHeaders),
        "auto",
        "Whether a WRITE carries headers. auto: detected from its bytes, except for values whose size is a multiple of 128 KiB. "
        "never: as in the original client. always: as in the table of the specification.",
    )
    message: int = setting(
        Size(1, limits.VALUE_BYTES_MAX), limits.FUJIN_MESSAGE_BYTES_MAX, "The largest value of a WRITE. A larger one is an error."
    )
    fetch_wait: int = setting(
        Duration(1, _MINUTE, zero="not at all"), "500ms", "How long a FETCH waits for its first message before the reply is empty."
    )
    ack_timeout: int = setting(Duration(1, _DAY), "30s", "How long a message waits for its ACK or NACK before it is redelivered.")
    backoff: int = setting(
        Duration(1, _HOUR, zero="at once"), "1s", "The redelivery delay after the first NACK. It doubles with each further NACK."
    )
    attempts: int = setting(
        Count(1, 1_000, zero="no limit"), 5, "Deliveries of a message before it moves to the dead letters of its topic."
    )
    retry: QuicRetry = setting(
        Choice(QuicRetry),
        "auto",
        "When a client must confirm its address with one more round trip (QUIC Retry). auto: while "
        f"{limits.QUIC_UNPROVEN_MAX} or more handshakes are unfinished, as in a flood of forged addresses.",
    )
    ping_interval: int = setting(
        Duration(10, _HOUR, zero="never"), f"{limits.QUIC_PING_SECONDS:g}s", "The time from a ping reply to the next ping."
    )
    ping_timeout: int = setting(
        Duration(10, _HOUR), f"{limits.QUIC_PONG_SECONDS_MAX:g}s", "How long a client may take to answer a ping before it is disconnected."
    )
    idle_timeout: int = setting(
        Duration(_SECOND, _DAY), f"{limits.IDLE_SECONDS_MAX:g}s", "How long a connection may be silent before the broker closes it."
    )
    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class Flight:
    """The Flight endpoint."""

    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)
    local_files: bool = setting(
        Flag(),
        True,
        "Tell clients of Headrace on this machine where records lie in the data directory. A client that may open the files reads them "
        "itself, which takes less processor time.",
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics on the addresses of listen.http."""

    series: int = setting(
        Count(10, 100_000),
        2_000,
        "How many partitions, how many partitions of groups, and how many topics have their own series. Others are left out, and "
        "headrace_series_left_out counts them; the traffic of other topics is summed up.",
    )
    kafka_names: bool = setting(Flag(), False, "Also report the lag of groups as kafka_consumergroup_lag, for existing dashboards.")


@dataclass(frozen=True, slots=True)
class Traces:
    """Traces with OpenTelemetry. Needs the extra headrace[otel] when traces.endpoint is set."""

    endpoint: str = setting(
        Reference("a URL", r"https?://\S+"),
        "",
        "The OTLP/HTTP address that receives spans, such as http://127.0.0.1:4318/v1/traces. Empty: no traces.",
    )
    one_in: int = setting(
        Count(1, 1_000_000),
        100,
        "One of so many batches without a traceparent header is traced. A batch whose first record has one is traced if its sender decided "
        "so.",
    )


@dataclass(frozen=True, slots=True)
class Logging:
    """The broker's log on stderr. Payloads are never logged."""

    level: LogLevel = setting(Choice(LogLevel), "info", "The lowest level that is written.")
    format: LogFormat = setting(Choice(LogFormat), "text", "text for people, json for programs. Both write one line per event.")


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration tree. Immutable while the broker runs."""

    storage: Storage = Storage()
    kafka: Kafka = Kafka()
    topics: Topics = Topics()
    listen: Listen = Listen()
    tls: Tls = Tls()
    access: Access = Access()
    limits: Limits = Limits()
    figg: Figg = Figg()
    rustlog: RustLog = RustLog()
    blipmq: BlipMq = BlipMq()
    flymq: FlyMq = FlyMq()
    fujin: Fujin = Fujin()
    flight: Flight = Flight()
    metrics: Metrics = Metrics()
    traces: Traces = Traces()
    logging: Logging = Logging()


SETTINGS: Final[Mapping[str, Setting]] = settings_of(Config)
SECTIONS: Final = tuple(dict.fromkeys(name.partition(".")[0] for name in SETTINGS))


def is_default(config: Config, name: str) -> bool:
    """Return whether this key was left at its default. A configured value may equal the default but is never the same object."""
    section, _, leaf = name.partition(".")
    return getattr(getattr(config, section), leaf) is SETTINGS[name].default


def tree_of(values: Mapping[str, object]) -> Config:
    """Return the configuration of the value of every key."""

    def section(kind: type[Any], name: str) -> Any:
        prefix = name + "."
        return kind(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})

    return Config(
        storage=section(Storage, "storage"),
        kafka=section(Kafka, "kafka"),
        topics=section(Topics, "topics"),
        listen=section(Listen, "listen"),
        tls=section(Tls, "tls"),
        access=section(Access, "access"),
        limits=section(Limits, "limits"),
        figg=section(Figg, "figg"),
        rustlog=section(RustLog, "rustlog"),
        blipmq=section(BlipMq, "blipmq"),
        flymq=section(FlyMq, "flymq"),
        fujin=section(Fujin, "fujin"),
        flight=section(Flight, "flight"),
        metrics=section(Metrics, "metrics"),
        traces=section(Traces, "traces"),
        logging=section(Logging, "logging"),
    )


def contradictions(config: Config) -> Iterable[tuple[str, str]]:
    """Yield (key, fault) for every rule that concerns more than one key and is broken."""
    tls = config.tls
    if config.storage.key_file and config.storage.key_env:
        yield "storage.key_env", "storage.key_file and storage.key_env are both set; expected one of them"
    yield from _kafka_contradictions(config)
    if bool(tls.certificate) != bool(tls.key):
        name = "tls.certificate" if tls.certificate else "tls.key"
        yield name, "tls.certificate and tls.key must be set together; only one of them is set"
    if not tls.certificate and (tls.client_ca or tls.optional):
        name = "tls.client_ca" if tls.client_ca else "tls.optional"
        yield name, f"{name} is set without tls.certificate and tls.key"


def _kafka_contradictions(config: Config) -> Iterable[tuple[str, str]]:
    kafka, storage = config.kafka, config.storage
    if storage.engine is EngineKind.KAFKA:
        if not kafka.bootstrap:
            yield "kafka.bootstrap", 'storage.engine is "kafka" and kafka.bootstrap is not set; expected HOST:PORT'
        if storage.key_file or storage.key_env:
            yield "storage.engine", "storage.key_file and storage.key_env encrypt the data directory; with Kafka, the cluster must do so"
    if kafka.sasl is not Sasl.NONE and not kafka.password:
        yield "kafka.password", "kafka.sasl is set without kafka.password"
    if kafka.sasl not in (Sasl.NONE, Sasl.OAUTHBEARER) and not kafka.user:
        yield "kafka.user", "kafka.sasl is set without kafka.user"
    if kafka.tls_key and not kafka.tls_certificate:
        yield "kafka.tls_key", "kafka.tls_key is set without kafka.tls_certificate"
    if not kafka.tls and (kafka.tls_ca or kafka.tls_certificate):
        name = "kafka.tls_ca" if kafka.tls_ca else "kafka.tls_certificate"
        yield name, f"{name} is set and kafka.tls is false"
