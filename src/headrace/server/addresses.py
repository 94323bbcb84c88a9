"""Which addresses may be opened without a word of caution: those that only this machine can reach, or that are sealed and guarded."""

from __future__ import annotations

import ipaddress
import socket

from headrace.access.policy import ANONYMOUS
from headrace.errors import ConfigError
from headrace.server.choices import AccessMode
from headrace.server.config import FLIGHT_PROTOCOLS, QUIC_PROTOCOLS, TCP_PROTOCOLS, Config
from headrace.server.protocols import login_protocols


def require_caution(config: Config) -> None:
    """Raises `ConfigError` for the first address that others could reach without TLS and without showing who they are."""
    # A protocol asks who comes by itself (a login), or its peers show certificates. QUIC is always sealed. The Flight endpoint has a login, and those
    # who do not use it are nobody, unless they were given a name.
    asking = login_protocols(config).union(FLIGHT_PROTOCOLS if config.flight.principal == ANONYMOUS else ())
    binds = [(bind, bind.protocols or TCP_PROTOCOLS) for bind in config.listen.tcp]
    binds += [(bind, QUIC_PROTOCOLS) for bind in config.listen.quic]
    binds += [(bind, FLIGHT_PROTOCOLS) for bind in config.listen.flight]
    for bind, protocols in binds:
        if _is_loopback(bind.address.host):
            continue
        silent = (
            []
            if config.tls.client_ca
            else [name for name in (*TCP_PROTOCOLS, *QUIC_PROTOCOLS, *FLIGHT_PROTOCOLS) if name in protocols and name not in asking]
        )
        if not config.tls.certificate and protocols is not QUIC_PROTOCOLS:
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
