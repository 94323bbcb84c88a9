"""The one place where everything is joined: files, engine, broker, doors, listeners. Opened in that order, closed in reverse."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.broker.broker import Broker
from headrace.broker.settings import BrokerSettings
from headrace.engine.contract import Engine, TopicConfig
from headrace.engine.embedded import EmbeddedEngine
from headrace.errors import BrokerError, HeadraceError
from headrace.limits import OUTPUT_HIGH_WATER_BYTES, OUTPUT_LOW_WATER_BYTES
from headrace.log.crypt import WrongKey
from headrace.log.files import DirectoryLocked, DiskFiles
from headrace.log.store import StoreOptions
from headrace.net.counters import NetCounters
from headrace.net.door import Door
from headrace.net.listener import Listener, NetLimits
from headrace.server.config import Config
from headrace.server.doors import tcp_doors
from headrace.server.settings import Address

_log = logging.getLogger(__name__)
_CANNOT_BIND: Final = {
    errno.EADDRINUSE: "the port is taken by another process; --listen chooses another",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.EACCES: "not permitted (ports below 1024 need a privilege)",
}


class StartFailed(HeadraceError):
    """The broker cannot start; the text is one line for the operator."""


class Server:
    """A broker with its doors. `clock` gives Unix ms."""

    def __init__(self, config: Config, *, key: bytes | None, clock: Callable[[], int]) -> None:
        self._config = config
        self._engine = _engine(config, key, clock)
        self._broker = Broker(self._engine, clock=clock, settings=broker_settings(config))
        self._counters = NetCounters()
        self._listeners: list[Listener] = []
        self.protocols: tuple[str, ...] = ()
        """What every TCP address speaks, known once it is open."""

    async def open(self) -> Mapping[str, Sequence[str]]:
        """Recover the log, then open every door; the addresses by kind. When one fails, what was opened is closed again."""
        await self._open_broker()
        try:
            doors = tcp_doors(self._broker, self._config)
            self.protocols = tuple(door.name for door in doors)
            for address in self._config.listen.tcp:
                await self._listen(address, doors)
        except BaseException:
            await self.close()
            raise
        return {"tcp": [listener.address for listener in self._listeners]}

    async def close(self) -> None:
        """Drain: take no new connection, let sessions finish what they have, then close the log. Idempotent."""
        seconds = self._config.limits.drain_timeout / 1000
        late = sum(await asyncio.gather(*(listener.drain(seconds) for listener in self._listeners)))
        if late:
            _log.warning("cut off connections that did not finish in time", extra={"connections": late})
        self._listeners.clear()
        await self._broker.close()

    async def _open_broker(self) -> None:
        path = self._config.storage.path
        try:
            try:
                await self._broker.open()
            except BaseException:
                await self._engine.close()  # the engine may have been open when a table failed to load
                raise
        except DirectoryLocked as failure:
            raise StartFailed(f"data directory {path} is {failure}") from None
        except WrongKey as failure:
            raise StartFailed(f"data directory {path}: {failure}") from None
        except OSError as failure:
            name = f" ({failure.filename})" if failure.filename and str(failure.filename) != str(path) else ""
            raise StartFailed(f"data directory {path}: {failure.strerror or failure}{name}") from None
        except BrokerError as failure:
            raise StartFailed(f"data directory {path}: {failure}") from failure

    async def _listen(self, address: Address, doors: Sequence[Door]) -> None:
        limits = net_limits(self._config)
        for host in await _numeric(address):
            try:
                self._listeners.append(await Listener.open(host, address.port, doors, limits, self._counters))
            except OSError as failure:
                # asyncio wraps the reason in a sentence of its own; the errno alone is what it knew.
                reason = _CANNOT_BIND.get(failure.errno or 0, os.strerror(failure.errno) if failure.errno else str(failure))
                raise StartFailed(f"cannot listen on {address}: {reason}") from None


def _engine(config: Config, key: bytes | None, clock: Callable[[], int]) -> Engine:
    options = StoreOptions(
        journal_bytes=config.storage.journal_size,
        checkpoint_interval_ms=config.storage.checkpoint_interval,
        headroom_bytes=config.storage.headroom,
        key=key,
    )
    return EmbeddedEngine(DiskFiles(config.storage.path), options, clock=clock)


def broker_settings(config: Config) -> BrokerSettings:
    """What the configuration says about topics that are created by use."""
    return BrokerSettings(
        auto_create=config.topics.auto_create,
        auto_create_partitions=config.topics.partitions,
        topic_defaults=TopicConfig(
            ack=config.storage.ack,
            retention_ms=config.topics.retention,
            retention_bytes=config.topics.retention_size,
            segment_bytes=config.storage.segment_size,
            compress=config.storage.compress,
        ),
    )


def net_limits(config: Config) -> NetLimits:
    """What the configuration says about connections."""
    high_water_bytes = min(OUTPUT_HIGH_WATER_BYTES, config.limits.output_buffer)
    return NetLimits(
        connections_max=config.limits.connections,
        connections_per_ip_max=config.limits.connections_per_ip,
        handshake_seconds=config.limits.handshake_timeout / 1000,
        output_high_water_bytes=high_water_bytes,
        output_low_water_bytes=min(OUTPUT_LOW_WATER_BYTES, high_water_bytes),
        output_bytes_max=config.limits.output_buffer,
    )


async def _numeric(address: Address) -> list[str]:
    """The addresses behind a name. A free port is taken on the first alone: two listeners would get two different ones."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as failure:
        raise StartFailed(f"cannot listen on {address}: {failure.strerror or failure}") from None
    hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return hosts if address.port else hosts[:1]
