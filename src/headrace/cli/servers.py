"""Shared options of commands that connect to a broker: address, protocol and credentials."""

from __future__ import annotations

import functools
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

import click
from click.core import ParameterSource

from headrace.cli.contexts import Context, chosen
from headrace.clients.api import Client
from headrace.clients.connect import SCHEMES, Address, connect, logins
from headrace.clients.errors import ConnectFailed, InvalidUrl, NotSupported
from headrace.clients.messages import ConnectionState
from headrace.errors import ConfigError

DEFAULT_PROTOCOL: Final = "flymq"
_HOST_AND_PORT: Final = r"(?:\[[^\]]+\]|[^:\s/\[\],]+):\d{1,5}"
_HOSTS_AND_PORTS: Final = re.compile(rf"{_HOST_AND_PORT}(?:,{_HOST_AND_PORT})*")
_SAME_REASON_SECONDS: Final = 60.0
"""A connection that is lost again for the same reason is reported after this time only."""
_SECRET_BYTES_MAX: Final = 65_537


@dataclass(frozen=True, slots=True)
class Server:
    """Broker and credentials given on the command line."""

    address: Address
    quiet: bool
    api_key: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def protocol(self) -> str:
        return self.address.scheme

    async def connect(self) -> Client:
        """Connect. Reports a lost connection and reconnects; fails if the first connection fails."""

        reported: dict[str, float] = {}

        def report(state: ConnectionState, reason: str) -> None:
            if state is not ConnectionState.DISCONNECTED or self.quiet:
                return
            before, reported[reason] = reported.get(reason), time.monotonic()
            if before is None or reported[reason] - before > _SAME_REASON_SECONDS:
                click.echo(f"{reason}; reconnecting", err=True)

        try:
            return await connect(
                str(self.address),
                api_key=self.api_key,
                ca_file=self.ca_file,
                certificate_file=self.certificate_file,
                key_file=self.key_file,
                user=self.user,
                password=self.password,
                on_state=report,
            )
        except ConnectFailed as failure:
            raise click.ClickException(f"{failure}{_hint(failure.reason)}") from failure
        except (InvalidUrl, NotSupported) as failure:
            raise click.UsageError(str(failure)) from None


def _hint(reason: str) -> str:
    """Return the option that may help."""
    if "refused" in reason:
        return "; start a broker with headrace serve, or give another address with --server"
    if "requires TLS" in reason:
        return ", or give --tls"
    return "; give its CA with --tls-ca" if "issuer certificate" in reason or "self-signed" in reason else ""


_Command: TypeAlias = Callable[..., int]


def server_options(command: _Command) -> _Command:
    """Add the connection options; the command receives them as `server`."""
    return _with_options(command, fixed=None)


def flymq_options(command: _Command) -> _Command:
    """Add the connection options without --protocol: the protocol is FlyMQ."""
    return _with_options(command, fixed="flymq")


def _with_options(command: _Command, *, fixed: str | None) -> _Command:
    choice = click.option(
        "--protocol", type=click.Choice(list(SCHEMES)), help=f"Protocol; default: that of the URL, or {DEFAULT_PROTOCOL}."
    )

    @click.option(
        "--server",
        metavar="HOST:PORT|URL",
        envvar="HEADRACE_SERVER",
        show_envvar=True,
        help="Address of the broker, several separated by commas; default: the current context, or 127.0.0.1 and the protocol's port.",
    )
    @context_option
    @click.option(
        "--api-key",
        metavar="file:PATH|env:NAME|KEY",
        envvar="HEADRACE_API_KEY",
        show_envvar=True,
        help="API key (FlyMQ, BlipMQ). Other users of the machine can see a KEY on the command line.",
    )
    @click.option("--user", metavar="NAME", envvar="HEADRACE_USER", show_envvar=True, help="User to log in as (FlyMQ only).")
    @click.option(
        "--password-file",
        metavar="PATH",
        envvar="HEADRACE_PASSWORD_FILE",
        show_envvar=True,
        help="File with the password of --user; - is standard input. Default: prompt.",
    )
    @click.option("--tls", is_flag=True, help="Use TLS, as with a +tls:// URL.")
    @click.option("--tls-ca", metavar="FILE", help="CA certificate to trust. Implies --tls, as do the next two options.")
    @click.option("--tls-certificate", metavar="FILE", help="Client certificate.")
    @click.option("--tls-key", metavar="FILE", help="Private key of the client certificate.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
    @functools.wraps(command)
    def with_server(
        *arguments: object,
        server: str | None,
        context: str | None,
        api_key: str | None,
        user: str | None,
        password_file: str | None,
        tls: bool,
        tls_ca: str | None,
        tls_certificate: str | None,
        tls_key: str | None,
        quiet: bool,
        protocol: str | None = fixed,
        **rest: object,
    ) -> int:
        known = context_of(server, context)
        server = server or known.server
        tls_ca, tls_certificate = tls_ca or known.tls_ca or None, tls_certificate or known.tls_certificate or None
        tls_key = tls_key or known.tls_key or None
        address = address_of(server, protocol, tls or known.tls or any((tls_ca, tls_certificate, tls_key)))
        secret, user, password = _credentials(address, known, api_key, user, password_file, quiet)
        return command(*arguments, server=Server(address, quiet, secret, tls_ca, tls_certificate, tls_key, user, password), **rest)

    return with_server if fixed else choice(with_server)


context_option: Final = click.option(
    "--context", metavar="NAME", envvar="HEADRACE_CONTEXT", show_envvar=True, help="Context to use instead of the current one."
)


def context_of(server: str | None, name: str | None, *, option: str = "--server") -> Context:
    """Return the context of a command. An address given by `option` excludes it: its secrets are for its own broker."""
    if server:
        if name and not _is_inherited("context"):
            raise click.UsageError(f"give either {option} or --context, not both")
        return Context()
    return chosen(name) or Context()


def _credentials(
    address: Address, known: Context, api_key: str | None, user: str | None, password_file: str | None, quiet: bool
) -> tuple[str | None, str | None, str | None]:
    """Return (API key, user, password). Those of the environment and the context are left out if the protocol has no such login."""
    is_key_option, is_user_option = (
        given is not None and not _is_inherited(name) for name, given in (("api_key", api_key), ("user", user))
    )
    # A password of the context is for its user only.
    stored = known.password if user in (None, known.user) and password_file is None else ""
    key, name = api_key or known.api_key, user or known.user
    supported = logins(address.scheme) if key or name else frozenset()
    if name and ((is_key_option and not is_user_option) or "user" not in supported):
        if is_user_option:
            raise click.UsageError(f"--user: {address.scheme} does not support users with passwords; use flymq")
        name = ""
    if key and not is_key_option and (name or "api_key" not in supported):
        key = ""
    secret = _secret(key, quiet or not api_key) if key else None
    return secret, name or None, (stored or password_of(password_file, f"Password of {name}")) if name else None


def address_of(server: str | None, protocol: str | None, tls: bool) -> Address:
    """Return the address of the broker. Raises `click.BadParameter`."""
    text = (server or "").strip()
    if not text or _HOSTS_AND_PORTS.fullmatch(text):
        scheme = protocol or DEFAULT_PROTOCOL
        text = f"{scheme}{'+tls' if tls else ''}://{text or '127.0.0.1'}"
    elif "://" not in text:
        raise click.BadParameter(f"{text!r} is not HOST:PORT or a URL", param_hint="--server")
    try:
        address = Address.parse(text)
    except InvalidUrl as failure:
        raise click.BadParameter(str(failure), param_hint="--server") from None
    if protocol not in (None, address.scheme):
        raise click.BadParameter(f"{protocol} contradicts the protocol {address.scheme} of {address}", param_hint="--protocol")
    return replace(address, tls=tls or address.tls)


def _is_inherited(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.ENVIRONMENT


def password_of(file: str | None, prompt: str, *, option: str = "--password-file", twice: bool = False) -> str:
    """Read a password from a file, standard input (-) or the terminal; never from the command line, which other users can see."""
    if file == "-":
        return sys.stdin.readline().rstrip("\r\n")
    if file is not None:
        return _private_line(Path(file), option)
    if not sys.stdin.isatty():
        raise click.UsageError(f"no terminal to prompt for the password: give {option}")
    password: str = click.prompt(prompt, hide_input=True, confirmation_prompt=twice, err=True)
    return password


def _secret(text: str, quiet: bool) -> str:
    """Resolve a file: or env: reference. A literal key on the command line causes a warning."""
    kind, colon, place = text.partition(":")
    if not colon or kind not in ("file", "env"):
        if not quiet and not _is_inherited("api_key"):
            click.echo("--api-key: other users of this machine can see a command line; use file:PATH or env:NAME", err=True)
        return text
    if kind == "env":
        if not os.environ.get(place):
            raise ConfigError(f"--api-key: the environment variable {place} is not set")
        return os.environ[place]
    return _private_line(Path(place), "--api-key")


def _private_line(path: Path, option: str) -> str:
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(_SECRET_BYTES_MAX)
    except OSError as failure:
        raise ConfigError(f"{option}: {path}: {failure.strerror or failure}") from None
    if stat.S_ISREG(mode) and mode & 0o007:
        raise ConfigError(f"{option}: {path} can be read by others (mode {mode & 0o777:o}); chmod 600 it")
    text = content.decode("utf-8", "replace").strip()
    if not text:
        raise ConfigError(f"{option}: {path} is empty")
    return text
