"""`headrace context`: named brokers, so that commands need no address and no credentials."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from headrace.cli import CONFLICT, contexts, one_line
from headrace.cli.contexts import Context, Contexts
from headrace.cli.rows import OUTPUTS, show_rows
from headrace.cli.servers import address_of, password_of

_COLUMNS = ("current", "name", "server", "user", "secret", "tls", "flight")


@click.group()
def context() -> None:
    """Manage contexts: named brokers with their credentials.

    A context holds the address, the user, TLS and the Flight endpoint of a broker. Commands use the current context unless they are given
    --server, HEADRACE_SERVER or --context. Contexts are in $XDG_CONFIG_HOME/headrace/contexts.json, which only its owner can read.
    """


@context.command("add")
@click.argument("name")
@click.option("--server", metavar="HOST:PORT|URL", required=True, help="Address of the broker, several separated by commas.")
@click.option(
    "--flight", metavar="HOST:PORT", default="", help="Address of its Flight endpoint, for sql and pipelines; several separated by commas."
)
@click.option("--user", metavar="NAME", default="", help="User to log in as.")
@click.option(
    "--password-file", metavar="PATH", help="File with the password of --user, which is copied; - is standard input. Default: prompt."
)
@click.option("--no-password", is_flag=True, help="Store no password: commands prompt for it or take --password-file.")
@click.option("--api-key", metavar="file:PATH|env:NAME|KEY", default="", help="API key. file: and env: are stored as such.")
@click.option("--tls", is_flag=True, help="Use TLS.")
@click.option("--tls-ca", metavar="FILE", help="CA certificate to trust. Implies --tls, as do the next two options.")
@click.option("--tls-certificate", metavar="FILE", help="Client certificate.")
@click.option("--tls-key", metavar="FILE", help="Private key of the client certificate.")
@click.option("--use", "is_current", is_flag=True, help="Make it the current context. The first one always is.")
@click.option("--force", is_flag=True, help="Replace a context of the same name.")
def add(
    name: str,
    server: str,
    flight: str,
    user: str,
    password_file: str | None,
    no_password: bool,
    api_key: str,
    tls: bool,
    tls_ca: str | None,
    tls_certificate: str | None,
    tls_key: str | None,
    is_current: bool,
    force: bool,
) -> int:
    """Add a context."""
    address_of(server, None, tls)  # reports a wrong address now
    known = contexts.load()
    if name in known.by_name and not force:
        click.echo(f"headrace: context {one_line(name)!r} exists; give --force to replace it", err=True)
        return CONFLICT
    password = password_of(password_file, f"Password of {user}") if user and not no_password else ""
    kind, _, place = api_key.partition(":")
    made = Context(
        server,
        flight,
        user,
        password,
        f"file:{_absolute(place)}" if kind == "file" else api_key,
        tls or any((tls_ca, tls_certificate, tls_key)),
        _absolute(tls_ca),
        _absolute(tls_certificate),
        _absolute(tls_key),
    )
    current = name if is_current or not known.by_name else known.current
    contexts.save(Contexts({**known.by_name, name: made}, current))
    return 0


@context.command("use")
@click.argument("name", required=False)
def use(name: str | None) -> int:
    """Make NAME the current context; without NAME, none is."""
    known = contexts.load()
    if name is not None:
        known.named(name)
    contexts.save(dataclasses.replace(known, current=name or ""))
    return 0


@context.command("list")
@click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format.")
def list_contexts(output: str) -> int:
    """List contexts, without secrets."""
    known = contexts.load()
    rows = [
        {
            "current": "*" if name == known.current else "",
            "name": name,
            "server": one.server,
            "user": one.user,
            "secret": "password" if one.password else "API key" if one.api_key else "",
            "tls": one.tls,
            "flight": one.flight,
            "tls_ca": one.tls_ca,
            "tls_certificate": one.tls_certificate,
        }
        for name, one in sorted(known.by_name.items())
    ]
    return show_rows(rows, output, columns=_COLUMNS)


@context.command("remove")
@click.argument("name")
def remove(name: str) -> int:
    """Remove a context and its secrets."""
    known = contexts.load()
    known.named(name)
    left = {other: one for other, one in known.by_name.items() if other != name}
    contexts.save(Contexts(left, "" if name == known.current else known.current))
    return 0


def _absolute(path: str | None) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
