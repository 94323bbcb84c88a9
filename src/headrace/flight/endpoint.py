"""Flight endpoint: open and drain."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import resource
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from headrace.access.access import Access
from headrace.broker.broker import Broker
from headrace.broker.overview import Report
from headrace.flight.bridge import Bridge
from headrace.flight.calls import Calls
from headrace.flight.connections import ConnectionLimits, ConnectionWatch
from headrace.flight.forwarding import Connected, Forwarding
from headrace.flight.login import MIDDLEWARE, Callers, LoginMiddleware, OpenHandshake
from headrace.flight.server import FlightServer
from headrace.flight.sockets import cut, cut_all
from headrace.limits import FLIGHT_CALLS_MAX, FLIGHT_CHECK_SECONDS, MIB

_log = logging.getLogger(__name__)
_QUIET_SECONDS: Final = 5.0
_CUT_SECONDS: Final = 5.0
"""Time a call may take to end after its connection."""
_RESIDENT_BYTES_MAX: Final = 256 * MIB
"""Above this, calls with rows return unused memory every second: chunks of many sizes fragment the heap."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Settings of an endpoint. Certificates and keys are PEM."""

    principal: str = "anonymous"
    """The user name of a caller without credentials."""
    certificate: bytes = b""
    """Empty: no TLS."""
    key: bytes = field(default=b"", repr=False)
    client_ca: bytes = b""
    """If set, every caller must present a certificate. Its name is the user name, unless the caller sends a token or key."""
    local_files: bool = True
    """Whether readers on this machine that can open the files of the log may read them."""
    connections: ConnectionLimits = ConnectionLimits()
    report: Report = dict
    """Returns the facts of the server process."""
    forwarding: Forwarding | None = None
    """Passes calls on to another broker that is the coordinator."""


class Endpoint:
    """A running endpoint. Created on the broker's event loop."""

    def __init__(self, server: FlightServer, bridge: Bridge, host: str, watch: ConnectionWatch) -> None:
        self._server, self._bridge, self._port = server, bridge, server.port
        self._begun = self._seen = 0
        """Counts of calls with rows when memory was last released, and at the last check."""
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._release_if_idle)
        self._watch = watch
        self._watch_task = asyncio.get_running_loop().create_task(self._watch_connections())
        self.address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"

    @classmethod
    async def open(cls, host: str, port: int, broker: Broker, access: Access, settings: EndpointSettings) -> Endpoint:
        """Open the endpoint. Raises `OSError` without the cause, which gRPC does not report."""
        bridge = Bridge(asyncio.get_running_loop())
        callers = Callers(bridge, access, settings.principal, lambda: not broker.is_coordinator)

        def coordinator(context: flight.ServerCallContext) -> Connected | None:
            sent = context.get_middleware(MIDDLEWARE)
            if settings.forwarding is None or broker.is_coordinator or (context.peer_identity() and not sent.bearer):
                return None  # only the caller itself can present its certificate
            login = callers.login(sent.bearer)
            return settings.forwarding.ready(sent.bearer, login, lambda: broker.is_coordinator, may_connect=not sent.is_forwarded)

        calls = Calls(FLIGHT_CALLS_MAX, cut=lambda peer: cut(peer, server.port))
        scheme = "grpc+tcp"
        options = dict[str, Any](local_files=settings.local_files, middleware={MIDDLEWARE: LoginMiddleware(callers, calls)})
        if settings.certificate:
            scheme, options["tls_certificates"] = "grpc+tls", [(settings.certificate, settings.key)]
        if settings.client_ca:
            options |= {"verify_client": True, "root_certificates": settings.client_ca}
        else:
            options["auth_handler"] = OpenHandshake()
        shown = f"[{host}]" if ":" in host else host
        try:
            server = await asyncio.to_thread(
                FlightServer, f"{scheme}://{shown}:{port}", broker, bridge, callers.who, calls, settings.report, coordinator, **options
            )
        except (OSError, ValueError, flight.FlightError) as failure:
            raise OSError(errno.EADDRINUSE, str(failure)) from None
        return cls(server, bridge, host, ConnectionWatch(server.port, calls, settings.connections))

    @property
    def calls(self) -> Calls:
        calls: Calls = self._server.calls
        return calls

    def _release_if_idle(self) -> None:
        """Release unused memory once no call has carried rows since the last check. Calls without rows do not count: clients wait for
        new records all the time."""
        calls, loop = self._server.calls, asyncio.get_running_loop()
        if not calls.carriers_under_way and calls.carriers_begun == self._seen != self._begun:
            self._begun = calls.carriers_begun
            loop.run_in_executor(None, release_unused)
        self._seen = calls.carriers_begun
        self._timer = loop.call_later(_QUIET_SECONDS, self._release_if_idle)

    async def _watch_connections(self) -> None:
        while True:
            await asyncio.sleep(FLIGHT_CHECK_SECONDS)
            try:
                await asyncio.to_thread(self._watch.check)
                if self._server.calls.carriers_under_way and resident_bytes() > _RESIDENT_BYTES_MAX:
                    await asyncio.to_thread(release_unused)
            except (OSError, RuntimeError) as failure:  # no free descriptor or thread; the next check may have one
                _log.warning("connections of the Flight endpoint not counted", extra={"reason": str(failure)})

    async def drain(self, deadline_seconds: float) -> int:
        """Reject new calls and let calls in progress finish. Return 1 if some did not finish in time."""
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
                pass  # the loop is closed

        # A daemon thread: at exit the interpreter would wait for a pool thread that a stalled reader blocks.
        threading.Thread(target=shut_down, name="headrace-flight-drain", daemon=True).start()
        try:
            await asyncio.wait_for(gone.wait(), deadline_seconds)
        except TimeoutError:
            await self._close_connections(gone)
            return 1
        return 0

    async def _close_connections(self, gone: asyncio.Event) -> None:
        """Close every connection: at exit the `pyarrow` server waits again for its calls, which a silent peer never ends."""
        cut_all(self._port)
        try:
            await asyncio.wait_for(gone.wait(), _CUT_SECONDS)
        except TimeoutError:
            pass


def resident_bytes() -> int:
    """Return the memory of this process; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def release_unused() -> None:
    """Return unused memory to the kernel. Takes milliseconds, so it must not run on the event loop."""
    pa.default_memory_pool().release_unused()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
