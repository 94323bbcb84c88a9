"""The life of the bulk lane: it opens beside the other doors and drains with them."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Final

from pyarrow import flight

from headrace.access.access import Access
from headrace.broker.broker import Broker
from headrace.bulk.bridge import Bridge
from headrace.bulk.calls import Calls
from headrace.bulk.connections import ConnectionLimits, ConnectionWatch
from headrace.bulk.lines import cut, cut_all
from headrace.bulk.login import MIDDLEWARE, Callers, LoginMiddleware, OpenHandshake
from headrace.bulk.memory import give_back, keep_large_pieces
from headrace.bulk.server import BulkServer
from headrace.limits import BULK_CALLS_MAX, FLIGHT_CHECK_SECONDS

_log = logging.getLogger(__name__)
_QUIET_SECONDS: Final = 5.0
_CUT_SECONDS: Final = 5.0
"""How long a call may take to end once its connection has."""


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What an operator chooses. Certificates and keys are PEM."""

    principal: str = "anonymous"
    """Who a caller is that shows nothing."""
    certificate: bytes = b""
    """Empty: no TLS."""
    key: bytes = field(default=b"", repr=False)
    client_ca: bytes = b""
    """With it every caller has to show a certificate, and its name is who they are unless they show a token or key too."""
    connections: ConnectionLimits = ConnectionLimits()


class Lane:
    """Made on the broker's loop."""

    def __init__(self, server: BulkServer, bridge: Bridge, host: str, watch: ConnectionWatch) -> None:
        self._server, self._bridge, self._port = server, bridge, server.port
        self._begun = self._seen = 0
        """Calls that carry rows, when memory was given back last, and at the last look."""
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._look)
        self._watch = watch
        self._watch_task = asyncio.get_running_loop().create_task(self._watch_connections())
        self.address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"

    @classmethod
    async def open(cls, host: str, port: int, broker: Broker, access: Access, settings: LaneSettings) -> Lane:
        """Raises `OSError`; gRPC does not say why, so whoever wants to know tries the address first."""
        keep_large_pieces()
        bridge = Bridge(asyncio.get_running_loop())
        callers = Callers(bridge, access, settings.principal)
        calls = Calls(BULK_CALLS_MAX, cut=lambda peer: cut(peer, server.port))
        scheme, options = "grpc+tcp", dict[str, Any](middleware={MIDDLEWARE: LoginMiddleware(callers, calls)})
        if settings.certificate:
            scheme, options["tls_certificates"] = "grpc+tls", [(settings.certificate, settings.key)]
        if settings.client_ca:
            options |= {"verify_client": True, "root_certificates": settings.client_ca}
        else:
            options["auth_handler"] = OpenHandshake()
        shown = f"[{host}]" if ":" in host else host
        try:
            server = await asyncio.to_thread(BulkServer, f"{scheme}://{shown}:{port}", broker, bridge, callers.who, calls, **options)
        except (OSError, ValueError, flight.FlightError) as failure:
            raise OSError(errno.EADDRINUSE, str(failure)) from None
        return cls(server, bridge, host, ConnectionWatch(server.port, calls, settings.connections))

    def _look(self) -> None:
        """Where nobody has moved rows since the last look, and somebody before it, memory that is kept for them is given back. Calls that
        carry none do not count: there is always somebody who waits for news."""
        calls, loop = self._server.calls, asyncio.get_running_loop()
        if not calls.carriers_under_way and calls.carriers_begun == self._seen != self._begun:
            self._begun = calls.carriers_begun
            loop.run_in_executor(None, give_back)
        self._seen = calls.carriers_begun
        self._timer = loop.call_later(_QUIET_SECONDS, self._look)

    async def _watch_connections(self) -> None:
        while True:
            await asyncio.sleep(FLIGHT_CHECK_SECONDS)
            try:
                await asyncio.to_thread(self._watch.look)
            except (OSError, RuntimeError) as failure:  # no descriptor or thread to look with; the next look may have one
                _log.warning("connections of the Flight endpoint not counted", extra={"reason": str(failure)})

    async def drain(self, deadline_seconds: float) -> int:
        """Take no new call and let those under way finish what they have; 1 if some did not in time."""
        self._bridge.is_closed = True
        self._watch_task.cancel()
        self._timer.cancel()
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def shut_down() -> None:
            self._server.shutdown()
            try:
                loop.call_soon_threadsafe(gone.set)
            except RuntimeError:
                pass  # the loop did not wait for us

        # Not a thread of a pool: the interpreter would wait for it at exit, however long a reader that does not read holds it up.
        threading.Thread(target=shut_down, name="headrace-bulk-drain", daemon=True).start()
        try:
            await asyncio.wait_for(gone.wait(), deadline_seconds)
        except TimeoutError:
            await self._cut_off(gone)
            return 1
        return 0

    async def _cut_off(self, gone: asyncio.Event) -> None:
        """A server of `pyarrow` waits for its calls once more when the interpreter exits, and a peer that sends nothing ends none."""
        cut_all(self._port)
        try:
            await asyncio.wait_for(gone.wait(), _CUT_SECONDS)
        except TimeoutError:
            pass
