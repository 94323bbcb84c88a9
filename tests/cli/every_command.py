"""Run every command of the command line in this process, with some libraries made unimportable.

    python -m tests.cli.every_command DIRECTORY LIBRARY...

Prints one JSON object: for each command line the exit code and what it wrote to stderr. No broker is running, there is no Java, and
a benchmark ends where it would begin to measure, so every command ends soon after it has imported what it needs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import click

DEAD_SERVER = "127.0.0.1:1"
"""A port that refuses connections: it needs privileges, and no service of that name is in use."""


class Unimportable:
    """Refuse to import some libraries, as if they were not installed."""

    def __init__(self, libraries: Sequence[str]) -> None:
        self._libraries = libraries

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(name == library or name.startswith(f"{library}.") for library in self._libraries):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def lines(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (command, arguments) for every command, and further lines for those that import more with an option."""
    from headrace.cli.reference import commands

    data, file, quick = str(directory / "data"), str(directory / "file"), ["--duration", "0.1", "--listen", "127.0.0.1:0"]
    pipeline = str(Path(__file__).parent.parent.parent / "examples" / "orders" / "pipeline.toml")
    chosen: dict[str, list[list[str]]] = {
        "headrace serve": [
            ["--data", data, *quick],
            ["--data", data, *quick, "--listen-flight", "127.0.0.1:0"],
            ["--data", data, *quick, "--listen-quic", "127.0.0.1:0"],
            ["--data", data, *quick, "--listen-http", "127.0.0.1:0"],
            ["--data", data, *quick, "--set", "traces.endpoint=http://127.0.0.1:9/v1/traces"],
            ["--data", data, *quick, "--engine", "kafka", "--set", f"kafka.bootstrap={DEAD_SERVER}", "--set", "kafka.deadline=1s"],
        ],
        "headrace pub": [["x"], ["x", "--protocol", "fujin"]],
        "headrace sub": [["x"], ["x", "--protocol", "fujin"]],
        "headrace ping": [[], ["--protocol", "fujin"]],
        "headrace bench publish": [[], ["--protocol", "fujin"]],
        "headrace bench consume": [[], ["--protocol", "fujin"]],
        "headrace bench latency": [[], ["--protocol", "fujin"]],
        "headrace bench compare": [["--against", "nats"]],
        "headrace pipeline run": [[pipeline]],
        "headrace pipeline check": [[pipeline]],
        "headrace pipeline archive": [["x", "--to", f"delta:{directory / 'table'}"]],
        "headrace demo": [[pipeline, "--data", data, "--duration", "1", "--listen", "nowhere"]],
        "headrace certs init": [[str(directory / "certs")]],
        "headrace certs client": [["x", "--dir", str(directory / "certs")]],
        "headrace schema register": [["x", file, "--type", "avro"]],
        "headrace schema check": [["x", file, "--type", "avro"]],
        "headrace console": [["--listen", "127.0.0.1:0"]],
        "headrace copy": [["--from", f"flymq://{DEAD_SERVER}", "--to", f"flymq://{DEAD_SERVER}"]],
        "headrace context add": [["x", "--server", DEAD_SERVER]],
        "headrace topic alter": [["x", "--retention", "1d"]],
        "headrace group reset": [["x", "x", "--to-earliest", "--yes"]],
        "headrace dlq replay": [["x", "--all", "--yes"]],
        "headrace delayed publish": [["x", "x", "--in", "1s"]],
        "headrace user alter": [["x", "--enable"]],
        "headrace user create": [["x", "--new-password-file", file]],
        "headrace user password": [["x", "--new-password-file", file]],
        "headrace acl create": [["read", "topic:x", "--for-everybody"]],
        "headrace acl delete": [["read", "topic:x", "--for-everybody", "--yes"]],
        "headrace key alter": [["x", "--description", "x"]],
    }
    for path, command in commands():
        if not isinstance(command, click.Group):
            for arguments in chosen.get(path) or [list(_plain_arguments(command, directory / "file"))]:
                yield path, arguments


def _plain_arguments(command: click.Command, file: Path) -> Iterator[str]:
    for parameter in command.params:
        if parameter.required:
            assert isinstance(parameter, click.Argument), f"{command.name}: say in `lines` what {parameter.name} is"
            kind = parameter.type
            if isinstance(kind, click.Choice):
                yield str(kind.choices[0])
            elif parameter.name == "resource":
                yield "topic:x"
            else:
                yield str(file) if isinstance(kind, (click.File, click.Path)) else "x"
        elif "--yes" in parameter.opts:
            yield "--yes"


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and stderr of one command line."""
    from headrace.cli import main

    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as end:
            return int(end.code or 0), errors.getvalue()
        except BaseException as failure:
            return -1, f"{errors.getvalue()}{type(failure).__name__}: {failure}"
    raise AssertionError("main always exits")


def _do_not_wait() -> None:
    """End benchmarks before they measure and the console before it serves, and retry at once, because no server will answer."""
    time.sleep = lambda _: None
    with contextlib.suppress(ImportError):
        import uvicorn

        uvicorn.Server.run = lambda *_, **__: None  # type: ignore[method-assign]  # it takes the same arguments
    from headrace.bench import options
    from headrace.bench.children import BenchFailed

    def measuring(*_: Any) -> Any:
        raise BenchFailed("nothing is measured here")

    options.measuring = measuring  # type: ignore[assignment]  # it takes the same arguments


def report(directory: Path, libraries: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return (command line, exit code, stderr) for the help and the work of every command."""
    (directory / "file").write_text("{}")
    (directory / "file").chmod(0o600)
    os.environ.update(HEADRACE_SERVER=DEAD_SERVER, HEADRACE_FLIGHT=DEAD_SERVER, HOME=str(directory), PATH=str(directory))
    os.environ.pop("JAVA_HOME", None)
    os.chdir(directory)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"x\n"))
    sys.meta_path.insert(0, Unimportable(libraries))
    _do_not_wait()
    found = []
    for path, arguments in lines(directory):
        words = path.split()[1:]
        found.append((f"{path} --help", *run([*words, "--help"])))
        found.append((" ".join([path, *arguments]), *run([*words, *arguments])))
    return found


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]), sys.argv[2:])))
