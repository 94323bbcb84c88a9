"""Templates of `--format`, with the letters of kcat's `-f`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from headrace.cli.printed import PrintedRecord

_ESCAPE: Final = r"\\(?:x(?P<hex>[0-9A-Fa-f]{2})|(?P<escape>[\s\S]?))"
_LITERALS: Final = re.compile(rf"{_ESCAPE}|(?P<text>[^\\]+)")
_PARTS: Final = re.compile(rf"%(?P<letter>[\s\S]?)|{_ESCAPE}|(?P<text>[^%\\]+)")
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def _number(number: int | None) -> bytes:
    return b"-1" if number is None else b"%d" % number


def _size(content: bytes | None) -> bytes:
    return _number(None if content is None else len(content))


_FIELDS: Final[Mapping[str, Callable[[PrintedRecord], bytes]]] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: _number(record.partition),
    "o": lambda record: _number(record.offset),
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "h": lambda record: b",".join(b"%b=%b" % (name.encode(), value) for name, value in record.headers),
    "T": lambda record: _number(record.timestamp),
    "K": lambda record: _size(record.key),
    "S": lambda record: _size(record.value),
    "%": lambda record: b"%",
}
_DETAILS: Final = frozenset("hTS")
"""Letters of fields that FlyMQ's FETCH does not carry: `S` tells a record without a value from an empty one."""


def unescaped(text: str) -> bytes:
    r"""Return the text with \n, \t, \r, \0, \xNN and \\ replaced. Raises `ValueError`."""
    return b"".join(_literal(found) for found in _LITERALS.finditer(text))


def _literal(found: re.Match[str]) -> bytes:
    if found["text"] is not None:
        return found["text"].encode("utf-8", "surrogateescape")
    if found["hex"] is not None:
        return bytes.fromhex(found["hex"])
    escape = found["escape"]
    if escape not in _ESCAPES:
        raise ValueError(f"\\{escape} is not an escape; known are \\n, \\t, \\r, \\0, \\xNN and \\\\")
    return _ESCAPES[escape]


class Template:
    """A parsed template. Raises `ValueError` for an unknown letter."""

    def __init__(self, text: str) -> None:
        self._parts: list[bytes | Callable[[PrintedRecord], bytes]] = []
        self.needs_details = False
        for found in _PARTS.finditer(text):
            letter = found["letter"]
            if letter is None:
                self._parts.append(_literal(found))
                continue
            if letter not in _FIELDS:
                raise ValueError(f"%{letter} is unknown; known are {', '.join(f'%{known}' for known in _FIELDS)}")
            self.needs_details |= letter in _DETAILS
            self._parts.append(_FIELDS[letter])

    def render(self, record: PrintedRecord) -> bytes:
        return b"".join([part if isinstance(part, bytes) else part(record) for part in self._parts])
