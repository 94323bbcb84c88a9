"""The process of the console: a socket, uvicorn, and a clean end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn

from headrace.console.application import create_console
from headrace.console.connection import BrokerAddress
from headrace.console.guard import hosts_of
from headrace.console.visits import Settings
from headrace.errors import ConfigError

_BACKLOG: Final = 128
_END_SECONDS: Final = 3
"""Longest wait for open streams when the console ends."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Address of the console, and its certificate if it has one."""

    host: str
    port: int
    certificate: str | None = None
    key: str | None = None
    is_loopback: bool = True


def serve(
    broker: BrokerAddress,
    listener: Listener,
    *,
    root_path: str = "",
    hosts: Iterable[str] = (),
    is_tls: bool = False,
    is_read_only: bool = False,
    audit_file: Path | None = None,
    announce: Callable[[str], None],
) -> int:
    """Serve until a signal. Calls `announce` with the URL once the socket is open. Raises `ConfigError`."""
    opened = _socket(listener)
    port = opened.getsockname()[1]
    # Browsers do not separate cookies by port, so the name does.
    settings = Settings(broker, root_path, is_read_only, is_tls, f"headrace_console_{port}")
    application = create_console(settings, hosts=hosts_of(listener.host, hosts, is_loopback=listener.is_loopback), audit_file=audit_file)
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=listener.certificate,
        ssl_keyfile=listener.key,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    shown = f"[{listener.host}]" if ":" in listener.host else listener.host
    announce(f"{'https' if listener.certificate else 'http'}://{shown}:{port}{root_path}/")
    try:
        uvicorn.Server(config).run(sockets=[opened])
    except KeyboardInterrupt:
        pass  # uvicorn raises the signal again after it has closed everything
    finally:
        opened.close()
    return 0


def _socket(listener: Listener) -> socket.socket:
    try:
        return socket.create_server(
            (listener.host, listener.port), family=socket.AF_INET6 if ":" in listener.host else socket.AF_INET, backlog=_BACKLOG
        )
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise ConfigError(f"cannot listen on {listener.host}:{listener.port}: {reason}; --listen chooses another address") from None
