"""The doors over QUIC. Imported only where one is asked for: its library is an extra."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from pathlib import Path

from headrace.access.access import Access
from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.errors import ConfigError
from headrace.net.connection import NetLimits
from headrace.net.counters import NetCounters
from headrace.net.quic import QuicDoor, QuicLimits, QuicListener, StreamLink, StreamSession
from headrace.net.quic_certificate import fingerprint, self_signed
from headrace.net.quic_endpoint import Retry, ServerTls
from headrace.server.config import Config
from headrace.server.doors import host_of
from headrace.sessions.fujin import PING_ERROR_CODE, FujinSession
from headrace.sessions.fujin_settings import Connectors, FujinSettings, ReaderConnector
from headrace.sessions.fujin_shares import Shares
from headrace.sessions.fujin_writer import WriterIds
from headrace.wire import fujin

_log = logging.getLogger(__name__)


class QuicDoors:
    """Fujin, on any number of addresses. Raises `OSError` or `ConfigError` when the certificate cannot be read or made."""

    def __init__(
        self, broker: Broker, config: Config, access: Access, limits: NetLimits, counters: NetCounters, *, now: datetime.datetime
    ) -> None:
        self._tls = _tls(config, now)
        try:
            self.fingerprint = fingerprint(self._tls)
        except ValueError as failure:
            raise ConfigError(f"{self._tls.certificate_file}: {failure}") from None
        self.is_self_signed = not config.tls.certificate
        self._limits = QuicLimits(
            limits,
            idle_seconds=config.fujin.idle_timeout / 1000,
            ping_seconds=config.fujin.ping_interval / 1000,
            pong_seconds=config.fujin.ping_timeout / 1000,
            retry=Retry(config.fujin.retry.value),
        )
        self._listeners: list[QuicListener] = []
        self._counters = counters
        settings, ids, shares = fujin_settings(config), WriterIds(), Shares(broker)

        def enter(link: StreamLink) -> StreamSession:
            who = Principal(link.identity or config.fujin.principal, "fujin", address=host_of(link.peer))
            return FujinSession(broker, link, who, ids, settings, shares)

        def needs_login() -> bool:
            return not access.allows_anything(config.fujin.principal)

        self.door = QuicDoor("fujin", fujin.ALPN, enter, fujin.encode.PING, PING_ERROR_CODE, needs_login)

    @property
    def cover(self) -> str:
        """How it is sealed, for the people who start it."""
        kind = "self-signed " if self.is_self_signed else ""
        return f"TLS, {kind}certificate SHA-256 {self.fingerprint}"

    async def listen(self, host: str, port: int) -> QuicListener:
        listener = await QuicListener.open(host, port, self.door, self._tls, self._limits, self._counters)
        self._listeners.append(listener)
        return listener

    def renew(self) -> None:
        """The certificate's files are others than before, and have been found to fit: use them for connections from now on."""
        try:
            for listener in self._listeners:
                listener.renew(self._tls)
            self.fingerprint = fingerprint(self._tls)
        except (OSError, ValueError) as failure:
            _log.error("QUIC keeps its old certificate", extra={"reason": str(failure)})


def _tls(config: Config, now: datetime.datetime) -> ServerTls:
    if config.tls.certificate:
        client_ca = Path(config.tls.client_ca) if config.tls.client_ca else None
        return ServerTls(Path(config.tls.certificate), Path(config.tls.key), client_ca)
    return self_signed(config.storage.path, now=now)


def fujin_settings(config: Config) -> FujinSettings:
    """What the configuration says about the Fujin door."""
    chosen = config.fujin
    return FujinSettings(
        connectors=Connectors(readers(chosen.readers), writers(chosen.writers), chosen.only_named),
        write_form=fujin.WriteForm(chosen.write_headers.value),
        message_bytes_max=chosen.message,
        in_flight_bytes_max=config.limits.in_flight,
        fetch_wait_ms=chosen.fetch_wait,
        ack_timeout_ms=chosen.ack_timeout,
        backoff_ms=chosen.backoff,
        attempts_max=chosen.attempts,
        stop_seconds=min(5.0, config.limits.drain_timeout / 2000),
    )


def writers(lines: tuple[str, ...]) -> Mapping[str, str]:
    """`name=topic` each."""
    found: dict[str, str] = {}
    for line in lines:
        name, equals, topic = line.partition("=")
        if not (name and equals and topic):
            raise ConfigError(f"fujin.writers: {line!r} is not NAME=TOPIC")
        found[name] = topic
    return found


def readers(lines: tuple[str, ...]) -> Mapping[str, ReaderConnector]:
    """`name=topic+topic;group=…;start=…` each."""
    found: dict[str, ReaderConnector] = {}
    for line in lines:
        head, *choices = line.split(";")
        name, _, topics = head.partition("=")
        chosen = dict(choice.partition("=")[::2] for choice in choices)
        start = chosen.pop("start", "earliest")
        group = chosen.pop("group", name)
        if not (name and topics and group) or start not in ("earliest", "latest") or chosen:
            raise ConfigError(f"fujin.readers: {line!r} is not NAME=TOPIC+…;group=GROUP;start=earliest|latest")
        found[name] = ReaderConnector(tuple(topics.split("+")), group, "latest" if start == "latest" else "earliest")
    return found
