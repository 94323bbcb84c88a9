"""The two ends of `headrace copy`: a running broker, or a broker that is started on a data directory or on a Kafka cluster.

flymq://a:9092,b:9092      a running broker; its Flight endpoint is that of the context, of its status, or given by an option
context:prod               the broker of a context, with its credentials
data/                      an embedded broker is started on the directory, on free ports, and stopped at the end
kafka://a:9092,b:9092      the same on a Kafka cluster
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from headrace.cli.contexts import Context, chosen
from headrace.cli.servers import Server, address_of
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import ConfigError
from headrace.flight.client import FlightClient, Servers
from headrace.programs import last_line, started, stop

READY_SECONDS_MAX: Final = 120.0
STOP_SECONDS_MAX: Final = 60.0
_POLL_SECONDS: Final = 0.05
_KAFKA: Final = "kafka://"
_CONTEXT: Final = "context:"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Broker:
    """A running broker: FlyMQ for what describes topics, Flight for their records."""

    name: str
    server: Server
    context: Context = field(default=Context(), repr=False)
    flight: str = ""

    async def call(self, work: Callable[[FlyMqClient], Awaitable[_Answer]]) -> _Answer:
        """Connect, run `work`, and close."""
        client = cast(FlyMqClient, await self.server.connect())
        try:
            return await work(client)
        finally:
            client.abandon()

    async def flight_client(self) -> FlightClient:
        """Return a client of the Flight endpoint. Raises `ConfigError` if its address is not known."""
        address = self.flight or self.context.flight or await self.call(self._flight_of_status)
        login = (
            {"user": self.context.user, "password": self.context.password} if self.context.user else {"password": self.server.api_key or ""}
        )
        tls = {"tls": True, "ca_file": self.context.tls_ca} if self.context.tls else {}
        return FlightClient(Servers.parse(address, **login, **tls))

    async def _flight_of_status(self, client: FlyMqClient) -> str:
        server: dict[str, Any] = (await client.call("status"))["server"] or {}
        found = [each["address"] for each in server.get("listeners", ()) if each["kind"] == "flight"]
        if not found:
            raise ConfigError(
                f"{self.name} names no Flight endpoint: start the broker with --listen-flight, or give --from-flight or --to-flight"
            )
        return str(found[0])


@contextmanager
def opened(place: str, flight: str) -> Iterator[Broker]:
    """Yield the broker of a place, started for the block if it is a directory or a Kafka cluster."""
    if place.startswith(_CONTEXT):
        context = chosen(place.removeprefix(_CONTEXT)) or Context()
        yield Broker(place, _server(context.server, context), context, flight)
    elif place.startswith(_KAFKA):
        with tempfile.TemporaryDirectory(prefix="headrace-copy-") as scratch:
            bootstrap = place.removeprefix(_KAFKA).rstrip("/")
            with _started(place, "--data", scratch, "--engine", "kafka", "--set", f"kafka.bootstrap={bootstrap}") as broker:
                yield broker
    elif "://" in place:
        yield Broker(place, _server(place, Context()), Context(), flight)
    else:
        with _started(place, "--data", place) as broker:
            yield broker


def check_place(place: str, *, must_exist: bool, option: str) -> None:
    """Raise `click.BadParameter` for a place that cannot be opened."""
    if "://" not in place and not place.startswith(_CONTEXT) and must_exist and not Path(place).is_dir():
        raise click.BadParameter(
            f"{place!r} is not a directory; expected a data directory, flymq://HOST:PORT or kafka://HOST:PORT", param_hint=option
        )
    if "://" in place and not place.startswith(_KAFKA):
        address_of(place, "flymq", tls=False)


def _server(url: str, context: Context) -> Server:
    tls = bool(context.tls or context.tls_ca or context.tls_certificate)
    return Server(
        address_of(url, "flymq", tls), True, context.api_key or None, context.tls_ca or None, context.tls_certificate or None,
        context.tls_key or None, context.user or None, context.password or None,
    )  # fmt: skip


@contextmanager
def _started(name: str, *arguments: str) -> Iterator[Broker]:
    with tempfile.TemporaryDirectory(prefix="headrace-copy-") as scratch:
        ready, log = Path(scratch) / "ready.json", Path(scratch) / "broker.log"
        listen = ["--listen", "127.0.0.1:0", "--listen-flight", "127.0.0.1:0", "--ready-file", str(ready)]
        # A broker that outlived a killed copy would hold the directory, and might append while the next copy counts what is there.
        command = [sys.executable, "-m", "headrace.programs", "headrace", "serve", *arguments, *listen]
        process = started(command, log, {"HEADRACE__LISTEN__QUIC": ""}, is_tied=True)
        try:
            deadline = time.monotonic() + READY_SECONDS_MAX
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(f"the broker on {name} did not start: {last_line(log)}")
                time.sleep(_POLL_SECONDS)
            protocols = json.loads(ready.read_text("utf-8"))["protocols"]
            yield Broker(name, _server(f"flymq://{protocols['tcp'][0]}", Context()), Context(), protocols["flight"][0])
        finally:
            stop(process, STOP_SECONDS_MAX)
