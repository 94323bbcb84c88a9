"""The life of the bulk lane: it opens beside the other doors and drains with them."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import dataclass

from pyarrow import flight

from headrace.access.access import Access
from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.bulk.bridge import Bridge
from headrace.bulk.server import BulkServer


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What an operator chooses."""

    principal: str = "anonymous"
    certificate: bytes = b""
    """PEM; empty: no TLS."""
    key: bytes = b""
    client_ca: bytes = b""


class Lane:
    """Made on the broker's loop."""

    def __init__(self, server: BulkServer, bridge: Bridge, host: str) -> None:
        self._server, self._bridge = server, bridge
        self.address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"

    @classmethod
    async def open(cls, host: str, port: int, broker: Broker, access: Access, settings: LaneSettings) -> Lane:
        """Raises `OSError`; gRPC does not say why, so whoever wants to know tries the address first."""
        bridge = Bridge(asyncio.get_running_loop())
        anonymous = Principal(settings.principal, "bulk")

        def who(context: flight.ServerCallContext) -> Principal:
            return anonymous

        shown = f"[{host}]" if ":" in host else host
        try:
            server = await asyncio.to_thread(BulkServer, f"grpc+tcp://{shown}:{port}", broker, bridge, who)
        except (OSError, ValueError, flight.FlightError) as failure:
            raise OSError(errno.EADDRINUSE, str(failure)) from None
        return cls(server, bridge, host)

    async def drain(self, deadline_seconds: float) -> int:
        """Take no new call and let those under way finish; 1 if some did not in time."""
        self._bridge.is_closed = True
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def shut_down() -> None:
            self._server.shutdown()
            loop.call_soon_threadsafe(gone.set)

        threading.Thread(target=shut_down, name="headrace-bulk-drain", daemon=True).start()
        try:
            await asyncio.wait_for(gone.wait(), deadline_seconds)
        except TimeoutError:
            return 1
        return 0
