"""Which addresses may be opened without a word of caution: those that only this machine can reach, or that are sealed and guarded."""

from __future__ import annotations

import ipaddress
import socket

from headrace.errors import ConfigError
from headrace.server.config import TCP_DOORS, AccessMode, Config
from headrace.server.doors import login_doors


def require_caution(config: Config) -> None:
    """Raises `ConfigError` for the first address that others could reach without TLS and without showing who they are."""
    for bind in config.listen.tcp:
        if _is_loopback(bind.address.host):
            continue
        if not config.tls.certificate:
            wrong = "nothing is encrypted: set tls.certificate and tls.key"
        elif not config.tls.client_ca and (open_doors := set(bind.doors or TCP_DOORS) - login_doors(config)):
            names = ", ".join(name for name in TCP_DOORS if name in open_doors)
            wrong = f"nobody is asked who they are ({names}): set tls.client_ca"
        elif config.access.mode is AccessMode.OPEN:
            wrong = "everybody may do everything: set access.mode to enforced"
        else:
            continue
        raise ConfigError(f"{bind} can be reached from the network, and {wrong}, or add --insecure if that is meant")
    for bind in config.listen.quic:
        if not _is_loopback(bind.address.host):
            raise ConfigError(f"{bind} can be reached from the network, and fujin asks nobody who they are; add --insecure if meant")
    for bind in config.listen.bulk:
        if _is_loopback(bind.address.host):
            continue
        if not config.tls.certificate:
            wrong = "nothing is encrypted: set tls.certificate and tls.key"
        elif config.access.mode is AccessMode.OPEN:
            wrong = "everybody may do everything: set access.mode to enforced"
        else:
            continue
        raise ConfigError(f"{bind} can be reached from the network, and {wrong}, or add --insecure if that is meant")


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
