"""Section `[kafka]` of the configuration: the cluster that holds the log, and how the broker connects to it."""

from __future__ import annotations

import enum
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import ConfigError
from headrace.server.settings import Choice, Count, Duration, Flag, Reference, setting

if TYPE_CHECKING:
    from headrace.engine.kafka.settings import KafkaSettings

_FILE: Final = "the path of a file"
_SECRET: Final = r"(?:file|env):[^\0]+"


class EngineKind(enum.StrEnum):
    """Where the log is."""

    EMBEDDED = "embedded"
    KAFKA = "kafka"


class Sasl(enum.StrEnum):
    """SASL mechanisms for the connections to Kafka."""

    NONE = "none"
    PLAIN = "plain"
    SCRAM_256 = "scram-sha-256"
    SCRAM_512 = "scram-sha-512"
    OAUTHBEARER = "oauthbearer"


@dataclass(frozen=True, slots=True)
class Kafka:
    """The Kafka cluster of `storage.engine = "kafka"`."""

    bootstrap: str = setting(
        Reference("a list of HOST:PORT", r"[^\s,:]+:[0-9]{1,5}(,[^\s,:]+:[0-9]{1,5})*"),
        "",
        "Addresses of Kafka nodes, separated by commas. The broker learns the others from them.",
    )
    prefix: str = setting(
        Reference("up to 100 letters, digits, '.', '_' or '-'", r"[A-Za-z0-9._-]{1,100}"),
        "",
        "The beginning of the Kafka topics that Headrace serves. The topic orders is the Kafka topic PREFIXorders. Topics without it are "
        "neither shown nor touched.",
    )
    replication: int = setting(
        Count(1, 100, zero="the default of the cluster"), 0, "Replicas of a topic that Headrace creates, its tables included."
    )
    deadline: int = setting(
        Duration(1_000, 600_000),
        "10s",
        "How long a request waits for Kafka. Then it fails with a retriable error; a publish that was sent already has an unknown outcome.",
    )
    refresh: int = setting(
        Duration(100, 60_000), "1s", "How often the broker reads topics, settings and offsets that other Kafka clients change."
    )
    advertise: str = setting(
        Reference("a host name or an address", r"[^\s\0=/]{1,255}"),
        "",
        "The host under which the other brokers on this Kafka reach the listeners of this one. Default: the address of the listener, or "
        "the name of this machine if it listens on all addresses.",
    )
    tls: bool = setting(Flag(), False, "Connect to Kafka with TLS.")
    tls_ca: str = setting(Reference(_FILE), "", "The certificates that sign those of the Kafka nodes. Without it, those of the system.")
    tls_certificate: str = setting(Reference(_FILE), "", "The client certificate for Kafka, with kafka.tls_key.")
    tls_key: str = setting(Reference(_FILE), "", "The private key of kafka.tls_certificate.")
    sasl: Sasl = setting(Choice(Sasl), "none", "The SASL mechanism with which the broker authenticates to Kafka.")
    user: str = setting(Reference("a user name", r"\S[^\0]{0,248}"), "", "The user name for kafka.sasl, except oauthbearer.")
    password: str = setting(
        Reference('"file:PATH" or "env:VARIABLE"', _SECRET, is_hidden=True),
        "",
        "The file or variable that holds the password for kafka.sasl; with oauthbearer the token, which is read again for each connection.",
    )


def kafka_settings(kafka: Kafka, environment: Mapping[str, str]) -> KafkaSettings:
    """Return the settings of the engine. Raises `ConfigError`."""
    from headrace.engine.kafka.settings import KafkaSettings

    return KafkaSettings(
        bootstrap=kafka.bootstrap,
        prefix=kafka.prefix,
        replication=kafka.replication,
        deadline_ms=kafka.deadline,
        refresh_ms=kafka.refresh,
        security=_security(kafka, environment),
    )


def _security(kafka: Kafka, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of aiokafka's clients."""
    has_sasl = kafka.sasl is not Sasl.NONE
    found: dict[str, Any] = {"security_protocol": ("SASL_" if has_sasl else "") + ("SSL" if kafka.tls else "PLAINTEXT")}
    if kafka.tls:
        found["ssl_context"] = _context(kafka)
    if kafka.sasl is Sasl.OAUTHBEARER:
        found |= {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": _tokens(kafka.password, environment)}
    elif has_sasl:
        secret = _secret(kafka.password, environment)
        found |= {"sasl_mechanism": kafka.sasl.value.upper(), "sasl_plain_username": kafka.user, "sasl_plain_password": secret}
    return found


def _context(kafka: Kafka) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=kafka.tls_ca or None)
        if kafka.tls_certificate:
            context.load_cert_chain(kafka.tls_certificate, kafka.tls_key or None)
    except OSError as failure:  # includes ssl.SSLError
        raise ConfigError(
            f"kafka.tls: {failure.filename or kafka.tls_ca or kafka.tls_certificate}: {failure.strerror or failure}"
        ) from None
    return context


def _secret(reference: str, environment: Mapping[str, str]) -> str:
    from headrace.server.api_keys import private_text

    kind, _, place = reference.partition(":")
    if kind == "env":
        if place not in environment:
            raise ConfigError(f"kafka.password: the environment variable {place} is not set")
        return environment[place].strip()
    try:
        return private_text(Path(place), "kafka.password")
    except OSError as failure:
        raise ConfigError(f"kafka.password: {place}: {failure.strerror or failure}") from None


def _tokens(reference: str, environment: Mapping[str, str]) -> object:
    from aiokafka.abc import AbstractTokenProvider

    class Tokens(AbstractTokenProvider):  # type: ignore[misc]  # the library has no types
        async def token(self) -> str:
            return _secret(reference, environment)

    return Tokens()
