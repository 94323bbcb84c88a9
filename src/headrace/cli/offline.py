"""`headrace check` and `headrace dump`: read-only inspection of a data directory that no broker has open."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli import terminal
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.storage.files import DiskFiles

_READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)


def _key(key_file: str, key_env: str) -> bytes | None:
    from headrace.server.api_keys import read_key
    from headrace.server.config import Storage

    return read_key(Storage(key_file=key_file, key_env=key_env), os.environ)


@contextmanager
def _locked(root: Path) -> Iterator[DiskFiles]:  # imported late to keep --help fast
    """Lock the directory against brokers. A read-only directory needs no lock."""
    from headrace.storage.crypt import WrongKey
    from headrace.storage.files import DirectoryLocked, DiskFiles
    from headrace.storage.identity import PATH

    if not (root / PATH).exists():
        raise HeadraceError(f"{root}: not a Headrace data directory (it has no {PATH})")
    files = DiskFiles(root)
    try:
        files.lock()
    except DirectoryLocked as holder:
        raise HeadraceError(f"{root}: {holder}; stop it first") from None
    except OSError as failure:
        if failure.errno not in _READ_ONLY_ERRNOS:
            raise
    try:
        yield files
    except WrongKey as wrong:
        raise HeadraceError(f"{root}: {wrong}") from None
    finally:
        files.close()


_key_file = click.option("--key-file", metavar="PATH", default="", help="File with the encryption key.")
_key_env = click.option("--key-env", metavar="NAME", default="", help="Environment variable with the encryption key.")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
@_key_file
@_key_env
@click.pass_context
def check(ctx: click.Context, directory: Path, output: str, key_file: str, key_env: str) -> None:
    """Verify a data directory, offline and read-only.

    Reads every file in DIR and checks every checksum, offset and name. Exits with 0 if the directory is intact and with 1 if it has
    problems. Notes describe remains of a crash, which the next start of the broker repairs.
    """
    from headrace.storage.check import check as verify

    with _locked(directory) as files:
        report = verify(files, _key(key_file, key_env))
    if output == "json":
        terminal.echo(json.dumps({"clean": report.clean, **asdict(report)}))
    else:
        for problem in report.problems:
            terminal.echo(f"PROBLEM  {problem}")
        for note in report.notes:
            terminal.echo(f"note     {note}")
        click.echo(
            f"{'clean' if report.clean else f'{len(report.problems)} problems'}: {report.logs} logs, {report.segments} segments, "
            f"{report.frames} journal frames, {report.batches} batches, {report.records} records"
        )
    if not report.clean:
        ctx.exit(1)


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--records", is_flag=True, help="Show each record, not only batches.")
@_key_file
@_key_env
def dump(file: Path, records: bool, key_file: str, key_env: str) -> None:
    """Show the content of a log file, offline.

    FILE is a segment (DIR/logs/LOG/OFFSET.seg) or a journal file (DIR/journal/NUMBER.hrj) of a data directory.
    """
    from headrace.storage.check import dump as lines
    from headrace.storage.identity import PATH

    file = file.absolute()
    if not file.is_file():
        raise HeadraceError(f"{file}: no such file")
    root = next((parent for parent in file.parents if (parent / PATH).exists()), None)
    if root is None:
        raise HeadraceError(f"{file}: not in a Headrace data directory")
    with _locked(root) as files:
        for line in lines(files, file.relative_to(root).as_posix(), _key(key_file, key_env), records=records):
            terminal.echo(line)
