"""What others have written, on the way to a terminal.

A record may hold sequences that a terminal acts on: it clears the screen, changes the title, answers as if the user had typed, or shows
one text for another. Where stdout is a terminal, such characters are written as `\\u001b`, which is also how JSON writes them. A pipe or a
file gets every byte as it is.
"""

from __future__ import annotations

import re
import sys
from typing import Final

import click

_ACTED_ON: Final = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of writing
    "\u2028\u2029\ud800-\udfff"
    "]"
)


def neutral(text: str) -> str:
    """The text with what a terminal would act on made visible. JSON stays the same JSON."""
    return _ACTED_ON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(text: str) -> str:
    """The text as it may go to stdout, whatever that is."""
    return neutral(text) if sys.stdout.isatty() else text


def write(content: bytes) -> None:
    """To stdout, at once."""
    if sys.stdout.isatty():
        content = neutral(content.decode("utf-8", "backslashreplace")).encode()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def echo(text: str = "", *, nl: bool = True) -> None:
    """As `click.echo`."""
    click.echo(shown(text), nl=nl)
