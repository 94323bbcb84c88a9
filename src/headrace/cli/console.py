"""`headrace console`: the web console."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Final

import click

from headrace.cli.servers import address_of, context_of, context_option
from headrace.errors import ConfigError
from headrace.extras import needs

DEFAULT_LISTEN: Final = "127.0.0.1:9645"
_LISTEN: Final = re.compile(r"(\[[^\]]+\]|[^:\s/\[\]]+):(\d{1,5})")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, int]:
    found = _LISTEN.fullmatch(text)
    if found is None or int(found[2]) > 65_535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    return found[1].strip("[]"), int(found[2])


def _root_path(context: click.Context, parameter: click.Parameter, text: str) -> str:
    path = text.rstrip("/")
    if path and (not path.startswith("/") or re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path) is None):
        raise click.BadParameter(f"{text!r} is not a path such as /console")
    return path


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    callback=_listen,
    help="Address of the console. Port 0 picks a free port.",
)
@click.option(
    "--server",
    metavar="HOST:PORT|URL",
    envvar="HEADRACE_SERVER",
    show_envvar=True,
    help="Address of the broker; default: the current context, or 127.0.0.1:9092.",
)
@context_option
@click.option("--tls", is_flag=True, help="Use TLS to the broker, as with a flymq+tls:// URL.")
@click.option("--tls-ca", metavar="FILE", help="CA certificate of the broker. Implies --tls.")
@click.option("--root-path", metavar="PATH", default="", callback=_root_path, help="Path under which a reverse proxy serves the console.")
@click.option(
    "--allow-host",
    metavar="NAME",
    multiple=True,
    help="Further host name of the console, such as that of a reverse proxy; may be repeated.",
)
@click.option("--https-certificate", metavar="FILE", help="Certificate of the console: serve HTTPS. Required beyond loopback.")
@click.option("--https-key", metavar="FILE", help="Private key of the certificate.")
@click.option("--behind-https", is_flag=True, help="A reverse proxy serves HTTPS: cookies are sent through HTTPS only.")
@click.option("--read-only", is_flag=True, help="Show everything, change nothing.")
@click.option(
    "--audit-file", metavar="FILE", type=click.Path(path_type=Path), help="Append every action to this file, one JSON object per line."
)
@click.option(
    "--ready-file", metavar="FILE", type=click.Path(path_type=Path), help="Write pid and URL to this file as JSON when it serves."
)
def console(
    listen: tuple[str, int],
    server: str | None,
    context: str | None,
    tls: bool,
    tls_ca: str | None,
    root_path: str,
    allow_host: tuple[str, ...],
    https_certificate: str | None,
    https_key: str | None,
    behind_https: bool,
    read_only: bool,
    audit_file: Path | None,
    ready_file: Path | None,
) -> int:
    """Start the web console.

    It is an ordinary client of a broker: who logs in acts as that user. If access.mode is open, there is no login. It runs
    until SIGTERM or Ctrl-C.
    """
    host, port = listen
    if bool(https_certificate) != bool(https_key):
        raise click.UsageError("give --https-certificate and --https-key together")
    if not _is_loopback(host) and not https_certificate:
        raise ConfigError(
            f"{host}:{port} can be reached from the network, and nothing is encrypted: give --https-certificate and --https-key, or listen "
            "on 127.0.0.1 behind a reverse proxy"
        )
    known = context_of(server, context)
    tls_ca = tls_ca or known.tls_ca or None
    with needs("headrace console", "starlette", "uvicorn", "jinja2", "multipart"):
        from headrace.console.connection import BrokerAddress
        from headrace.console.serve import Listener, serve

    broker = BrokerAddress(
        address_of(server or known.server, "flymq", tls or known.tls or bool(tls_ca)),
        tls_ca,
        known.tls_certificate or None,
        known.tls_key or None,
    )
    listener = Listener(host, port, https_certificate, https_key, is_loopback=_is_loopback(host))
    return serve(
        broker,
        listener,
        root_path=root_path,
        hosts=allow_host,
        is_tls=behind_https or bool(https_certificate),
        is_read_only=read_only,
        audit_file=audit_file,
        announce=lambda url: _announce(url, str(broker.address), ready_file),
    )


def _announce(url: str, broker: str, ready_file: Path | None) -> None:
    if ready_file is not None:
        temporary = ready_file.with_name(f".{ready_file.name}.new")
        temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
        temporary.replace(ready_file)
    click.echo(f"console of {broker}: {url}")
