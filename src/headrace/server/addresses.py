"""Check that addresses beyond loopback have TLS and authentication."""

from __future__ import annotations

import ipaddress
import socket

from headrace.access.policy import ANONYMOUS
from headrace.errors import ConfigError
from headrace.server.config import FLIGHT_PROTOCOLS, HTTP_PROTOCOLS, QUIC_PROTOCOLS, TCP_PROTOCOLS, Config
from headrace.server.protocols import login_protocols
from headrace.server.settings import AccessMode


def require_caution(config: Config) -> None:
    """Raise `ConfigError` for the first address that other machines can reach without TLS or without authentication."""
    # Authentication is a login of the protocol or a client certificate. QUIC is always encrypted. The Flight endpoint has a login, unless
    # clients without one are given a user name.
    authenticating = login_protocols(config).union(FLIGHT_PROTOCOLS if config.flight.principal == ANONYMOUS else ())
    binds = [(bind, bind.protocols or TCP_PROTOCOLS) for bind in config.listen.tcp]
    binds += [(bind, QUIC_PROTOCOLS) for bind in config.listen.quic]
    binds += [(bind, FLIGHT_PROTOCOLS) for bind in config.listen.flight]
    binds += [(bind, HTTP_PROTOCOLS) for bind in config.listen.http]
    for bind, protocols in binds:
        if _is_loopback(bind.address.host):
            continue
        unauthenticated = (
            []
            if config.tls.client_ca
            else [
                name
                for name in (*TCP_PROTOCOLS, *QUIC_PROTOCOLS, *FLIGHT_PROTOCOLS, *HTTP_PROTOCOLS)
                if name in protocols and name not in authenticating
            ]
        )
        if not config.tls.certificate and protocols is not QUIC_PROTOCOLS:
            wrong = "nothing is encrypted: set tls.certificate and tls.key"
        elif unauthenticated:
            wrong = f"clients are not authenticated ({', '.join(unauthenticated)}): set tls.client_ca"
        elif config.access.mode is AccessMode.OPEN:
            wrong = "every client may do everything: set access.mode to enforced"
        else:
            continue
        raise ConfigError(f"{bind} can be reached from the network, and {wrong}, or add --insecure to allow it")


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
