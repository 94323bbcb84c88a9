"""The configuration: one frozen tree, from one TOML file, the environment and flags.

A flag wins over the environment, the environment over the file, the file over the default. Each key of the tree has a twin in
the environment: `storage.ack` is `HEADRACE__STORAGE__ACK`. Secrets never stand in the configuration, only the name of the file
or variable that holds them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace import limits
from headrace.errors import ConfigError
from headrace.limits import KIB, MIB
from headrace.records import Ack
from headrace.server.choices import AccessMode, FlyMqDialect, FujinHeaders, LogFormat, LogLevel, QuicRetry, TlsVersion
from headrace.server.settings import (
    Bind,
    Binds,
    Choice,
    Count,
    Directory,
    Duration,
    Flag,
    Lines,
    Plain,
    Reference,
    References,
    SecretReference,
    Setting,
    Size,
    setting,
    settings_of,
)

_GIB: Final = 1024 * MIB
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000
_FILE_BYTES_MAX: Final = 1 * MIB
_VARIABLE_PREFIX: Final = "HEADRACE__"
_PRINCIPAL: Final = "Who comes through this door without a client certificate: the name that rules know them by."
TCP_DOORS: Final = ("flymq", "rustlog", "blipmq", "figg")
"""The protocols of a TCP address."""
QUIC_DOORS: Final = ("fujin",)
"""The protocols of a QUIC address."""
BULK_DOORS: Final = ("flight",)
"""The protocols of a bulk address."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where records are kept, and what an acknowledgement promises."""

    path: Path = setting(
        Directory(),
        "./headrace-data",
        "The data directory. It is created if absent and taken by one broker at a time. The flag --data sets it.",
    )
    ack: Ack = setting(
        Choice(Ack),
        "durable",
        "What an acknowledgement promises for new topics. durable: fdatasync has returned. written: handed to the operating "
        "system, survives the death of the process but not of the machine. none: ordered, nothing more.",
    )
    segment_size: int = setting(
        Size(64 * KIB, 4 * _GIB),
        "128 MiB",
        "A segment file of a new topic is closed at this size. Retention gives back whole segments, so smaller ones give back sooner.",
    )
    journal_size: int = setting(
        Size(1 * MIB, 4 * _GIB),
        "64 MiB",
        "The size of one preallocated journal file. A full one makes the log checkpoint its segments and go on in the next.",
    )
    checkpoint_interval: int = setting(
        Duration(100, _HOUR),
        "5s",
        "How often segments are synced so that old journal files can go. Shorter means less to replay after a crash, and more writes.",
    )
    headroom: int = setting(
        Size(0, 1024 * _GIB),
        "256 MiB",
        "Free disk space that is never used for records: below it publishes are refused as 'disk full', reads and deletes go on.",
    )
    key_file: str = setting(
        Reference("the path of a file"),
        "",
        "The file that holds the encryption key: 32 bytes, or 64 hexadecimal digits. With a key, everything written is encrypted "
        "with AES-256-GCM; without the key a data directory written with it does not open.",
    )
    key_env: str = setting(
        Reference("the name of an environment variable", r"(?![0-9A-Fa-f]{64}$)[A-Za-z_][A-Za-z0-9_]*", is_hidden=True),
        "",
        "The environment variable that holds the encryption key as 64 hexadecimal digits. Not together with storage.key_file.",
    )
    compress: bool = setting(Flag(), False, "Compress the batches of new topics with zstd.")


@dataclass(frozen=True, slots=True)
class Topics:
    """What a new topic is made with when nothing else is said."""

    auto_create: bool = setting(Flag(), True, "Create a topic when somebody publishes or attaches to a name that is not there.")
    partitions: int = setting(Count(1, limits.PARTITIONS_PER_TOPIC_MAX), 1, "Partitions of a topic that is created by use.")
    retention: int = setting(
        Duration(_SECOND, 36_500 * _DAY, zero="forever"),
        0,
        "How long records are kept. A whole segment goes once all its records are older.",
    )
    retention_size: int = setting(
        Size(64 * KIB, 1024 * _GIB, zero="no limit"), 0, "How many bytes a partition keeps. The oldest whole segments beyond that go."
    )


@dataclass(frozen=True, slots=True)
class Listen:
    """The doors."""

    tcp: tuple[Bind, ...] = setting(
        Binds(TCP_DOORS),
        ["127.0.0.1:9092", "127.0.0.1:5555=blipmq", "127.0.0.1:8119=figg"],
        "Where TCP connections are taken. An address serves every TCP protocol, the first bytes tell them apart, or only those named "
        "behind it. An address beyond loopback needs TLS and authentication, or the flag --insecure. The flag --listen replaces the list.",
    )
    quic: tuple[Bind, ...] = setting(
        Binds(QUIC_DOORS, kind="QUIC", least=0),
        [],
        "Where QUIC connections (UDP) are taken; Fujin's own port is 4848. They are always encrypted: with tls.certificate, or with a "
        "self-signed one that is made in the data directory. Needs the extra headrace[quic]. The flag --listen-quic replaces the list.",
    )
    bulk: tuple[Bind, ...] = setting(
        Binds(BULK_DOORS, kind="bulk", least=0),
        ["127.0.0.1:8815"],
        "Where the bulk lane (Arrow Flight over gRPC) is: for Spark, pandas, Polars, DuckDB. Needs the extra headrace[bulk]; unless it was "
        "asked for, the broker starts without it where that or the port is not to be had, and says so. The flag --bulk replaces the list.",
    )


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption on the wire: one certificate for all TCP addresses. The files are looked at every few seconds and on SIGHUP; new ones
    are used for new connections."""

    certificate: str = setting(
        Reference("the path of a file"),
        "",
        "The server's certificate in PEM, followed by those between it and its CA. With it, every TCP address asks for TLS.",
    )
    key: str = setting(
        Reference("the path of a file"), "", "The private key of tls.certificate in PEM, not encrypted and not readable by others."
    )
    client_ca: str = setting(
        Reference("the path of a file"),
        "",
        "The CA certificates (PEM) that clients are to be signed by. With it every client has to show a certificate, and its name "
        "(the first URI or DNS name of it, else its common name) is who the client is.",
    )
    optional: bool = setting(
        Flag(), False, "Let peers on this machine (loopback) talk without TLS on the same addresses. All others still need it."
    )
    minimum: TlsVersion = setting(Choice(TlsVersion), "1.3", "The oldest version of TLS that is spoken.")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what."""

    mode: AccessMode = setting(
        Choice(AccessMode),
        "open",
        "open: everybody who can reach the broker may do everything, so addresses beyond loopback are refused. enforced: users, roles, "
        "rules and API keys decide, and whoever shows nothing is 'anonymous', who may do nothing unless a rule says so.",
    )
    admin_password_file: str = setting(
        Reference("the path of a file"),
        "",
        "Where the first password of the user 'admin' is, for a first start with nobody watching. Without it, a password is made and shown "
        "once. It is used only while no enabled user has the role 'admin'.",
    )
    audit_retention: int = setting(
        Duration(_HOUR, 36_500 * _DAY, zero="forever"),
        "90d",
        "How long the audit log keeps who did what. Whole segments go, as everywhere.",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one peer, and all of them together, may use."""

    connections: int = setting(Count(1, 1_000_000), limits.CONNECTIONS_MAX, "Open connections. One more is closed at once.")
    connections_per_ip: int = setting(Count(1, 1_000_000), limits.CONNECTIONS_PER_IP_MAX, "Open connections from one address.")
    connections_per_user: int = setting(
        Count(1, 1_000_000, zero="no limit"),
        limits.CONNECTIONS_PER_USER_MAX,
        "Open connections that have logged in as one user. Administrators have no such limit.",
    )
    connections_reserved: int = setting(
        Count(1, 1_000, zero="none"),
        limits.CONNECTIONS_RESERVED,
        "Of limits.connections, those that are kept for administrators where access is enforced. Anybody may take one when the others are "
        "in use, and loses it at limits.login_timeout unless an administrator has logged in on it.",
    )
    flight_connections: int = setting(
        Count(1, 1_000_000),
        limits.FLIGHT_CONNECTIONS_MAX,
        "Open connections to the Flight endpoint. Those beyond it are disconnected, the ones without a call first.",
    )
    frame: int = setting(
        Size(1 * KIB, 1 * _GIB),
        limits.FRAME_BYTES_DEFAULT_MAX,
        "The largest Figg frame. A larger one closes the connection. The other protocols set their own bound.",
    )
    handshake_timeout: int = setting(
        Duration(100, _HOUR),
        f"{limits.HANDSHAKE_SECONDS_MAX:g}s",
        "How long a new connection may take to say which protocol it speaks. A silent one is closed.",
    )
    login_timeout: int = setting(
        Duration(100, _HOUR, zero="never"),
        f"{limits.LOGIN_SECONDS_MAX:g}s",
        "How long a connection may be without a login where access is enforced. It is closed then, unless rules allow something to whoever "
        "has not logged in. BlipMQ has limits.handshake_timeout.",
    )
    frame_timeout: int = setting(
        Duration(100, _HOUR, zero="never"),
        f"{limits.FRAME_CHECK_SECONDS:g}s",
        "How often a frame that is not whole yet is looked at. A peer that has sent less than 1 KiB of it for each second is closed.",
    )
    unfinished_frames: int = setting(
        Size(1 * MIB, 1024 * _GIB),
        limits.UNFINISHED_BYTES_MAX,
        "What may have come of frames that are not whole yet, on all connections together. Beyond it, who adds to a large one is closed.",
    )
    idle_timeout: int = setting(
        Duration(_SECOND, 30 * _DAY, zero="never"),
        f"{limits.IDLE_SECONDS_MAX:g}s",
        "How long a peer that used to send pings may be silent before it is taken for gone. One that never pings may be silent for ever.",
    )
    output_buffer: int = setting(
        Size(64 * KIB, 1 * _GIB), limits.OUTPUT_BUFFER_BYTES_MAX, "What may wait unsent for one peer before it stops being fed."
    )
    output_total: int = setting(
        Size(1 * MIB, 1024 * _GIB),
        limits.OUTPUT_TOTAL_BYTES_MAX,
        "What may wait unsent for all peers together. Beyond it nobody is fed who has unsent bytes, and peers that have read nothing for "
        f"{limits.OUTPUT_STALL_SECONDS:g} seconds are disconnected.",
    )
    in_flight: int = setting(
        Size(64 * KIB, 1 * _GIB),
        limits.IN_FLIGHT_BYTES_MAX,
        "Published but unacknowledged bytes of one connection before its socket is no longer read.",
    )
    drain_timeout: int = setting(
        Duration(100, _HOUR), "10s", "How long connections may take to finish when the broker stops. Later ones are cut off."
    )


@dataclass(frozen=True, slots=True)
class Figg:
    """The Figg door."""

    strict_version: bool = setting(
        Flag(), True, "Refuse a frame whose version is not 1. The original implementation looks at no version; false does the same."
    )
    ack_each: bool = setting(
        Flag(), False, "Send one ACK for each PUBLISH. Otherwise one ACK with the highest sequence number may cover many of them."
    )
    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class RustLog:
    """The RustLog door."""

    auto_create: bool = setting(
        Flag(),
        False,
        "Let a Produce create the topic it names, if topics.auto_create allows that at all. The original refuses an unknown topic.",
    )
    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class BlipMq:
    """The BlipMQ door."""

    keys: tuple[SecretReference, ...] = setting(
        References(),
        [],
        "Where the API keys are: each in a file of its own or in an environment variable. Without any, one is made at the first start, "
        "shown once and kept in the data directory. The flag --blipmq-key adds one. An owner before a key (NAME=) is who its user is.",
    )
    retry_backoff: int = setting(
        Duration(1, _HOUR), "100ms", "How long a first delivery may wait for its ACK. Each further one may wait twice as long."
    )
    max_retries: int = setting(Count(1, 1_000), 3, "How often a message is delivered before it goes to the topic's dead letters.")
    subscription_idle: int = setting(
        Duration(_SECOND, 365 * _DAY, zero="never"), "10m", "A subscription that no open connection has used for so long is forgotten."
    )
    silent_poll: bool = setting(
        Flag(), False, "Leave a POLL of an unknown subscription without answer, as the original does, instead of a NACK 404."
    )


@dataclass(frozen=True, slots=True)
class FlyMq:
    """The FlyMQ door."""

    dialect: FlyMqDialect = setting(
        Choice(FlyMqDialect),
        "spec",
        "What a connection speaks until a request shows that its client is the original's. spec: as specified. sdk: as the original.",
    )
    advertise: str = setting(
        Reference("HOST:PORT", r"[^\s\0]+:[0-9]{1,5}"),
        "",
        "The address that clients are told when they ask for the cluster. Without it they are told the one they came to.",
    )


@dataclass(frozen=True, slots=True)
class Fujin:
    """The Fujin door."""

    readers: tuple[str, ...] = setting(
        Lines('"NAME=TOPIC+…;group=GROUP;start=earliest|latest"'),
        [],
        "What the names of readers mean. The group is the name's own unless another is given, and begins at the earliest record. "
        "A name that is not listed is the topic of that name.",
    )
    writers: tuple[str, ...] = setting(
        Lines('"NAME=TOPIC"'), [], "What the names of writers mean. A name that is not listed is the topic of that name."
    )
    only_named: bool = setting(Flag(), False, "Refuse names that fujin.readers and fujin.writers do not list.")
    write_headers: FujinHeaders = setting(
        Choice(FujinHeaders),
        "auto",
        "Whether a WRITE carries headers. auto: told by its bytes, except for values whose size is a multiple of 128 KiB. "
        "never: as the original's client. always: as the specification's table.",
    )
    message: int = setting(
        Size(1, limits.VALUE_BYTES_MAX), limits.FUJIN_MESSAGE_BYTES_MAX, "The largest value of a WRITE. A larger one is refused."
    )
    fetch_wait: int = setting(
        Duration(1, _MINUTE, zero="not at all"), "500ms", "How long a FETCH waits for its first message before it is answered with none."
    )
    ack_timeout: int = setting(Duration(1, _DAY), "30s", "How long a message may wait for its ACK or NACK before it comes again.")
    backoff: int = setting(
        Duration(1, _HOUR, zero="at once"), "1s", "What a message waits after its first NACK. It doubles with each further one."
    )
    attempts: int = setting(
        Count(1, 1_000, zero="no limit"), 5, "How often a message is delivered before it goes to the topic's dead letters."
    )
    retry: QuicRetry = setting(
        Choice(QuicRetry),
        "auto",
        "When a client has to show, by one more round trip, that it gets mail at its address (QUIC's Retry). auto: while "
        f"{limits.QUIC_UNPROVEN_MAX} or more handshakes are unfinished, as under a flood of forged addresses.",
    )
    ping_interval: int = setting(
        Duration(10, _HOUR, zero="never"), f"{limits.QUIC_PING_SECONDS:g}s", "From the answer to one ping to the next."
    )
    ping_timeout: int = setting(
        Duration(10, _HOUR), f"{limits.QUIC_PONG_SECONDS_MAX:g}s", "How long a client may take to answer a ping before it is cut off."
    )
    idle_timeout: int = setting(
        Duration(_SECOND, _DAY), f"{limits.IDLE_SECONDS_MAX:g}s", "A connection on which nothing arrives for so long is over."
    )
    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class Bulk:
    """The bulk lane."""

    principal: str = setting(Reference("a name", r"\S[^\0]{0,248}"), "anonymous", _PRINCIPAL)


@dataclass(frozen=True, slots=True)
class Log:
    """What the broker says about itself on stderr. Payloads are never logged."""

    level: LogLevel = setting(Choice(LogLevel), "info", "The least severe line that is written.")
    format: LogFormat = setting(Choice(LogFormat), "text", "text for people, json for machines; one line per event in both.")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree. It never changes while the broker runs."""

    storage: Storage = Storage()
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
    bulk: Bulk = Bulk()
    log: Log = Log()


SETTINGS: Final[Mapping[str, Setting]] = settings_of(Config)
SECTIONS: Final = tuple(dict.fromkeys(name.partition(".")[0] for name in SETTINGS))


@dataclass(frozen=True, slots=True)
class Resolved:
    """A tree, and for each key where its value came from: `default`, a file, a variable or a flag."""

    config: Config
    origins: Mapping[str, str]

    def value(self, name: str) -> Any:
        section, _, leaf = name.partition(".")
        return getattr(getattr(self.config, section), leaf)

    def plain(self, name: str) -> Plain:
        """The value as a file would hold it."""
        return SETTINGS[name].kind.plain(self.value(name))


def resolve(
    *, file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, tuple[str, object]] | None = None
) -> Resolved:
    """Flags over environment over file over defaults. `flags` maps a key to (the flag's name, its value).

    Raises `ConfigError` with one line for the first thing that is wrong.
    """
    values: dict[str, object] = {name: known.default for name, known in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, "default")

    def take(name: str, raw: object, origin: str) -> None:
        values[name] = _parse(SETTINGS[name], raw, origin)
        origins[name] = origin

    if file is not None:
        for name, raw in _read_file(file).items():
            take(name, raw, f"file {file}")
    for name, variable, text in _from_environment(environment or {}):
        take(name, text, f"environment {variable}")
    for name, (flag, raw) in (flags or {}).items():
        take(name, raw, f"flag {flag}")
    config = _tree(values)
    _check_together(config)
    return Resolved(config, origins)


def is_default(config: Config, name: str) -> bool:
    """Whether nobody has chosen this key: a chosen value may be equal to the default, but never is the same object."""
    section, _, leaf = name.partition(".")
    return getattr(getattr(config, section), leaf) is SETTINGS[name].default


def explain(name: str) -> Setting:
    """The key of that name; raises `ConfigError` with the nearest valid name."""
    if name not in SETTINGS:
        raise ConfigError(f"unknown key {name}{_nearest(name, SETTINGS)}")
    return SETTINGS[name]


def toml_of(resolved: Resolved) -> str:
    """A file that says the same."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        lines += [f"{name.partition('.')[2]} = {toml_value(resolved.plain(name))}" for name in SETTINGS if name.startswith(section + ".")]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Plain) -> str:
    """One value in TOML's words."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return _toml_string(value)
        case list():
            return "[" + ", ".join(map(_toml_string, value)) + "]"


def _toml_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in escaped) + '"'


def _read_file(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
    except OSError as failure:
        raise ConfigError(f"{file}: {failure.strerror or failure}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{file}: larger than {_FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{file}: not UTF-8 (byte {failure.start})") from None
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(f"{file}: {failure}") from None
    return dict(_leaves(document, file))


def _leaves(document: Mapping[str, object], file: Path) -> Iterable[tuple[str, object]]:
    for section, content in document.items():
        if section not in SECTIONS:
            hint = _nearest(section, SECTIONS) if isinstance(content, dict) else _nearest(section, SETTINGS)
            raise ConfigError(f"{file}: unknown {'section' if isinstance(content, dict) else 'key'} {_quote(section)}{hint}")
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: {section} = {_quote(content)}: expected a section [{section}]")
        for leaf, raw in content.items():
            name = f"{section}.{leaf}"
            if name not in SETTINGS:
                raise ConfigError(f"{file}: unknown key {_quote(name)}{_nearest(name, SETTINGS)}")
            yield name, raw


def _from_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    names = {known.variable: name for name, known in SETTINGS.items()}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_VARIABLE_PREFIX):
            continue
        if variable not in names:
            raise ConfigError(f"unknown environment variable {_quote(variable)}{_nearest(variable, names)}")
        yield names[variable], variable, text


def _parse(known: Setting, raw: object, origin: str) -> object:
    try:
        return known.kind.parse(raw)
    except ValueError as failure:
        # What was written instead of a reference to a secret may be the secret.
        is_hidden = isinstance(known.kind, References) or (isinstance(known.kind, Reference) and known.kind.is_hidden)
        shown = "" if is_hidden else f" = {_quote(raw)}"
        raise ConfigError(f"{known.name}{shown} ({origin}): {failure}; expected {known.kind.expected}") from None


def _tree(values: Mapping[str, object]) -> Config:
    def section(kind: type[Any], name: str) -> Any:
        prefix = name + "."
        return kind(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})

    return Config(
        storage=section(Storage, "storage"),
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
        bulk=section(Bulk, "bulk"),
        log=section(Log, "log"),
    )


def _check_together(config: Config) -> None:
    """Rules that concern more than one key."""
    if config.storage.key_file and config.storage.key_env:
        raise ConfigError("storage.key_file and storage.key_env are both set; expected one of them")
    if bool(config.tls.certificate) != bool(config.tls.key):
        raise ConfigError("tls.certificate and tls.key belong together; only one of them is set")
    if not config.tls.certificate and (config.tls.client_ca or config.tls.optional):
        raise ConfigError(f"tls.{'client_ca' if config.tls.client_ca else 'optional'} is set without tls.certificate and tls.key")


def _nearest(name: str, valid: Iterable[str]) -> str:
    candidates = list(valid)
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    if not found:  # the right word in the wrong section, or without one
        leaf = name.rpartition(".")[2]
        found = [candidate for candidate in candidates if candidate.rpartition(".")[2] == leaf][:1]
    return f"; did you mean {found[0]}?" if found else f"; valid are {', '.join(candidates[:8])}{', …' if len(candidates) > 8 else ''}"


def _quote(value: object) -> str:
    """Short and on one line, whatever it is."""
    text = toml_value(value) if isinstance(value, (str, bool, int)) else repr(value)
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= 60 else text[:57] + "..."
