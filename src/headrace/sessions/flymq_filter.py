"""The filter of a FETCH: which records a client wants to see.

    $.a.b       records whose value is JSON and has that path of objects
    anything    records that hold the text in key or value, whatever its case; or, if the text is a pattern, match it

A filter looks at many records and nobody else should wait for that: the work is done in slices (`slices`), and between two of them the loop
turns to others. Python runs one thread at a time, so a thread would hold up the loop for longer than a slice does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.sessions.flymq_patterns import SPECIAL, NotRegular, Pattern


@dataclass(frozen=True, slots=True)
class Filter:
    """`test`: does a key or a value pass? `slice_bytes`: what it looks at in about a millisecond."""

    test: Callable[[bytes], bool]
    slice_bytes: int

    def __call__(self, text: bytes) -> bool:
        return self.test(text)


_TEXT_SLICE_BYTES: Final = 512 * 1024
_JSON_SLICE_BYTES: Final = 64 * 1024
_PATTERN_SLICE_BYTES: Final = 8 * 1024
_SLICE_RECORDS_MAX: Final = 1_000
PATTERN_TEXT_BYTES_MAX: Final = 64 * 1024
"""A pattern looks at so much of each key and value; walking a text takes Python some 100 ns a byte."""


def build(text: str) -> Filter | None:
    """The filter that this text describes; None: everything passes."""
    if not text:
        return None
    if text.startswith("$."):
        return _path(text[2:].split("."))
    return _words(text)


def slices(filter: Filter, keys: Sequence[bytes | None] | None, values: Sequence[bytes]) -> Iterator[range]:
    """The records in slices of about a millisecond each. A record that is larger has a slice of its own."""
    begin, size_bytes = 0, 0
    for index, value in enumerate(values):
        own_bytes = len(value) + (len(key) if keys is not None and (key := keys[index]) is not None else 0)
        if index > begin and (size_bytes + own_bytes > filter.slice_bytes or index - begin >= _SLICE_RECORDS_MAX):
            yield range(begin, index)
            begin, size_bytes = index, 0
        size_bytes += own_bytes
    if begin < len(values):
        yield range(begin, len(values))


def passing(filter: Filter, keys: Sequence[bytes | None] | None, values: Sequence[bytes], indexes: range | None = None) -> list[int]:
    """The indexes of the records that pass: of all, or of these."""
    test, indexes = filter.test, range(len(values)) if indexes is None else indexes
    if keys is None:
        return [index for index in indexes if test(values[index])]
    return [index for index in indexes if test(values[index]) or ((key := keys[index]) and test(key))]


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

    return Filter(has_path, _JSON_SLICE_BYTES)


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

    return Filter(holds, _TEXT_SLICE_BYTES if pattern is None else _PATTERN_SLICE_BYTES)


def _pattern(text: str) -> Pattern | None:
    """What is no pattern, or one that means itself, is looked for as it stands."""
    if SPECIAL.isdisjoint(text):
        return None
    try:
        return Pattern(text)
    except NotRegular:
        return None
