"""Safe output of untrusted text to a terminal.

A record may contain control sequences that clear the screen, change the title, inject input or disguise text. On a terminal, such
characters are escaped as `\\u001b`, as in JSON. A pipe or file receives the raw bytes.
"""

from __future__ import annotations

import re
import sys
from typing import Final

import click

_ACTED_ON: Final = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029\ud800-\udfff"
    "]"
)


def neutral(text: str) -> str:
    """Return the text with control characters escaped. JSON keeps its meaning."""
    return _ACTED_ON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(text: str) -> str:
    """Return the text, escaped if stdout is a terminal."""
    return neutral(text) if sys.stdout.isatty() else text


def write(content: bytes) -> None:
    """Write to stdout and flush."""
    if sys.stdout.isatty():
        content = neutral(content.decode("utf-8", "backslashreplace")).encode()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def echo(text: str = "", *, nl: bool = True) -> None:
    """Print text like `click.echo`, escaped if stdout is a terminal."""
    click.echo(shown(text), nl=nl)
