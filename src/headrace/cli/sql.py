"""`headrace sql`: Spark SQL over topics."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import click

from headrace.cli.pipeline import session_options
from headrace.cli.rows import OUTPUTS, show_rows
from headrace.cli.servers import context_of, context_option


@click.command()
@click.argument("query")
@click.option("--format", "value_format", type=click.Choice(["json", "avro", "protobuf"]), help="Format of values; default: by schema.")
@click.option("--schema", metavar="DDL", help="Columns of a value if the topic requires no schema: 'id long, amount double'.")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Print at most this number of rows.")
@click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format.")
@click.option("--user", metavar="NAME", envvar="HEADRACE_USER", show_envvar=True, help="User to log in as.")
@click.option("--password-file", metavar="PATH", envvar="HEADRACE_PASSWORD_FILE", show_envvar=True, help="File with the password.")
@click.option("--tls-ca", metavar="FILE", help="CA certificate to trust; enables TLS.")
@context_option
@session_options
def sql(
    query: str,
    value_format: str | None,
    schema: str | None,
    limit: int,
    output: str,
    user: str | None,
    password_file: str | None,
    tls_ca: str | None,
    context: str | None,
    master: str,
    conf: dict[str, str],
    servers: str | None,
) -> int:
    """Run Spark SQL over topics and print the rows.

    Every topic in QUERY is a table with the columns key, value, topic, partition, offset, timestamp and headers, plus the columns of its
    schema if it has one. The query reads the records present at its start.
    """
    from headrace.spark.pipelines.model import SERVERS_DEFAULT
    from headrace.spark.pipelines.querying import ReadOptions, answer, run_query
    from headrace.spark.pipelines.runner import bare_session, close_session, connected
    from headrace.spark.retry import RetryPolicy

    known = context_of(servers, context, option="--servers")
    options = {"servers": servers or known.flight or SERVERS_DEFAULT}
    if user or known.user:
        options["user"] = user or known.user
        if password_file:
            options["password.file"] = str(Path(password_file).absolute())
        elif known.password and user in (None, known.user):
            options["password"] = known.password
    if tls_ca or known.tls:
        options["tls"] = "true"
    if tls_ca or known.tls_ca:
        options["tls.ca"] = str(Path(tls_ca or known.tls_ca).absolute())
    client = connected(options)
    # Report an unreachable broker before Spark takes seconds to start.
    RetryPolicy(retries=0).before_start(client.topics, (options["servers"],))
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "spark.log"
        spark = bare_session("headrace sql", master, conf, log)
        try:
            frame = run_query(spark, client, query, ReadOptions(options, value_format or "", schema or ""))
            found = answer(frame, limit + 1)
        finally:
            close_session(spark, log)
    table = found.rows
    rows = [{name: plain(value) for name, value in row.items()} for row in table.slice(0, limit).to_pylist()]
    show_rows(rows, output, columns=table.column_names)
    if table.num_rows > limit:
        click.echo(f"there are more than {limit:,} rows: raise --limit to show more", err=True)
    for topic, count in found.unread.items():
        what, are = ("1 value", "is") if count == 1 else (f"{count:,} values", "are")
        click.echo(f"{what} of {topic} could not be decoded and {are} null: see the column _error; --schema sets types", err=True)
    return 0


def plain(value: object) -> object:
    """Return a value that JSON can represent."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"base64:{base64.b64encode(value).decode()}"
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "Infinity")
    return value if isinstance(value, (str, int, float, bool, type(None))) else json.dumps(value, default=str)
