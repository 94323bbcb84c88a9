"""Flight endpoints of a broker. Imported only when configured: the libraries are an extra."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from headrace.access.access import Access
from headrace.broker.broker import Broker
from headrace.broker.overview import Report
from headrace.flight.connections import ConnectionLimits
from headrace.flight.endpoint import Endpoint, EndpointSettings
from headrace.flight.forwarding import Forwarding
from headrace.server.config import Config


class FlightEndpoints:
    """Endpoints on any number of addresses. Raises `OSError` for certificates that cannot be read.

    gRPC keeps the certificates it was started with and selects the TLS version itself (1.2 or 1.3).
    """

    def __init__(
        self, broker: Broker, config: Config, access: Access, connections_max: int, report: Report, coordinator: Callable[[], str]
    ) -> None:
        """`coordinator` returns the endpoint of another broker that is the coordinator, as `HOST:PORT` or `tls://HOST:PORT`."""
        self._broker, self._access = broker, access
        self._opened: list[Endpoint] = []
        chosen = config.tls
        self._forwarding = Forwarding(lambda: location(coordinator()), _content(chosen.ca))
        self._settings = EndpointSettings(
            principal=config.flight.principal,
            certificate=_content(chosen.certificate),
            key=_content(chosen.key),
            client_ca=_content(chosen.client_ca),
            local_files=config.flight.local_files,
            report=report,
            forwarding=self._forwarding,
            connections=ConnectionLimits(connections_max, config.limits.connections_per_ip),
        )

    @property
    def encryption(self) -> str:
        """Description of the encryption for the banner."""
        return "TLS" if self._settings.certificate else ""

    async def listen(self, host: str, port: int) -> Endpoint:
        """Open an endpoint. Raises `OSError`: gRPC gives no reason for a failure, so the address is bound once before."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        endpoint = await Endpoint.open(host, port, self._broker, self._access, self._settings)
        self._opened.append(endpoint)
        return endpoint

    def coordinator_changed(self) -> None:
        """End the calls that wait for a former coordinator."""
        asyncio.get_running_loop().run_in_executor(None, self._forwarding.coordinator_changed)

    def calls(self) -> tuple[int, int, Counter[str]]:
        """Return the calls in progress, those since the start, and the failed ones by error code, on all endpoints."""
        calls, refused = [endpoint.calls for endpoint in self._opened], Counter[str]()
        for one in calls:
            refused.update(one.refused)
        return sum(one.under_way for one in calls), sum(one.begun for one in calls), refused


def location(place: str) -> str:
    """Return the URL of a listener; empty for none."""
    encrypted = place.removeprefix("tls://")
    return "" if not place else f"grpc+tls://{encrypted}" if encrypted != place else f"grpc+tcp://{place}"


def _content(path: str) -> bytes:
    return Path(path).read_bytes() if path else b""
