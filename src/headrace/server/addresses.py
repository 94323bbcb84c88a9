"""Which addresses may be opened without a word of caution: those that only this machine can reach, or that are sealed and guarded."""

from __future__ import annotations

import ipaddress
import socket

from headrace.access.policy import ANONYMOUS
from headrace.errors import ConfigError
from headrace.server.choices import AccessMode
from headrace.server.config import BULK_DOORS, QUIC_DOORS, TCP_DOORS, Config
from headrace.server.doors import login_doors


def require_caution(config: Config) -> None:
    """Raises `ConfigError` for the first address that others could reach without TLS and without showing who they are."""
    # A door asks who comes by itself (a login), or its peers show certificates. QUIC is always sealed. The bulk lane has a login, and those
    # who do not use it are nobody, unless they were given a name.
    asking = login_doors(config).union(BULK_DOORS if config.bulk.principal == ANONYMOUS else ())
    binds = [(bind, bind.doors or TCP_DOORS) for bind in config.listen.tcp]
    binds += [(bind, QUIC_DOORS) for bind in config.listen.quic]
    binds += [(bind, BULK_DOORS) for bind in config.listen.bulk]
    for bind, doors in binds:
        if _is_loopback(bind.address.host):
            continue
        silent = (
            []
            if config.tls.client_ca
            else [name for name in (*TCP_DOORS, *QUIC_DOORS, *BULK_DOORS) if name in doors and name not in asking]
        )
        if not config.tls.certificate and doors is not QUIC_DOORS:
            wrong = "nothing is encrypted: set tls.certificate and tls.key"
        elif silent:
            wrong = f"nobody is asked who they are ({', '.join(silent)}): set tls.client_ca"
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
