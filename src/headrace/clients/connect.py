"""Connect to the broker at a URL: `flymq://host:port`, `flymq+tls://host:port`, or `flymq://a:1,b:2` for several addresses.

    async with headrace.connect("flymq://127.0.0.1") as client:
        await client.publish("demo", b"hello")

The module of a protocol is imported on first use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from headrace.clients.api import Client
from headrace.clients.arguments import check_text
from headrace.clients.diagnosis import other_service
from headrace.clients.errors import ConnectFailed, InvalidArgument, InvalidUrl, LoginRefused, NotSupported
from headrace.clients.messages import ConnectionState, OnState
from headrace.clients.options import ClientOptions
from headrace.clients.reconnecting import check_login
from headrace.clients.stream import CERTIFICATE_REQUIRED
from headrace.clients.tls import TlsOptions
from headrace.clients.unsupported import BaseClient
from headrace.extras import needs
from headrace.retry import Backoff


class Scheme(NamedTuple):
    """Client classes and defaults of a protocol."""

    module: str
    client: str
    options: str
    port: int
    has_login: bool = False
    """Whether it needs an API key."""
    settles: bool = False
    """Whether deliveries await an acknowledgement even without a group."""


SCHEMES: Final[Mapping[str, Scheme]] = {
    "figg": Scheme("headrace.clients.figg.client", "FiggClient", "FiggOptions", 8119),
    "flymq": Scheme("headrace.clients.flymq.client", "FlyMqClient", "FlyMqOptions", 9092),
    "blipmq": Scheme("headrace.clients.blipmq.client", "BlipMqClient", "BlipMqOptions", 5555, has_login=True, settles=True),
    "fujin": Scheme("headrace.clients.fujin.client", "FujinClient", "FujinOptions", 4848, settles=True),
    "rustlog": Scheme("headrace.clients.rustlog.client", "RustLogClient", "RustLogOptions", 9092),
}
_TLS: Final = "+tls"


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Parsed URL of a broker, or of several that serve the same log."""

    scheme: str
    host: str
    port: int
    tls: bool = False
    others: tuple[tuple[str, int], ...] = ()
    """Further hosts and ports, which the client tries in this order if the first is away."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL. Raises `InvalidUrl`, whose text never repeats a password."""
        check_text("url", url)
        if "@" in url:
            raise InvalidUrl("a URL must not contain a secret: it shows in logs and process lists; give user, password or api_key instead")
        scheme, separator, places = url.partition("://")
        first, *rest = (cls._parse_one(f"{scheme}{separator}{place}", url) for place in places.split(","))
        return dataclasses.replace(first, others=tuple((each.host, each.port) for each in rest))

    @classmethod
    def _parse_one(cls, url: str, whole: str) -> Address:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise InvalidUrl("the port of a URL must be a number from 1 to 65535, and an IPv6 address must be in brackets") from None
        name, tls = parts.scheme.removesuffix(_TLS), parts.scheme.endswith(_TLS)
        if name not in SCHEMES:
            raise InvalidUrl(
                f"a URL must start with one of {', '.join(f'{known}://' for known in SCHEMES)}, or with +tls as in figg+tls://"
            )
        if not parts.hostname or port == 0 or parts.path.strip("/") or parts.query or parts.fragment:
            raise InvalidUrl(f"{whole!r} is not {parts.scheme}://HOST:PORT")
        return cls(name, parts.hostname, port or SCHEMES[name].port, tls)

    def __str__(self) -> str:
        places = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in ((self.host, self.port), *self.others))
        return f"{self.scheme}{_TLS if self.tls else ''}://{places}"

    def each_first(self) -> list[Address]:
        """Return this address with each host first in turn."""
        places = ((self.host, self.port), *self.others)
        turns = (places[index:] + places[:index] for index in range(len(places)))
        return [Address(self.scheme, *first, self.tls, tuple(others)) for first, *others in turns]


class Connecting:
    """Result of `connect`: await it for a client, or enter it for a client that is closed on exit."""

    def __init__(self, address: Address, options: ClientOptions) -> None:
        self._address, self._options = address, options
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._connect().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._connect()
        return self._client

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        assert self._client is not None, "entered before it is left"
        await self._client.__aexit__(kind, failure, trace)

    async def _connect(self) -> Client:
        """Connect to the first address that serves the protocol."""
        failures: list[ConnectFailed] = []
        for address in self._address.each_first():
            try:
                return await self._connect_to(address)
            except LoginRefused:
                raise
            except ConnectFailed as failure:
                failures.append(failure)
        first, *rest = failures
        if not rest:
            raise first
        reasons = [first.reason, *(f"{failure.host}:{failure.port}: {failure.reason}" for failure in rest)]
        raise ConnectFailed(host=first.host, port=first.port, reason="; ".join(reasons), was_accepted=any(f.was_accepted for f in failures))

    async def _connect_to(self, address: Address) -> Client:
        """Connect and wait for a reply: a server of another protocol, or one that requires a certificate, hangs up instead."""
        first_reply = _FirstReply(self._options.on_state)
        kind = _load(address.scheme, SCHEMES[address.scheme].client)
        options = dataclasses.replace(self._options, on_state=first_reply.on_state)
        try:
            client = await kind.connect(address.host, address.port, options, address.others)
        except LoginRefused:
            raise
        except ConnectFailed as failure:
            if not failure.was_accepted:
                raise
            raise await self._explained(address, failure.reason) from failure
        reason = await first_reply.wait(client, self._options.connect_seconds)
        if reason is not None:
            raise await self._explained(address, reason)
        return cast(Client, client)

    async def _explained(self, address: Address, reason: str) -> ConnectFailed:
        """Return the error for a server that accepts connections and does not serve the protocol, with the likely reason."""
        if reason == CERTIFICATE_REQUIRED:
            return ConnectFailed(host=address.host, port=address.port, reason=reason, was_accepted=True)
        if address.scheme == "fujin":
            likely = "Fujin uses QUIC over UDP: is it open on this port (headrace serve --listen-quic)?"
        else:
            likely = await other_service(address.host, address.port, is_tls=self._options.tls is not None)
        return ConnectFailed(
            host=address.host, port=address.port, reason=f"{reason}; {likely or f'is it a {address.scheme} server?'}", was_accepted=True
        )


class _FirstReply:
    """Delay state changes until the server has replied, so that a failed first connection is not reported."""

    def __init__(self, on_state: OnState) -> None:
        self._on_state = on_state
        self._held_back: list[tuple[ConnectionState, str]] | None = []
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_state(self, state: ConnectionState, reason: str) -> None:
        if self._held_back is None:
            self._on_state(state, reason)
            return
        self._held_back.append((state, reason))
        if state is ConnectionState.DISCONNECTED and not self._ended.done():
            self._ended.set_result(reason)

    async def wait(self, client: Client, seconds: float) -> str | None:
        """Wait for a reply. Returns why there is none, and closes the client in that case."""
        reply = asyncio.ensure_future(client.ping())
        try:
            await asyncio.wait((reply, self._ended), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not reply.done() or reply.exception() is not None:
                client.abandon()
                return self._ended.result() if self._ended.done() else f"no reply within {seconds:g} s"
        except BaseException:
            client.abandon()
            raise
        finally:
            reply.cancel()
            self._ended.cancel()
        held_back, self._held_back = self._held_back or [], None
        for state, reason in held_back:
            self._on_state(state, reason)
        return None


def supports(name: str, method: str) -> bool:
    """Return whether the protocol supports a method of `Client`: `supports("figg", "fetch")` is False."""
    kind = _load(name, SCHEMES[name].client)
    return getattr(kind, method) is not getattr(BaseClient, method, None)


def logins(name: str) -> frozenset[str]:
    """Return the logins that the protocol supports: `user`, `api_key`."""
    found: frozenset[str] = _load(name, SCHEMES[name].client).logins
    return found


def connect(
    url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    api_key: bytes | str | None = None,
    tls: TlsOptions | bool | None = None,
    ca_file: Path | str | None = None,
    certificate_file: Path | str | None = None,
    key_file: Path | str | None = None,
    server_name: str | None = None,
    connect_seconds: float | None = None,
    publish_seconds: float | None = None,
    refused_connections_max: int | None = None,
    backoff: Backoff | None = None,
    on_state: OnState | None = None,
    resend_writes: bool | None = None,
    options: ClientOptions | None = None,
) -> Connecting:
    """Connect with the protocol of the URL. Raises `InvalidUrl`, `InvalidArgument`; awaiting raises `ConnectFailed`, `NotSupported`.

    A URL may have several addresses of brokers that serve the same log, as `flymq://a:9092,b:9092`: the client uses the first that serves
    it, and moves on to the next when it loses one.
    `user` and `password`, or `api_key`: login, if the protocol has one. `tls`: encrypt, as with `+tls` in the URL. `connect_seconds` and
    `publish_seconds`: deadlines. `refused_connections_max`: connections in a row that the server may end without serving a request.
    `options` are those of the protocol, such as `FlyMqOptions`. The other arguments take precedence.
    """
    address = Address.parse(url)
    scheme = SCHEMES[address.scheme]
    kind = _load(address.scheme, scheme.options)
    if options is not None and not isinstance(options, kind):
        raise InvalidArgument(f"options: {address.scheme}:// takes {scheme.options}, not {type(options).__name__}")
    if password and not user:
        raise InvalidArgument("password: needs a user")
    if user and api_key:
        raise InvalidArgument("api_key: give either an API key or a user")
    arguments: dict[str, object] = {
        "user": user or None,
        "password": password,
        "api_key": api_key or None,
        "tls": _tls(address, tls, TlsOptions(ca_file, certificate_file, key_file, server_name)),
        "connect_seconds": _seconds("connect_seconds", connect_seconds),
        "publish_seconds": _seconds("publish_seconds", publish_seconds),
        "refused_connections_max": refused_connections_max,
        "backoff": backoff,
        "on_state": on_state,
        "resend_writes": resend_writes,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    if "resend_writes" in given and "resend_writes" not in {field.name for field in dataclasses.fields(kind)}:
        if not resend_writes:
            raise NotSupported(address.scheme, "resend_writes=False", "flymq:// and rustlog:// do")
        del given["resend_writes"]
    chosen = dataclasses.replace(kind() if options is None else options, **given)
    check_login(_load(address.scheme, scheme.client), chosen)
    if scheme.has_login and not chosen.api_key:
        raise InvalidUrl(f"{address.scheme}:// needs an API key: give api_key (on the command line: --api-key)")
    return Connecting(address, chosen)


def _tls(address: Address, tls: TlsOptions | bool | None, files: TlsOptions) -> TlsOptions | None:
    """Return the TLS options; None for a connection without TLS. Raises `InvalidUrl` for a contradiction."""
    if isinstance(tls, TlsOptions):
        if files != TlsOptions():
            raise InvalidArgument("tls: give either TlsOptions or the files")
        return tls
    if tls is False and address.tls:
        raise InvalidUrl(f"tls=False contradicts {address.scheme}{_TLS}://")
    if address.tls or tls:
        return files
    if files != TlsOptions():
        raise InvalidUrl(f"certificates require TLS: use {address.scheme}{_TLS}://")
    return None


def _seconds(name: str, given: object) -> float | None:
    if given is not None and (not isinstance(given, (int, float)) or isinstance(given, bool) or given < 0):
        raise InvalidArgument(f"{name}: expected seconds, got {given!r}")
    return None if given is None else float(given)


def _load(name: str, part: str) -> Any:
    """Return a class of the protocol's module. Raises `MissingExtra` if its library is not installed."""
    with needs(f"{name}://"):
        return getattr(importlib.import_module(SCHEMES[name].module), part)
