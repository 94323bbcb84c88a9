"""Checks of arguments: a wrong type is an error that names the argument, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from headrace.clients.errors import InvalidArgument


def wrong(name: str, expected: str, given: object) -> NoReturn:
    """Raise `InvalidArgument`. A text where bytes belong gets the advice to encode it."""
    advice = "; encode it: text.encode()" if isinstance(given, str) and "bytes" in expected else ""
    raise InvalidArgument(f"{name}: expected {expected}, got {type(given).__name__}{advice}")


def check_text(name: str, given: object) -> None:
    if not isinstance(given, str):
        wrong(name, "str", given)


def check_count(name: str, given: object) -> None:
    """Check an optional whole number."""
    if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
        wrong(name, "int", given)


def check_key(given: object) -> None:
    if given is not None and not isinstance(given, bytes) and not callable(given):
        wrong("key", "bytes, or a function from value to key", given)


def check_headers(given: object) -> None:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        wrong("headers", "a sequence of (str, bytes) pairs", given)
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], bytes):
            wrong("headers", "a sequence of (str, bytes) pairs", pair)


def check_values(values: Sequence[object], first_index: int | None) -> None:
    """Check that every value has the type bytes. `first_index` is the position of the first one; None: there is only one."""
    if set(map(type, values)) <= {bytes}:
        return
    for index, value in enumerate(values):
        if not isinstance(value, bytes):
            wrong("value" if first_index is None else f"values[{first_index + index}]", "bytes", value)
