"""Connections of the console to the broker, through the FlyMQ client that the commands use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, cast

from headrace.clients.connect import Address, connect
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.errors import Unavailable

REQUEST_SECONDS: Final = 10.0
"""Longest wait for the broker while a page is built."""
_POLL_SECONDS: Final = 0.05
_BACKOFF_SECONDS_MAX: Final = 2.0
"""Longest pause between two attempts to reconnect: a person waits for the page."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Address of the broker, without credentials."""

    address: Address
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None

    async def connect(self, user: str = "", password: str = "") -> FlyMqClient:
        """Connect. Raises `LoginRefused`, `ConnectFailed`."""
        options = FlyMqOptions(backoff=lambda attempt: min(0.1 * 2**attempt, _BACKOFF_SECONDS_MAX) if attempt else 0.0)
        connecting = connect(
            str(self.address),
            user=user or None,
            password=password or None,
            ca_file=self.ca_file,
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            connect_seconds=REQUEST_SECONDS,
            resend_writes=False,
            options=options,
        )
        return cast(FlyMqClient, await connecting)

    @property
    def arguments(self) -> list[str]:
        """The options that a command needs to reach this broker; none for the default address."""
        is_default = str(self.address) == "flymq://127.0.0.1:9092"
        ca = ["--tls-ca", self.ca_file] if self.ca_file else []
        return [*([] if is_default else ["--server", str(self.address)]), *ca]


async def wait_connected(client: FlyMqClient, seconds: float = 3.0) -> None:
    """Wait until the client is connected. A request to a broker that is away would be executed later, unexpectedly.

    Raises `Unavailable`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while not client.is_connected:
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable("the broker does not answer; the console reconnects by itself")
        await asyncio.sleep(_POLL_SECONDS)


async def status_of(client: FlyMqClient) -> dict[str, Any]:
    async with asyncio.timeout(REQUEST_SECONDS):
        found: dict[str, Any] = await client.call("status")
    return found
