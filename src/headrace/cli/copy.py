"""`headrace copy`: topics, groups, schemas, rules and users from one broker to another, also between engines."""

from __future__ import annotations

import click

from headrace.cli import FAILED
from headrace.cli.rows import OUTPUTS, show_rows
from headrace.extras import needs

_COLUMNS = ("topic", "partitions", "records", "copied", "verified", "sha256")
_PLACE = "DIRECTORY|URL"


@click.command()
@click.option("--from", "source", metavar=_PLACE, required=True, help="Source: a data directory, flymq://…, kafka://… or context:NAME.")
@click.option("--to", "target", metavar=_PLACE, required=True, help="Target, as the source. A directory is created if it does not exist.")
@click.option("--topic", "topics", metavar="NAME", multiple=True, help="Copy only this topic; repeatable. Default: all.")
@click.option("--from-flight", metavar="HOST:PORT", default="", help="Flight endpoint of the source. Default: as its status says.")
@click.option("--to-flight", metavar="HOST:PORT", default="", help="Flight endpoint of the target. Default: as its status says.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read both sides at the end and compare number and SHA-256.")
@click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
def copy(
    source: str, target: str, topics: tuple[str, ...], from_flight: str, to_flight: str, verify: bool, output: str, quiet: bool
) -> int:
    """Copy topics, groups, schemas and users to another broker.

    Records keep key, value, headers, time, partition and order. Offsets of groups are translated if the target numbers records
    differently. An interrupted copy continues where it stopped when the command is given again, and copies what was added meanwhile. A
    broker is started on a directory or on kafka:// for the time of the copy; its configuration is that of the environment.

    Not copied: passwords and API keys, which no broker gives away, delayed messages, open transactions and staged records. No other client
    may write to the copied topics of the target. Exits with 1 if a partition differs.
    """
    with needs("headrace copy"):
        from headrace.cli.copying import copied
    rows = copied(source, target, topics, from_flight, to_flight, verify=verify, quiet=quiet)
    if not quiet:
        show_rows(rows, output, columns=_COLUMNS)
    return FAILED if any(row["verified"] is False for row in rows) else 0
