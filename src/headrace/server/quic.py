"""QUIC listeners of a broker. Imported only when configured: the library is an extra."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from headrace.access.access import Access
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.groups.membership import Mode
from headrace.errors import ConfigError
from headrace.net.connection import NetLimits
from headrace.net.counters import NetCounters
from headrace.net.quic.endpoint import Retry, ServerTls, fingerprint
from headrace.net.quic.listener import QuicLimits, QuicListener, QuicProtocol, StreamLink, StreamSession
from headrace.net.quic.relay import StreamRelay
from headrace.net.relay import Place, Relays
from headrace.server import certificates
from headrace.server.config import Config
from headrace.server.protocols import host_of
from headrace.sessions.contract import Login
from headrace.sessions.fujin.session import PING_ERROR_CODE, FujinSession
from headrace.sessions.fujin.settings import Connectors, FujinSettings, ReaderConnector
from headrace.sessions.fujin.writer import WriterIds
from headrace.wire import fujin

_log = logging.getLogger(__name__)


class QuicListeners:
    """Fujin on any number of addresses. Raises `OSError` or `ConfigError` if the certificate cannot be read or created."""

    def __init__(
        self,
        broker: Broker,
        config: Config,
        access: Access,
        limits: NetLimits,
        counters: NetCounters,
        *,
        now: datetime.datetime,
        relays: Relays | None = None,
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
        settings, ids = fujin_settings(config), WriterIds()

        def enter(link: StreamLink) -> StreamSession:
            who = Principal(link.identity or config.fujin.principal, "fujin", address=host_of(link.peer))
            session = FujinSession(broker, link, who, ids, settings)
            if relays is not None:
                session.handover = relays.handover("fujin", link, partial(connect, relays))
            return session

        async def connect(relays: Relays, protocol: str, place: Place, login: Login) -> StreamRelay:
            return await StreamRelay.open(relays, protocol, place, alpn=fujin.ALPN, pong=fujin.encode.PONG, ca=config.tls.ca)

        def needs_login() -> bool:
            return not access.allows_anything(config.fujin.principal)

        self.protocol = QuicProtocol("fujin", fujin.ALPN, enter, fujin.encode.PING, PING_ERROR_CODE, needs_login)

    @property
    def encryption(self) -> str:
        """Description of the encryption for the banner."""
        kind = "self-signed " if self.is_self_signed else ""
        return f"TLS, {kind}certificate SHA-256 {self.fingerprint}"

    async def listen(self, host: str, port: int) -> QuicListener:
        listener = await QuicListener.open(host, port, self.protocol, self._tls, self._limits, self._counters)
        self._listeners.append(listener)
        return listener

    def renew(self) -> None:
        """Load the changed certificate files for new connections."""
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


def self_signed(directory: Path, *, now: datetime.datetime) -> ServerTls:
    """Return the self-signed certificate of the directory, created if absent. Raises `OSError`."""
    tls = ServerTls(directory / "quic-certificate.pem", directory / "quic-key.pem")
    certificates.self_signed(tls.certificate_file, tls.key_file, now)
    return tls


def fujin_settings(config: Config) -> FujinSettings:
    """Return the Fujin settings of the configuration."""
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
    """Parse lines of `name=topic`."""
    found: dict[str, str] = {}
    for line in lines:
        name, equals, topic = line.partition("=")
        if not (name and equals and topic):
            raise ConfigError(f"fujin.writers: {line!r} is not NAME=TOPIC")
        found[name] = topic
    return found


def readers(lines: tuple[str, ...]) -> Mapping[str, ReaderConnector]:
    """Parse lines of `name=topic+topic;group=…;start=…;mode=…`."""
    modes: dict[str, Mode | None] = {"": None, "ordered": "ordered", "shared": "shared"}
    found: dict[str, ReaderConnector] = {}
    for line in lines:
        head, *choices = line.split(";")
        name, _, topics = head.partition("=")
        chosen = dict(choice.partition("=")[::2] for choice in choices)
        start = chosen.pop("start", "earliest")
        group, mode = chosen.pop("group", name), chosen.pop("mode", "")
        if not (name and topics and group) or start not in ("earliest", "latest") or mode not in modes or chosen:
            raise ConfigError(f"fujin.readers: {line!r} is not NAME=TOPIC+…;group=GROUP;start=earliest|latest;mode=shared|ordered")
        found[name] = ReaderConnector(tuple(topics.split("+")), group, "latest" if start == "latest" else "earliest", modes[mode])
    return found
