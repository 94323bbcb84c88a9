"""Benchmarks of internals: the storage layer, the Flight endpoint, QUIC and Spark, each beside the ceiling of its library; the cost
of schemas, transactions and access rules; the lateness of delayed messages; one and two brokers on one Kafka; and a client that leaves
Nagle's algorithm on.

Run one from the project directory as `python -m benchmarks.log`, `.flight`, `.quic`, `.spark`, `.variants`, `.delayed`, `.brokers` or
`.nagle`. They are not part of the wheel.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from headrace.errors import HeadraceError


def main(command: click.Command, name: str) -> NoReturn:
    """Run one command and exit with its code. An expected failure prints one line."""
    try:
        command.main(prog_name=f"python -m benchmarks.{name}", standalone_mode=False)
    except click.ClickException as failure:
        failure.show()
        sys.exit(failure.exit_code)
    except (HeadraceError, OSError) as failure:
        print(f"benchmarks.{name}: {failure}", file=sys.stderr)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(0)
