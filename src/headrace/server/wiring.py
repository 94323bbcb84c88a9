"""Construction of a server: files, engine, broker, protocols and listeners, opened in that order and closed in reverse."""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import os
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from headrace import __version__
from headrace.access.access import Access, AccessSettings, Mode
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.broker import Broker
from headrace.broker.overview import overview
from headrace.engine.contract import Engine, HealthReport, HealthState
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import BrokerError, ConfigError, HeadraceError
from headrace.extras import MissingExtra, needs
from headrace.net.counters import NetCounters
from headrace.net.listener import Listener, NetLimits
from headrace.net.relay import Place, Relays
from headrace.net.tls import Tls, TlsUnusable
from headrace.server import api_keys
from headrace.server.config import HTTP_PROTOCOLS, TCP_PROTOCOLS, Config, is_default
from headrace.server.derived import broker_settings, flight_connections, net_limits
from headrace.server.descriptors import divide, open_files_max, process_facts, report
from headrace.server.kafka import EngineKind, kafka_settings
from headrace.server.loop_lag import LagTimer, LoopLag
from headrace.server.protocols import Protocols
from headrace.server.settings import Bind
from headrace.server.tls import TlsWatch, coordinator_context, tls_of
from headrace.storage.crypt import WrongKey
from headrace.storage.files import DirectoryLocked, DiskFiles
from headrace.storage.store import StoreOptions

_log = logging.getLogger(__name__)
_OPERATOR: Final = Principal("operator", "http")
"""Reads the overview for the HTTP listener. Compared by identity: no peer can become it."""
_CANNOT_BIND: Final = {
    errno.EADDRINUSE: "the port is taken by another process; {flag} chooses another",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.EACCES: "not permitted (ports below 1024 need a privilege)",
}

_WILDCARDS: Final = ("0.0.0.0", "[::]", "::")


class StartFailed(HeadraceError):
    """The broker cannot start. The text is one line for the operator."""


class CannotListen(StartFailed):
    """A listener address is unavailable."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open listener address: its kind (`tcp`), its protocols and its encryption (`TLS`)."""

    kind: str
    address: str
    protocols: tuple[str, ...]
    encryption: str = ""


class Drainable(Protocol):
    """A listener of any kind."""

    @property
    def address(self) -> str: ...

    async def drain(self, deadline_seconds: float) -> int: ...


class Server:
    """A broker with its listeners.

    `clock` returns Unix ms, `key` decrypts the data directory, `blipmq_keys` maps API keys to users.
    """

    def __init__(
        self, config: Config, *, key: bytes | None, clock: Callable[[], int], blipmq_keys: Mapping[str, str] | None = None
    ) -> None:
        self._config, self._clock = config, clock
        self._blipmq_keys = blipmq_keys or {}
        self.generated_key: tuple[Path, str] | None = None
        """The file and text of a BlipMQ key that this start generated, to be printed once."""
        self.generated_password: str | None = None
        """The first password of the user `admin`, to be printed once."""
        self._engine = _engine(config, key, clock)
        self._engine.health.changed = _log_health
        self._engine.ownership.lost = self._lose
        self._engine.ownership.gained = self._gain
        self.is_lost = False
        """Whether another broker has taken over the tables."""
        self.lost: Callable[[], None] = lambda: None
        """Called then."""
        self._is_open = asyncio.Event()
        self._taking_over: asyncio.Task[None] | None = None
        self._access = access_of(config, self._engine, clock)
        settings = broker_settings(config)
        self._broker = Broker(
            self._engine,
            clock=clock,
            settings=settings,
            authorize=self._authorize,
            audit_hook=self._access.record_decision,
            random_bytes=secrets.token_bytes,
            ticks=time.perf_counter,
        )
        self._access.listen(self._broker.access_changed)
        self._counters = NetCounters()
        self._relays: Relays | None = None
        self._places: dict[str, str] = {}
        """Addresses of this broker by protocol, for other brokers."""
        self.loop_lag = LoopLag()
        self.loop_turns = LoopLag()
        self._lag_timer = LagTimer(self.loop_lag, self.loop_turns, time.perf_counter, time.thread_time)
        self._wanted_connections = {"connections": config.limits.connections, "flight_connections": flight_connections(config)}
        self._connection_limits = divide(open_files_max(), **self._wanted_connections)
        self._listeners: list[Drainable] = []
        self._http: list[Drainable] = []
        """Closed last: readiness checks must see that the broker drains."""
        self._is_draining = False
        self._close_traces: Callable[[], None] = lambda: None
        self._flight_calls: Callable[[], tuple[int, int, Counter[str]]] = lambda: (0, 0, Counter())
        self._end_forwarded: Callable[[], None] = lambda: None
        """Ends Flight calls that were passed on to a former coordinator."""
        self._opened: list[Opened] = []
        self._protocols: Protocols | None = None
        self._tls: Tls | None = None
        self._watch: TlsWatch | None = None
        self._renew_quic: Callable[[], None] = lambda: None
        self.unavailable: list[str] = []
        """Default listeners that could not open, each with the reason."""

    async def open(self) -> list[Opened]:
        """Recover the log, then open every listener. Close everything again if one fails."""
        self._tls = _certificates(self._config)
        await self._open_broker()
        try:
            keys = self._keys() if any("blipmq" in (bind.protocols or TCP_PROTOCOLS) for bind in self._config.listen.tcp) else {}
            self._trace()
            self._relays = self._open_relays()
            protocols = Protocols(
                self._broker,
                self._engine,
                self._config,
                self._access,
                clock=self._clock,
                blipmq_keys=keys,
                report=self.report,
                relays=self._relays,
            )
            await protocols.open()
            self._protocols = protocols
            opened = [found for bind in self._config.listen.tcp for found in await self._listen(bind, protocols)]
            opened += await self._listen_if_available("QUIC listener", "listen.quic", self._listen_quic)
            opened += await self._listen_if_available("Flight endpoint", "listen.flight", self._listen_flight)
            opened += await self._listen_if_available("HTTP listener", "listen.http", self._listen_http)
        except BaseException:
            await self.close()
            raise
        if self._tls is not None:
            self._watch = TlsWatch(self._tls, renewed=self._renew_quic)
            self._watch.start()
        self._opened = opened
        self._places = places(opened, self._config.kafka.advertise)
        first = next(iter(self._places.values()), "").removeprefix("tls://")
        self._engine.ownership.advertise(self._config.flymq.advertise or first, self._places)
        self._is_open.set()
        self._lag_timer.start()
        for line in self.unavailable:
            reason = line.partition(": pip install")[0]  # the banner has the command
            _log.warning("started without a default listener", extra={"reason": reason})
        return opened

    @property
    def is_coordinator(self) -> bool:
        return self._broker.is_coordinator

    def _open_relays(self) -> Relays | None:
        if self._config.storage.engine is not EngineKind.KAFKA:
            return None
        try:
            context = coordinator_context(self._config)
        except TlsUnusable as failure:
            raise StartFailed(f"TLS: {failure}") from None
        relays = Relays(
            self._counters, is_coordinator=lambda: self._broker.is_coordinator, place_of=self._coordinator_place, context=lambda: context
        )
        self._engine.ownership.moved = self._coordinator_changed
        return relays

    def _coordinator_place(self, protocol: str) -> Place | None:
        """Return the coordinator's listener for a protocol; None if it is unknown or that of this broker."""
        found = self._engine.ownership.listeners.get(protocol, "")
        return None if found == self._places.get(protocol) else Place.parse(found)

    def _coordinator_changed(self) -> None:
        if self._relays is not None:
            self._relays.coordinator_changed()
        self._end_forwarded()

    def _gain(self) -> None:
        self._taking_over = asyncio.get_running_loop().create_task(self._take_over())

    async def _take_over(self) -> None:
        """Become the coordinator while clients publish and read."""
        await self._is_open.wait()
        if self._broker.is_coordinator or self._protocols is None:
            return
        try:
            password = await self._access.open(admin_password(self._config))
            await self._protocols.take_over()
            await self._broker.take_over()
        except (BrokerError, ConfigError) as failure:
            _log.error("cannot take over as the coordinator", extra={"reason": str(failure)})
            self._lose()
            return
        if password is not None:
            print(f"created the user admin, password shown this once:  {password}", flush=True)
        self._coordinator_changed()
        _log.info("this broker is the coordinator now")

    def _lose(self) -> None:
        self.is_lost = True
        self.lost()

    def reload(self) -> None:
        """Reload the certificate files. New connections use them."""
        if self._watch is None:
            _log.info("nothing to reload: TLS is not configured")
        else:
            self._watch.reload()

    async def close(self) -> None:
        """Stop accepting connections, let sessions finish their requests, then close the log. Idempotent."""
        self._is_draining = True
        if self._taking_over is not None:
            self._taking_over.cancel()
            await asyncio.wait([self._taking_over])
        self._lag_timer.stop()
        if self._watch is not None:
            self._watch.stop()
        seconds = self._config.limits.drain_timeout / 1000
        late = sum(await asyncio.gather(*(listener.drain(seconds) for listener in self._listeners)))
        if late:
            _log.warning("closed connections that did not finish in time", extra={"connections": late})
        self._listeners.clear()
        if self._protocols is not None:
            await self._protocols.close()
            self._protocols = None
        await self._access.close()
        await self._broker.close()
        await asyncio.to_thread(self._close_traces)
        await asyncio.gather(*(listener.drain(seconds) for listener in self._http))
        self._http.clear()

    def figures(self) -> dict[str, object]:
        """Return the connection counters as log fields."""
        counters = self._counters
        rejected = ", ".join(f"{reason}: {count}" for reason, count in sorted(counters.rejected.items()))
        return {
            "accepted": counters.accepted,
            "tls": counters.opened_with_tls,
            "bytes_in": counters.bytes_in,
            "bytes_out": counters.bytes_out,
            "reading_pauses": counters.reading_pauses,
            "accept_pauses": counters.accept_pauses,
            "rejected": rejected or "none",
        }

    def report(self) -> dict[str, object]:
        """Return the facts of this process for `headrace status`."""
        storage, disk = self._config.storage, shutil.disk_usage(self._config.storage.path)
        engine = f"kafka at {self._config.kafka.bootstrap}" if storage.engine is EngineKind.KAFKA else "embedded"
        return {
            "version": __version__,
            "access": self._config.access.mode.value,
            "pid": os.getpid(),
            "engine": f"{engine}, encrypted" if storage.key_file or storage.key_env else engine,
            "capabilities": asdict(self._engine.capabilities),
            "is_coordinator": self._broker.is_coordinator,
            "coordinator": self._engine.ownership.coordinator,
            "data": str(storage.path.absolute()),
            "disk": {"free_bytes": disk.free, "total_bytes": disk.total, "headroom_bytes": storage.headroom},
            "loop_lag": self.loop_lag.report(),
            "loop_turns": self.loop_turns.report(),
            "activity": self._activity(),
            "listeners": [asdict(found) for found in self._opened],
            "connections": {
                "open": self._counters.open,
                "max": self._connection_limits.connections,
                "by_protocol": {name: count for name, count in sorted(self._counters.open_by_protocol.items()) if count},
            },
        }

    def _activity(self) -> dict[str, object]:
        counters, (under_way, begun, refused) = self._counters, self._flight_calls()
        for (_, code), count in self._broker.meters.refused.items():
            refused[code] += count
        return {
            "appends_in_flight": self._broker.appends_in_flight,
            "staged_bytes": self._broker.staged_bytes,
            "unsettled": self._broker.unsettled,
            "flight_calls": under_way,
            "flight_calls_total": begun,
            "refused_total": refused,
            "throttled_total": {"reading_paused": counters.reading_pauses, "accepting_paused": counters.accept_pauses},
            **self._flushes(),
            **process_facts(),
        }

    def _flushes(self) -> dict[str, object]:
        store = getattr(self._engine, "opened_store", None)
        if store is None:
            return {}
        found = store.counters
        return {
            "flushes_total": found.append_duration.count,
            "flush_seconds": found.append_duration.total,
            "flush_bytes": found.journal_bytes,
            "syncs_total": found.sync_duration.count,
            "sync_seconds": found.sync_duration.total,
        }

    def _keys(self) -> Mapping[str, str]:
        if self._blipmq_keys or self._access.is_enforced:
            return self._blipmq_keys  # when access is enforced, `headrace key create` makes the key of each user
        stored = api_keys.load_or_generate(self._config.storage.path)
        if stored.generated is not None:
            (key,) = stored.owners
            self.generated_key = stored.generated, key
        return stored.owners

    async def _open_broker(self) -> None:
        path = self._config.storage.path
        where = f"data directory {path}"
        try:
            if self._config.storage.engine is EngineKind.KAFKA:
                path.mkdir(parents=True, exist_ok=True)
                where = f"Kafka at {self._config.kafka.bootstrap}"
            try:
                await self._broker.open()
                self.generated_password = await self._access.open(admin_password(self._config))
            except BaseException:
                await self._engine.close()  # the engine may be open when a table fails to load
                raise
        except DirectoryLocked as failure:
            raise StartFailed(f"data directory {path} is {failure}") from None
        except WrongKey as failure:
            raise StartFailed(f"data directory {path}: {failure}") from None
        except OSError as failure:
            name = f" ({failure.filename})" if failure.filename and str(failure.filename) != str(path) else ""
            raise StartFailed(f"data directory {path}: {failure.strerror or failure}{name}") from None
        except BrokerError as failure:
            raise StartFailed(f"{where}: {failure}") from failure

    def report_limits(self) -> None:
        """Log the connection limits derived from the limit of open files."""
        report(self._connection_limits, **self._wanted_connections)

    def _net_limits(self) -> NetLimits:
        return replace(net_limits(self._config), connections_max=self._connection_limits.connections)

    async def _listen(self, bind: Bind, protocols: Protocols) -> list[Opened]:
        limits, chosen = self._net_limits(), protocols.named(bind.protocols)
        names = tuple(protocol.name for protocol in chosen)
        encryption = "" if self._tls is None else "TLS or plain" if self._tls.settings.optional else "TLS"
        listen = partial(Listener.open, protocols=chosen, limits=limits, counters=self._counters, tls=self._tls)
        return await self._open_all("tcp", [bind], listen, names, encryption)

    async def _open_all(
        self, kind: str, binds: Iterable[Bind], listen: Callable[[str, int], Awaitable[Drainable]], names: tuple[str, ...], encryption: str
    ) -> list[Opened]:
        opened: list[Opened] = []
        for bind in binds:
            for host in await _numeric(bind):
                try:
                    listener = await listen(host, bind.address.port)
                except OSError as failure:
                    raise _cannot_listen(bind, failure, "--listen" if kind == "tcp" else f"--listen-{kind}") from None
                (self._http if kind == "http" else self._listeners).append(listener)
                opened.append(Opened(kind, listener.address, names, encryption))
        return opened

    async def _listen_if_available(self, title: str, key: str, listen: Callable[[], Awaitable[list[Opened]]]) -> list[Opened]:
        """Open the listeners of a key. A failure is fatal only if the key is configured: the default may lack its extra or its port."""
        try:
            return await listen()
        except (CannotListen, MissingExtra) as failure:
            if not is_default(self._config, key):
                raise
            self.unavailable.append(f"no {title}: {failure}")
            return []

    async def _listen_quic(self) -> list[Opened]:
        if not self._config.listen.quic:
            return []
        with needs("listen.quic"):
            from headrace.server.quic import QuicListeners
        now = datetime.datetime.fromtimestamp(self._clock() / 1000, datetime.UTC)
        try:
            listeners = QuicListeners(
                self._broker, self._config, self._access, self._net_limits(), self._counters, now=now, relays=self._relays
            )
        except OSError as failure:
            raise CannotListen(f"listen.quic: {failure}") from None
        except ConfigError as failure:
            raise StartFailed(f"listen.quic: {failure}") from None
        opened = await self._open_all("quic", self._config.listen.quic, listeners.listen, (listeners.protocol.name,), listeners.encryption)
        self._renew_quic = listeners.renew
        return opened

    async def _listen_flight(self) -> list[Opened]:
        if not self._config.listen.flight:
            return []
        with needs("listen.flight"):
            from headrace.server.flight import FlightEndpoints
        try:
            endpoints = FlightEndpoints(
                self._broker,
                self._config,
                self._access,
                self._connection_limits.flight_connections,
                self.report,
                lambda: str(self._coordinator_place("flight") or ""),
            )
        except OSError as failure:
            raise StartFailed(f"TLS: {failure.filename}: {failure.strerror}") from None
        self._flight_calls = endpoints.calls
        self._end_forwarded = endpoints.coordinator_changed
        return await self._open_all("flight", self._config.listen.flight, endpoints.listen, ("flight",), endpoints.encryption)

    def _trace(self) -> None:
        if not self._config.traces.endpoint:
            return
        with needs("traces.endpoint", "opentelemetry"):
            from headrace.server.traces import OpenTelemetryTracer
        self._broker.tracer = tracer = OpenTelemetryTracer(self._config.traces.endpoint, self._config.traces.one_in)
        self._close_traces = tracer.close

    async def _listen_http(self) -> list[Opened]:
        if not self._config.listen.http:
            return []
        with needs("listen.http"):
            from headrace.server.operators import operator_pages
        from headrace.server.http import HttpListener

        pages = operator_pages(
            self._config,
            self._broker,
            self._engine,
            self._counters,
            self.loop_lag,
            connections_max=self._connection_limits.connections,
            flight_calls=self._flight_calls,
            is_draining=lambda: self._is_draining,
            overview=lambda: overview(self._broker, _OPERATOR, self.report()),
        )

        async def listen(host: str, port: int) -> HttpListener:
            return HttpListener(host, port, pages, self._tls)

        return await self._open_all("http", self._config.listen.http, listen, HTTP_PROTOCOLS, "" if self._tls is None else "TLS")

    def _authorize(self, who: Principal, action: Action, resource: Resource) -> bool:
        return who is _OPERATOR or self._access.authorize(who, action, resource)


def places(opened: Iterable[Opened], host: str) -> dict[str, str]:
    """Return the addresses that other machines should use, by protocol, with `host` or, for a wildcard, the name of this machine."""
    found: dict[str, str] = {}
    for listener in opened:
        if listener.kind == "http":
            continue
        own, _, port = listener.address.rpartition(":")
        name = host or (socket.gethostname() if own in _WILDCARDS else own)
        mark = f"#{listener.encryption.rpartition(' ')[2]}" if "self-signed" in listener.encryption else ""
        for protocol in listener.protocols:
            found.setdefault(protocol, f"{'tls://' if listener.encryption else ''}{name}:{port}{mark}")
    return found


def _cannot_listen(bind: Bind, failure: OSError, flag: str) -> CannotListen:
    # asyncio wraps the reason in its own sentence; the errno has the cause.
    reason = _CANNOT_BIND.get(failure.errno or 0, os.strerror(failure.errno) if failure.errno else str(failure))
    return CannotListen(f"cannot listen on {bind.address}: {reason.format(flag=flag)}")


def _log_health(report: HealthReport) -> None:
    """Log a change of the storage health. Called on any thread."""
    problems = {"problems": "; ".join(str(problem) for problem in report.problems)}
    match report.state:
        case HealthState.OK:
            _log.info("background work has recovered")
        case HealthState.DEGRADED:
            _log.warning("background work fails and is retried", extra=problems)
        case HealthState.FAILED:
            _log.error("writes fail until the broker is restarted", extra=problems)


def _certificates(config: Config) -> Tls | None:
    try:
        return tls_of(config)
    except TlsUnusable as failure:
        raise StartFailed(f"TLS: {failure}") from None


def _engine(config: Config, key: bytes | None, clock: Callable[[], int]) -> Engine:
    if config.storage.engine is EngineKind.KAFKA:
        with needs("storage.engine = kafka", "aiokafka"):
            from headrace.engine.kafka.engine import KafkaEngine
        return KafkaEngine(kafka_settings(config.kafka, os.environ), clock=clock)
    options = StoreOptions(
        journal_bytes=config.storage.journal_size,
        checkpoint_interval_ms=config.storage.checkpoint_interval,
        headroom_bytes=config.storage.headroom,
        key=key,
        ticks=time.perf_counter,
    )
    return EmbeddedEngine(DiskFiles(config.storage.path, direct_writes=config.storage.direct_writes), options, clock=clock)


def access_of(config: Config, engine: Engine, clock: Callable[[], int]) -> Access:
    """Return the access control that the configuration describes."""
    settings = AccessSettings(Mode(config.access.mode.value), config.access.audit_retention)
    return Access(engine, clock=clock, random_bytes=secrets.token_bytes, settings=settings, ticks=lambda: time.monotonic_ns() // 1_000_000)


def admin_password(config: Config) -> str | None:
    """Return the first password of `admin` from the configured file, if any. Raises `ConfigError`."""
    if not config.access.admin_password_file:
        return None
    path = Path(config.access.admin_password_file)
    try:
        return api_keys.private_text(path, "access.admin_password_file")
    except OSError as failure:
        raise ConfigError(f"access.admin_password_file: {path}: {failure.strerror or failure}") from None


async def _numeric(bind: Bind) -> list[str]:
    """Resolve the addresses of a host name. Port 0 uses only the first address: two listeners would get different ports."""
    address = bind.address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as failure:
        raise CannotListen(f"cannot listen on {address}: {failure.strerror or failure}") from None
    hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return hosts if address.port else hosts[:1]
