"""Check of a configuration file: every mistake with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.server.config import SETTINGS, contradictions, tree_of
from headrace.server.config_sources import leaves, quoted, read_file
from headrace.server.settings import Directory, Reference, References, Setting, anchored, named_files

_KEY: Final = r"(?:[A-Za-z0-9_-]+|\"[^\"\\]*\"|'[^']*')"
_SECTION: Final = re.compile(rf"\s*\[\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]")
_ASSIGNMENT: Final = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")
_SYNTAX: Final = re.compile(r"(?P<text>.*) \(at line (?P<line>\d+), column \d+\)", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One mistake and its line in the file; 0 if it belongs to no line."""

    line: int
    text: str


def check_file(file: Path) -> tuple[list[Mistake], int]:
    """Return the mistakes of a configuration file by line, and the number of keys that it sets."""
    try:
        text, document = read_file(file)
    except ConfigError as failure:
        message = str(failure).removeprefix(f"{file}: ")
        found = _SYNTAX.fullmatch(message)
        return [Mistake(int(found["line"]), found["text"]) if found else Mistake(0, message)], 0
    lines = _lines_of(text)
    values: dict[str, object] = {name: known.default for name, known in SETTINGS.items()}
    mistakes: list[Mistake] = []
    count = 0
    for name, raw, fault in leaves(document):
        line = lines.get(name) or lines.get(name.partition(".")[0], 0)
        count += not fault
        faults = [fault] if fault else list(_faults(SETTINGS[name], raw, file.parent, values))
        mistakes += [Mistake(line, one) for one in faults]
    mistakes += [Mistake(lines.get(name, 0), fault) for name, fault in contradictions(tree_of(values))]
    return sorted(mistakes), count


def _faults(known: Setting, raw: object, directory: Path, values: dict[str, object]) -> Iterator[str]:
    """Check one value and keep it in `values`. Yields its faults."""
    # A wrong value of a secret reference may be the secret itself.
    is_hidden = isinstance(known.kind, References) or (isinstance(known.kind, Reference) and known.kind.is_hidden)
    shown = known.name if is_hidden else f"{known.name} = {quoted(raw)}"
    try:
        value = anchored(known.kind, known.kind.parse(raw), directory)
    except ValueError as failure:
        yield f"{shown}: {failure}; expected {known.kind.expected}"
        return
    values[known.name] = value
    for path in named_files(known.kind, value):
        if not path.exists():
            yield f"{known.name}: the file {path} does not exist"
        elif not path.is_file():
            yield f"{known.name}: {path} is not a file"
    if isinstance(known.kind, Directory) and isinstance(value, Path) and value.exists() and not value.is_dir():
        yield f"{known.name}: {value} is not a directory"


def _lines_of(text: str) -> dict[str, int]:
    """Return the line of every section and key. tomllib does not report them."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _SECTION.match(line):
            section = _plain(found[1])
            lines.setdefault(section, number)
        elif found := _ASSIGNMENT.match(line):
            name = _plain(found[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
