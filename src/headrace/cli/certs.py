"""`headrace certs init|client`: certificates for development."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click


@click.group()
def certs() -> None:
    """Create development certificates: CA, server, clients."""


@certs.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=Path("certs"))
@click.option(
    "--name",
    "names",
    metavar="HOST",
    multiple=True,
    default=("localhost", "127.0.0.1", "::1"),
    show_default=True,
    help="Host name or address of the server; may be repeated.",
)
def init(directory: Path, names: tuple[str, ...]) -> None:
    """Create a CA and a server certificate in DIR (default: certs).

    Only you can read the keys. Existing files are not overwritten.
    """
    from headrace.server import certificates

    for path in certificates.init(directory, names, datetime.now(UTC)):
        click.echo(path)
    ca = directory / "ca.pem"
    click.echo(f"headrace serve --set tls.certificate={directory / 'server.pem'} --set tls.key={directory / 'server.key'}", err=True)
    click.echo(f"clients: --tls-ca {ca}; --set tls.client_ca={ca} requires client certificates: headrace certs client", err=True)


@certs.command()
@click.argument("name")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("certs"),
    show_default=True,
    help="Directory of the CA.",
)
def client(name: str, directory: Path) -> None:
    """Create a certificate for the client NAME, signed by the CA in DIR.

    The broker identifies its holder as the user NAME.
    """
    from headrace.server import certificates

    for path in certificates.client(directory, name, datetime.now(UTC)):
        click.echo(path)
