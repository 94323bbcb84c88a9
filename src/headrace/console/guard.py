"""Checks of every request before a page sees it, and headers of every reply.

| check | against |
|---|---|
| `Host` is a name of this console | DNS rebinding |
| a POST comes from this origin (`Sec-Fetch-Site`, `Origin`) | forged forms; `visits.py` checks the form token too |
| the size of a body | exhaustion |

The path prefix of a reverse proxy (`--root-path`) is removed here, whether the proxy has removed it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
BODY_BYTES_MAX: Final = 24 << 20
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, inner: ASGIApp, *, hosts: Iterable[str], root_path: str = "", is_tls: bool = False) -> None:
        self._inner, self._root_path, self._is_tls = inner, root_path, is_tls
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error_reply = self._error_reply(scope["method"], headers)
        if error_reply is not None:
            await error_reply(scope, receive, self._sender(scope, send))
            return
        path = scope["path"]
        if self._root_path and (path == self._root_path or path.startswith(f"{self._root_path}/")):
            scope = {**scope, "path": path[len(self._root_path) :] or "/"}
        await self._inner(scope, _bounded(receive), self._sender(scope, send))

    def _error_reply(self, method: str, headers: Headers) -> PlainTextResponse | None:
        host = headers.get("host", "").lower()
        if host not in self._hosts and host_name(host) not in self._hosts:
            return PlainTextResponse(f"unknown host {host[:200]!r}: start the console with --allow-host to serve this name\n", 421)
        if method not in ("GET", "HEAD") and not _is_same_origin(headers, host):
            return PlainTextResponse("a form of another site: refused\n", 403)
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > BODY_BYTES_MAX:
            return PlainTextResponse(f"the body exceeds {BODY_BYTES_MAX} bytes\n", 413)
        return None

    def _sender(self, scope: Scope, send: Send) -> Send:
        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
                if self._is_tls:
                    headers.setdefault("strict-transport-security", "max-age=31536000")
            await send(message)

        return sender


def host_name(host: str) -> str:
    """Return the host without its port."""
    head, colon, port = host.rpartition(":")
    return head if colon and port.isdigit() and not (":" in head and not head.endswith("]")) else host


def hosts_of(listen_host: str, allowed: Iterable[str], *, is_loopback: bool) -> set[str]:
    """Return the names under which the console may be called."""
    own = {f"[{listen_host}]" if ":" in listen_host else listen_host}
    return {*own, *allowed, *(_LOOPBACK if is_loopback else ())}


def _is_same_origin(headers: Headers, host: str) -> bool:
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    # A client that is no browser sends neither. It has no cookie that a foreign page could use.
    return origin is None or urlsplit(origin).netloc.lower() == host


def _bounded(receive: Receive) -> Receive:
    """Stop a body without a length at the limit, as if the peer had left."""
    received = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        return message if received <= BODY_BYTES_MAX else {"type": "http.disconnect"}

    return bounded
