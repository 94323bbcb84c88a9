"""Which addresses may be opened without a word of caution: those that only this machine can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from headrace.errors import ConfigError
from headrace.server.settings import Address


def require_loopback(addresses: Iterable[Address]) -> None:
    """Raises `ConfigError` for the first address that others could reach."""
    for address in addresses:
        if not _is_loopback(address.host):
            raise ConfigError(f"{address} can be reached from the network, and nothing is encrypted: add --insecure if that is meant")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as failure:
        raise ConfigError(f"{host}: {failure.strerror or failure}") from None
    return all(ipaddress.ip_address(name.partition("%")[0]).is_loopback for name in found)
