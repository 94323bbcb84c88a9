"""`headrace doctor`: check a configuration and this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from headrace.cli import FAILED, one_line


@click.command()
@click.option(
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="HEADRACE_CONFIG",
    show_envvar=True,
    help="Configuration file.",
)
@click.option("--data", metavar="DIR", help="Data directory (storage.path).")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what needs action.")
def doctor(file: Path | None, data: str | None, output: str, quiet: bool) -> int:
    """Check a configuration and this machine, and say what to do.

    Checks the configuration and the files it names, the data directory and its free space, the time of a disk sync, whether the ports are
    free, the clock, the limit of open files, Python libraries and Java. Needs no running broker. Exits with 1 if something needs action.
    """
    from headrace.server.doctor import Level, examine
    from headrace.spark.session import java_version

    flags: dict[str, tuple[str, object]] = {} if data is None else {"storage.path": ("--data", data)}
    findings = list(examine(file, flags, os.environ, java=java_version()))
    if output == "json":
        click.echo(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False, indent=2))
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            if not quiet or finding.level is Level.ACTION:
                advice = f"; {finding.advice}" if finding.advice and finding.level is not Level.OK else ""
                click.echo(one_line(f"{finding.level:<7}{finding.check:<{width}}  {finding.text}{advice}"))
    return FAILED if any(finding.level is Level.ACTION for finding in findings) else 0
