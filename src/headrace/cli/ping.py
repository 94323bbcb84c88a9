"""`headrace ping`: one request to a listener, for health checks."""

from __future__ import annotations

import asyncio
import time

import click

from headrace.cli.administration import DURATION
from headrace.cli.servers import Server, server_options


@click.command()
@click.option("--timeout", type=DURATION, default="5s", show_default=True, help="Longest wait for the broker.")
@server_options
def ping(timeout: int, server: Server) -> int:
    """Check that a broker replies, through any protocol.

    Prints the round-trip time. Exits with 0 if the broker replies, 5 if it is unreachable, 6 if it does not reply within --timeout.
    """

    async def work() -> float:
        try:
            async with asyncio.timeout(timeout / 1000):
                client = await server.connect()
                try:
                    began = time.perf_counter()
                    await client.ping()
                    return time.perf_counter() - began
                finally:
                    await client.close()
        except TimeoutError:
            raise TimeoutError(f"{server.address} did not reply within {timeout / 1000:g} s") from None

    seconds = asyncio.run(work())
    if not server.quiet:
        click.echo(f"{server.address} replied in {seconds * 1e3:.1f} ms")
    return 0
