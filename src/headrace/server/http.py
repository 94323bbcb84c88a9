"""HTTP listener for operators: `/metrics`, `/healthz`, `/readyz` and `/status.json`.

    /metrics       the metrics, in the text format of Prometheus or in OpenMetrics
    /healthz       200 if the event loop answers
    /readyz        200 if the broker accepts publishes: log open and writable, not draining. 503 with the reasons otherwise
    /status.json   the overview (`headrace.overview`) of the whole broker

The listener has its own threads. What must be read on the event loop is asked with one call, which yields between steps, so a scrape does
not delay requests. It has no login: it binds to loopback, or needs client certificates. It shows names of topics and groups, never records.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.server
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from headrace.net.connection import is_loopback
from headrace.net.tls import Tls
from headrace.server.metrics import rendered

_log = logging.getLogger(__name__)
T = TypeVar("T")
LOOP_SECONDS_MAX: Final = 5.0
"""Longest wait for the event loop. After that, the broker counts as not healthy."""
_REQUEST_SECONDS_MAX: Final = 10.0
_THREADS_MAX: Final = 16
"""Requests at the same time. Further connections are closed."""


class LoopSilent(Exception):
    """The event loop does not answer in time."""


class LoopCalls:
    """Calls from other threads to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float = LOOP_SECONDS_MAX) -> None:
        self._loop, self._seconds = loop, seconds

    def wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an asynchronous function. Raises `LoopSilent`."""

        async def run() -> T:
            return await function()

        work = run()
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise LoopSilent("the event loop has stopped") from None
        try:
            return future.result(self._seconds)
        except concurrent.futures.CancelledError:
            raise LoopSilent("the event loop has stopped") from None
        except TimeoutError:
            future.cancel()
            raise LoopSilent(f"the event loop did not answer within {self._seconds:g} s") from None


@dataclass(frozen=True, slots=True)
class Pages:
    """The contents. `unready` returns the reasons why the broker is not ready, `overview` the overview; both run on the event loop."""

    calls: LoopCalls
    registry: CollectorRegistry
    unready: Callable[[], Awaitable[list[str]]]
    overview: Callable[[], Awaitable[object]]

    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        try:
            match path:
                case "/metrics":
                    body, kind = rendered(self.registry, accept)
                    return 200, kind, body
                case "/healthz":
                    self.calls.wait(self.unready)
                    return _text(200, "ok")
                case "/readyz":
                    reasons = self.calls.wait(self.unready)
                    return _text(503, "\n".join(reasons)) if reasons else _text(200, "ready")
                case "/status.json":
                    return 200, "application/json", msgspec.json.encode(self.calls.wait(self.overview))
        except LoopSilent as failure:
            return _text(503, str(failure))
        return _text(404, "expected /metrics, /healthz, /readyz or /status.json")


def _text(status: int, text: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS_MAX
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "headrace", ""
    server: _Server

    def do_GET(self) -> None:
        try:
            if not self._is_named_here():
                status, kind, body = _text(421, "unknown host name")
            else:
                status, kind, body = self.server.pages.answer(self.path.partition("?")[0], self.headers.get("Accept") or "")
        except Exception as failure:
            _log.error("defect: a request of the HTTP listener failed", exc_info=failure)
            status, kind, body = _text(500, "internal error; see the log of the broker")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _is_named_here(self) -> bool:
        """Return whether a loopback listener is addressed as such. Another name means that a web page in a browser on this machine made its
        own name point here (DNS rebinding)."""
        name = (self.headers.get("Host") or "").rpartition(":")[0] if ":" in (self.headers.get("Host") or "") else self.headers.get("Host")
        host = (name or "localhost").strip("[]")
        return not is_loopback(self.server.server_name) or host == "localhost" or is_loopback(host)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a scraper comes every few seconds."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, host: str, port: int, pages: Pages, tls: Tls | None) -> None:
        self.pages, self._tls = pages, tls
        self._free = threading.BoundedSemaphore(_THREADS_MAX)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the reverse lookup of the host name, which may take seconds."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_REQUEST_SECONDS_MAX)
            if self._tls is not None:
                # On the thread of the connection, because a silent peer delays the handshake. A reload takes effect with the next one.
                request = self._tls.context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except (OSError, ssl.SSLError):
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore peers that leave in the middle of a request."""


class HttpListener:
    """A running listener."""

    def __init__(self, host: str, port: int, pages: Pages, tls: Tls | None = None) -> None:
        """Bind and serve. Raises `OSError`."""
        self._server = _Server(host, port, pages, tls)
        self.address = f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="headrace-http", daemon=True).start()

    async def drain(self, deadline_seconds: float) -> int:
        """Close the listener. Requests in progress end with the process."""
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        return 0
