"""`headrace version`: versions of Headrace and its dependencies."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys

import click

from headrace import __version__
from headrace.compiled import is_compiled
from headrace.spark.session import java_version

_LIBRARIES = ("uvloop", "google-crc32c", "backports.zstd", "cryptography", "pyarrow", "pyspark")


@click.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format.")
def version(output: str) -> None:
    """Show the versions of Headrace and its dependencies."""
    facts = {"headrace": __version__, "python": platform.python_version(), "platform": f"{sys.platform} {platform.machine()}"}
    facts["modules"] = "compiled" if is_compiled() else "pure Python"
    for library in _LIBRARIES:
        try:
            facts[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            facts[library] = "absent"
    facts["java"] = java_version()
    if output == "json":
        click.echo(json.dumps(facts))
    else:
        click.echo("\n".join(f"{name} {value}" for name, value in facts.items()))
