"""Record filter of a FETCH.

    $.a.b       records whose value is JSON and has that path of objects
    anything    records that contain the text in key or value, ignoring case, or match it if the text is a pattern

Patterns are those of RE2, which reads a text once: matching takes at most a few ns per byte and instruction of the compiled pattern.
Python's `re` backtracks, and a peer could hold the broker up. A pattern of ASCII characters is matched by bytes, any other by characters.

A filter may read many records. The work is done in slices (`slices`), and other connections are served between two slices. A thread would
block the loop for longer than a slice does, because of the GIL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import re2


@dataclass(frozen=True, slots=True)
class Filter:
    """Compiled filter. `test` tells whether a key or a value passes. `slice_bytes` take about a millisecond."""

    test: Callable[[bytes], bool]
    slice_bytes: int

    def __call__(self, text: bytes) -> bool:
        return self.test(text)


_TEXT_SLICE_BYTES: Final = 512 * 1024
_JSON_SLICE_BYTES: Final = 64 * 1024
_PATTERN_SLICE_STEPS: Final = 128 * 1024
"""Bytes times instructions of a pattern: at most 7 ns each, as measured with patterns that need many states."""
_SLICE_RECORDS_MAX: Final = 1_000
PATTERN_TEXT_BYTES_MAX: Final = 64 * 1024
"""Bytes of each key and value that a pattern reads."""
PATTERN_BYTES_MAX: Final = 512
PATTERN_INSTRUCTIONS_MAX: Final = 256
"""Maximum size of a compiled pattern. Nested repeats multiply instructions."""
_PATTERN_MEMORY_BYTES: Final = 256 * 1024
_SPECIAL: Final = frozenset(".[^$(|*+?{\\")
"""A text without any of these matches only itself."""


def build(text: str) -> Filter | None:
    """Return the filter for this text. None: everything passes."""
    if not text:
        return None
    if text.startswith("$."):
        return _path(text[2:].split("."))
    return _words(text)


def slices(filter: Filter, keys: Sequence[bytes | None] | None, values: Sequence[bytes]) -> Iterator[range]:
    """Yield the records in slices of about a millisecond. A larger record is a slice of its own."""
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
    """Return the indexes of the records that pass, of all records or of these."""
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
    pattern = compiled(text)

    def holds(value: bytes) -> bool:
        if ascii_wanted is not None:
            found = ascii_wanted in value.lower()
        else:
            found = wanted in value.decode("utf-8", "replace").lower()
        return found or (pattern is not None and pattern.search(value[:PATTERN_TEXT_BYTES_MAX]) is not None)

    return Filter(holds, _TEXT_SLICE_BYTES if pattern is None else _PATTERN_SLICE_STEPS // pattern.programsize)


def compiled(text: str) -> re2._Regexp | None:
    """Return the pattern, or None if the text is to be taken literally: it is no pattern of RE2, or too large."""
    encoded = text.encode()
    if _SPECIAL.isdisjoint(text) or len(encoded) > PATTERN_BYTES_MAX:
        return None
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1 if text.isascii() else re2.Options.Encoding.UTF8
    options.max_mem, options.never_capture, options.log_errors = _PATTERN_MEMORY_BYTES, True, False
    try:
        pattern = re2.compile(encoded, options)
    except re2.error:
        return None
    finally:
        re2.purge()  # its cache would keep the patterns of all peers
    return pattern if pattern.programsize <= PATTERN_INSTRUCTIONS_MAX else None
