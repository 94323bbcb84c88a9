"""Which broker to talk to, through which door, and as whom: the options that `pub`, `sub` and `fetch` share."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from headrace.clients.api import Client
from headrace.clients.connect import SCHEMES, Address, connect
from headrace.clients.errors import ConnectFailed, InvalidUrl, NotSupported
from headrace.clients.messages import ConnectionState
from headrace.errors import ConfigError

DEFAULT_DOOR: Final = "figg"
_HOST_AND_PORT: Final = re.compile(r"(?:\[[^\]]+\]|[^:\s/\[\]]+):\d{1,5}")
_SECRET_BYTES_MAX: Final = 65_537


@dataclass(frozen=True, slots=True)
class Server:
    """A broker as the command line names it."""

    address: Address
    quiet: bool
    api_key: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None

    @property
    def door(self) -> str:
        return self.address.scheme

    async def connect(self) -> Client:
        """A lost connection is told and sought again; the first one must come about."""

        def tell(state: ConnectionState, reason: str) -> None:
            if state is ConnectionState.DISCONNECTED and not self.quiet:
                click.echo(f"{reason}; connecting again", err=True)

        try:
            return await connect(
                str(self.address),
                api_key=self.api_key,
                ca_file=self.ca_file,
                certificate_file=self.certificate_file,
                key_file=self.key_file,
                on_state=tell,
            )
        except ConnectFailed as failure:
            hint = "; is the broker running there? (headrace serve; --server names another)" if "refused" in failure.reason else ""
            raise click.ClickException(f"{failure}{hint}") from None
        except (InvalidUrl, NotSupported) as failure:
            raise click.UsageError(str(failure)) from None


def server_options(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the options; the command gets what they mean as `server`."""

    @click.option(
        "--server", metavar="HOST:PORT|URL", envvar="HEADRACE_SERVER", show_envvar=True, help="The broker; by default the door's port here."
    )
    @click.option("--door", type=click.Choice(list(SCHEMES)), help=f"The protocol to speak, {DEFAULT_DOOR} unless a URL names one.")
    @click.option(
        "--api-key",
        metavar="file:PATH|env:NAME|KEY",
        envvar="HEADRACE_API_KEY",
        show_envvar=True,
        help="The key for a door with a login. Other users of the machine can see a key that is given as such.",
    )
    @click.option("--tls", is_flag=True, help="Use TLS, as with a +tls:// URL.")
    @click.option("--tls-ca", metavar="FILE", help="Whose signature on the broker's certificate to trust. Implies --tls, as the next two.")
    @click.option("--tls-certificate", metavar="FILE", help="The certificate to show to the broker.")
    @click.option("--tls-key", metavar="FILE", help="The key of that certificate.")
    @click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
    @functools.wraps(command)
    def with_server(
        *arguments: object,
        server: str | None,
        door: str | None,
        api_key: str | None,
        tls: bool,
        tls_ca: str | None,
        tls_certificate: str | None,
        tls_key: str | None,
        quiet: bool,
        **rest: object,
    ) -> int:
        address = _address(server, door, tls or any((tls_ca, tls_certificate, tls_key)))
        # The environment may hold a key for the doors that want one; given as an option, it is for this door.
        is_meant = SCHEMES[address.scheme].has_login or not _is_inherited("api_key")
        secret = _secret(api_key, quiet) if api_key and is_meant else None
        return command(*arguments, server=Server(address, quiet, secret, tls_ca, tls_certificate, tls_key), **rest)

    return with_server


def _address(server: str | None, door: str | None, tls: bool) -> Address:
    """Raises `click.BadParameter`."""
    text = (server or "").strip()
    if not text or _HOST_AND_PORT.fullmatch(text):
        scheme = door or DEFAULT_DOOR
        text = f"{scheme}{'+tls' if tls else ''}://{text or '127.0.0.1'}"
    elif "://" not in text:
        raise click.BadParameter(f"{text!r} is not HOST:PORT or a URL", param_hint="--server")
    try:
        address = Address.parse(text)
    except InvalidUrl as failure:
        raise click.BadParameter(str(failure), param_hint="--server") from None
    if door not in (None, address.scheme):
        raise click.BadParameter(f"{address} speaks {address.scheme}, not {door}", param_hint="--door")
    return Address(address.scheme, address.host, address.port, tls or address.tls)


def _is_inherited(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.ENVIRONMENT


def _secret(text: str, quiet: bool) -> str:
    """What a reference leads to. A key that stands on the command line is taken, with a warning."""
    kind, colon, place = text.partition(":")
    if not colon or kind not in ("file", "env"):
        if not quiet and not _is_inherited("api_key"):
            click.echo("--api-key: other users of this machine can see a command line; file:PATH or env:NAME hides the key", err=True)
        return text
    if kind == "env":
        if not os.environ.get(place):
            raise ConfigError(f"--api-key: the environment variable {place} is not set")
        return os.environ[place]
    return _private_line(Path(place))


def _private_line(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(_SECRET_BYTES_MAX)
    except OSError as failure:
        raise ConfigError(f"--api-key: {path}: {failure.strerror or failure}") from None
    if stat.S_ISREG(mode) and mode & 0o007:
        raise ConfigError(f"--api-key: {path} can be read by others (mode {mode & 0o777:o}); chmod 600 it")
    text = content.decode("utf-8", "replace").strip()
    if not text:
        raise ConfigError(f"--api-key: {path} is empty")
    return text
