"""`headrace certs init|client`: certificates for development."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click


@click.group()
def certs() -> None:
    """Make certificates for development: a CA, a server's, clients'."""


@certs.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=Path("certs"))
@click.option(
    "--name",
    "names",
    metavar="HOST",
    multiple=True,
    default=("localhost", "127.0.0.1", "::1"),
    show_default=True,
    help="A host name or address of the server; may be repeated.",
)
def init(directory: Path, names: tuple[str, ...]) -> None:
    """Make a CA and a server certificate in DIR (default: certs).

    The keys are readable by you alone. Nothing that exists is overwritten.
    """
    from headrace.server import certificates

    for path in certificates.init(directory, names, datetime.now(UTC)):
        click.echo(path)
    ca = directory / "ca.pem"
    click.echo(f"headrace serve --set tls.certificate={directory / 'server.pem'} --set tls.key={directory / 'server.key'}", err=True)
    click.echo(f"clients trust {ca}; with --set tls.client_ca={ca} they need a certificate too: headrace certs client", err=True)


@certs.command()
@click.argument("name")
@click.option(
    "--dir", "directory", metavar="DIR", type=click.Path(path_type=Path), default=Path("certs"), show_default=True, help="Where the CA is."
)
def client(name: str, directory: Path) -> None:
    """Make a certificate for the client NAME, signed by the CA in DIR.

    The broker knows whoever shows it by that name.
    """
    from headrace.server import certificates

    for path in certificates.client(directory, name, datetime.now(UTC)):
        click.echo(path)
