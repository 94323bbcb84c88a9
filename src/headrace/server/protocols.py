"""TCP protocols of a broker and their settings: the only module that names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from headrace.access.access import Access
from headrace.access.administration import Caller
from headrace.access.policy import ANONYMOUS
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.groups.members import SettlementPolicy
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.broker.overview import Report
from headrace.engine.contract import Engine
from headrace.limits import ERROR_PAUSE_SECONDS, OUTPUT_HIGH_WATER_BYTES, OUTPUT_LOW_WATER_BYTES
from headrace.net.protocol import Peer, ServedProtocol
from headrace.net.relay import Relays
from headrace.server.config import TCP_PROTOCOLS, Config
from headrace.server.settings import AccessMode
from headrace.server.switching import switch_threads
from headrace.sessions.blipmq.keys import api_keys
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.sessions.contract import FramedSession
from headrace.sessions.figg.session import FiggSession, FiggSettings
from headrace.sessions.flymq.access import FlyMqAccess
from headrace.sessions.flymq.cluster import Node
from headrace.sessions.flymq.session import FlyMqSession, FlyMqSettings
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession, RustLogSettings
from headrace.sessions.session import BaseSession
from headrace.sessions.turns import Turns
from headrace.wire import blipmq, figg, flymq, rustlog

_LOGIN_PROTOCOLS: Final = {AccessMode.OPEN: frozenset({"blipmq"}), AccessMode.ENFORCED: frozenset({"blipmq", "flymq"})}


def login_protocols(config: Config) -> frozenset[str]:
    """Return the protocols that require a login."""
    return _LOGIN_PROTOCOLS[config.access.mode]


class Protocols:
    """The TCP protocols of a broker. Open after the broker, close before it.

    `blipmq_keys` maps API keys to their owners. `report` returns the facts of the server for `headrace status`. `relays` pass connections
    on to another broker that is the coordinator.
    """

    def __init__(
        self,
        broker: Broker,
        engine: Engine,
        config: Config,
        access: Access,
        *,
        clock: Callable[[], int],
        blipmq_keys: Mapping[str, str],
        report: Report = dict,
        relays: Relays | None = None,
    ) -> None:
        self._report, self._relays = report, relays
        self._broker, self._config, self._access = broker, config, access
        self._turns = Turns(switch_threads)
        self._subscriptions = Subscriptions(broker, SubscriptionBook(engine, "blipmq"), clock=clock, settings=_blipmq_settings(config))
        self._by_name = {protocol.name: protocol for protocol in (self._flymq(), self._rustlog(), self._blipmq(blipmq_keys), self._figg())}
        assert tuple(self._by_name) == TCP_PROTOCOLS, "the configuration names the protocols there are"

    async def open(self) -> None:
        await self._subscriptions.open()

    async def take_over(self) -> None:
        """Load what only the coordinator uses."""
        await self._subscriptions.restore()

    async def close(self) -> None:
        await self._subscriptions.close()

    def named(self, names: Sequence[str]) -> list[ServedProtocol]:
        """Return these protocols, or all if `names` is empty, ordered by how reliably they are detected."""
        return [protocol for name, protocol in self._by_name.items() if not names or name in names]

    def _figg(self) -> ServedProtocol:
        settings = FiggSettings(
            ack_each=self._config.figg.ack_each,
            strict_version=self._config.figg.strict_version,
            frame_bytes_max=self._config.limits.frame,
            in_flight_bytes_max=self._config.limits.in_flight,
            idle_seconds=self._config.limits.idle_timeout / 1000,
        )

        principal = self._config.figg.principal

        def enter(peer: Peer) -> FramedSession:
            return FiggSession(self._broker, peer, self._who(peer, "figg", principal), settings, self._turns)

        return ServedProtocol("figg", figg.sniff, enter, self._needs_login(principal), ERROR_PAUSE_SECONDS)

    def _rustlog(self) -> ServedProtocol:
        chosen = self._config.limits
        settings = RustLogSettings(
            auto_create=self._config.rustlog.auto_create,
            reply_bytes_max=max(chosen.output_buffer - OUTPUT_HIGH_WATER_BYTES, OUTPUT_LOW_WATER_BYTES),
            in_flight_bytes_max=chosen.in_flight,
        )
        commons, principal = RustLogContext(settings, turns=self._turns), self._config.rustlog.principal

        def enter(peer: Peer) -> FramedSession:
            who = self._who(peer, "rustlog", principal)
            session = RustLogSession(peer, self._broker, who, commons, lambda: self._access.allows_anything(who.name))
            return self._movable(session, "rustlog", peer)

        return ServedProtocol("rustlog", rustlog.sniff, enter, self._needs_login(principal), ERROR_PAUSE_SECONDS)

    def _blipmq(self, keys: Mapping[str, str]) -> ServedProtocol:
        configured = api_keys(keys)

        def enter(peer: Peer) -> FramedSession:
            caller = Caller(Principal(ANONYMOUS, "blipmq"), host_of(peer.peer))

            def verify(key: bytes) -> Principal | None:
                known = configured(key)
                if known is not None:
                    who: Principal | None = replace(known, address=caller.address)
                else:
                    who = self._access.verify_key(key.decode("utf-8", "replace"), caller)
                return who if who is not None and self._keeps(peer, who) else None

            return self._movable(BlipMqSession(peer, self._broker, self._subscriptions, verify_key=verify), "blipmq", peer)

        return ServedProtocol("blipmq", blipmq.sniff, enter)

    def _flymq(self) -> ServedProtocol:
        chosen = self._config.flymq
        dialect, shared = flymq.Dialect(chosen.dialect.value), SettlementPolicy(ack_timeout_ms=chosen.ack_timeout)

        def enter(peer: Peer) -> FramedSession:
            node = Node(address=chosen.advertise or peer.local, report=self._report)
            settings, who = FlyMqSettings(dialect, node, self._config.limits.in_flight, shared), self._who(peer, "flymq", ANONYMOUS)
            access = FlyMqAccess(self._access, who, peer.peer, lambda who: self._logged_in(peer, who))
            return self._movable(FlyMqSession(peer, self._broker, who, settings, access, self._turns), "flymq", peer)

        return ServedProtocol("flymq", flymq.sniff, enter, self._needs_login(ANONYMOUS))

    def _movable(self, session: BaseSession[Any], protocol: str, peer: Peer) -> FramedSession:
        if self._relays is not None:
            session.handover = self._relays.handover(protocol, peer)
        return session

    def _who(self, peer: Peer, protocol: str, otherwise: str) -> Principal:
        """Return the user before a login: the name in the certificate, else the configured one."""
        who = Principal(peer.identity or otherwise, protocol, address=host_of(peer.peer))
        if peer.identity is not None:
            self._keeps(peer, who)
        return who

    def _logged_in(self, peer: Peer, who: Principal) -> str | None:
        return peer.logged_in(who.name, is_admin=self._access.is_admin(who))

    def _keeps(self, peer: Peer, who: Principal) -> bool:
        """Count the connection for its user, or close it if the user has too many."""
        reason = self._logged_in(peer, who)
        if reason is not None:
            peer.close(reason)
        return reason is None

    def _needs_login(self, name: str) -> Callable[[], bool]:
        return lambda: not self._access.allows_anything(name)


def host_of(peer: str) -> str:
    """Return HOST of `HOST:PORT`, also of a QUIC stream's peer name."""
    return peer.rpartition(":")[0] or peer


def _blipmq_settings(config: Config) -> BlipMqSettings:
    chosen = config.blipmq
    return BlipMqSettings(
        retry_backoff_ms=chosen.retry_backoff,
        max_retries=chosen.max_retries,
        subscription_idle_ms=chosen.subscription_idle,
        compat_silent_poll=chosen.silent_poll,
        login_seconds=config.limits.handshake_timeout / 1000,
        in_flight_bytes_max=config.limits.in_flight,
    )
