"""Which protocols are served, and with which settings: the only place that names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.broker.subscriptions import SubscriptionBook
from headrace.engine.contract import Engine
from headrace.net.door import Door, Visitor
from headrace.server.config import TCP_DOORS, Config
from headrace.sessions.blipmq import BlipMqSession
from headrace.sessions.blipmq_keys import api_keys
from headrace.sessions.blipmq_settings import BlipMqSettings
from headrace.sessions.blipmq_subscriptions import Subscriptions
from headrace.sessions.contract import FramedSession
from headrace.sessions.figg import FiggSession, FiggSettings
from headrace.sessions.flymq import FlyMqSession, FlyMqSettings
from headrace.sessions.flymq_verbs import Node
from headrace.sessions.rustlog import RustLogCommons, RustLogSession, RustLogSettings
from headrace.wire import blipmq, figg, flymq, rustlog

ANONYMOUS: Final = "anonymous"
"""Who comes through a door without a login, and without a certificate."""
LOGIN_DOORS: Final = frozenset({"blipmq"})
"""Doors that let nobody in without a secret."""


class Doors:
    """All doors of a broker. Opened after it and closed before it.

    `blipmq_keys` are API keys with the names of their owners; BlipMQ may be left out only if no listener offers it.
    """

    def __init__(self, broker: Broker, engine: Engine, config: Config, *, clock: Callable[[], int], blipmq_keys: Mapping[str, str]) -> None:
        self._broker, self._config = broker, config
        self._subscriptions = Subscriptions(broker, SubscriptionBook(engine, "blipmq"), clock=clock, settings=_blipmq_settings(config))
        self._by_name = {door.name: door for door in (self._flymq(), self._rustlog(), self._blipmq(blipmq_keys), self._figg())}
        assert tuple(self._by_name) == TCP_DOORS, "the configuration names the doors there are"

    async def open(self) -> None:
        await self._subscriptions.open()

    async def close(self) -> None:
        await self._subscriptions.close()

    def named(self, names: Sequence[str]) -> list[Door]:
        """These doors, or all if none is named, the surest sniffer first."""
        return [door for name, door in self._by_name.items() if not names or name in names]

    def _figg(self) -> Door:
        settings = FiggSettings(
            ack_each=self._config.figg.ack_each,
            strict_version=self._config.figg.strict_version,
            frame_bytes_max=self._config.limits.frame,
            in_flight_bytes_max=self._config.limits.in_flight,
            idle_seconds=self._config.limits.idle_timeout / 1000,
        )

        def enter(visitor: Visitor) -> FramedSession:
            return FiggSession(self._broker, visitor, _who(visitor, "figg"), settings)

        return Door("figg", figg.sniff, enter)

    def _rustlog(self) -> Door:
        settings = RustLogSettings(auto_create=self._config.rustlog.auto_create, in_flight_bytes_max=self._config.limits.in_flight)
        commons = RustLogCommons(settings)

        def enter(visitor: Visitor) -> FramedSession:
            return RustLogSession(visitor, self._broker, _who(visitor, "rustlog"), commons)

        return Door("rustlog", rustlog.sniff, enter)

    def _blipmq(self, keys: Mapping[str, str]) -> Door:
        verify = api_keys(keys)

        def enter(visitor: Visitor) -> FramedSession:
            return BlipMqSession(visitor, self._broker, self._subscriptions, verify_key=verify)

        return Door("blipmq", blipmq.sniff, enter)

    def _flymq(self) -> Door:
        chosen = self._config.flymq
        dialect = flymq.Dialect(chosen.dialect.value)

        def enter(visitor: Visitor) -> FramedSession:
            node = Node(address=chosen.advertise or visitor.local)
            return FlyMqSession(visitor, self._broker, _who(visitor, "flymq"), FlyMqSettings(dialect, node, self._config.limits.in_flight))

        return Door("flymq", flymq.sniff, enter)


def _who(visitor: Visitor, door: str) -> Principal:
    """These protocols have no login yet: a certificate tells who it is, or nothing does."""
    return Principal(visitor.identity or ANONYMOUS, door)


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
