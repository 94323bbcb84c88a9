"""The filter of a FETCH: which records a client wants to see.

    $.a.b       records whose value is JSON and has that path of objects
    anything    records that hold the text in key or value, whatever its case; or, if the text is a pattern, match it

Filters run beside the event loop, in a thread: they look at many records and nobody else should wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from headrace.sessions.flymq_patterns import SPECIAL, NotRegular, Pattern

Filter: TypeAlias = Callable[[bytes], bool]
"""Does a key or a value pass?"""

PATTERN_TEXT_BYTES_MAX: Final = 64 * 1024
"""A pattern looks at so much of each key and value; walking a text takes Python some 100 ns a byte."""


def build(text: str) -> Filter | None:
    """The filter that this text describes; None: everything passes."""
    if not text:
        return None
    if text.startswith("$."):
        return _path(text[2:].split("."))
    return _words(text)


def passing(test: Filter, keys: Sequence[bytes | None] | None, values: Sequence[bytes]) -> list[int]:
    """The indexes of the records that pass."""
    if keys is None:
        return [index for index, value in enumerate(values) if test(value)]
    return [index for index, (key, value) in enumerate(zip(keys, values, strict=True)) if test(value) or (key and test(key))]


def _path(steps: list[str]) -> Filter:
    def has_path(value: bytes) -> bool:
        try:
            place = json.loads(value)
        except (ValueError, RecursionError):
            return False
        for step in steps:
            if not isinstance(place, dict) or step not in place:
                return False
            place = place[step]
        return True

    return has_path


def _words(text: str) -> Filter:
    wanted = text.lower()
    ascii_wanted = wanted.encode() if wanted.isascii() else None
    pattern = _pattern(text)

    def holds(value: bytes) -> bool:
        if ascii_wanted is not None:
            found = ascii_wanted in value.lower()
        else:
            found = wanted in value.decode("utf-8", "replace").lower()
        return found or (pattern is not None and pattern.search(value[:PATTERN_TEXT_BYTES_MAX]))

    return holds


def _pattern(text: str) -> Pattern | None:
    """What is no pattern, or one that means itself, is looked for as it stands."""
    if SPECIAL.isdisjoint(text):
        return None
    try:
        return Pattern(text)
    except NotRegular:
        return None
