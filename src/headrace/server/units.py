"""Sizes and durations with units: `"64 MiB"`, `"5ms"`, `"7d"`.

Parsed, a size is a whole number of bytes and a duration a whole number of milliseconds. Formatting is reversible:
`parse_size(format_size(n)) == n`, and the same for durations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

_SIZE_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_DURATION_UNITS: Final[Mapping[str, int]] = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_QUANTITY: Final = re.compile(r"\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)
_QUANTITY_CHARACTERS_MAX: Final = 40


def parse_size(text: str) -> int:
    """Return bytes. Units: B, KiB, MiB, GiB, TiB (powers of 1024) and kB, MB, GB, TB (powers of 1000). Without a unit: bytes."""
    return _parse(text, _SIZE_UNITS)


def parse_duration(text: str) -> int:
    """Return milliseconds. Units: ms, s, m, h, d, w. Only zero needs no unit."""
    return _parse(text, _DURATION_UNITS)


def _parse(text: str, units: Mapping[str, int]) -> int:
    match = _QUANTITY.fullmatch(text) if len(text) <= _QUANTITY_CHARACTERS_MAX else None
    if match is None:
        raise ValueError("not a number with a unit")
    number = Decimal(match["number"].replace("_", ""))
    unit = match["unit"].lower()
    if unit not in units:
        if not unit and number == 0:
            return 0
        raise ValueError(f"unknown unit {match['unit']!r}" if unit else "the unit is missing")
    whole = number * units[unit]
    if whole != int(whole):
        raise ValueError("not a whole number of the smallest unit")
    return int(whole)


def format_size(size_bytes: int) -> str:
    """Format with the largest binary unit that gives a whole number."""
    return _format(size_bytes, [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)], " ")


def format_duration(duration_ms: int) -> str:
    """Format with the largest unit that gives a whole number."""
    return _format(duration_ms, [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)], "")


def _format(amount: int, units: list[tuple[str, int]], gap: str) -> str:
    if amount == 0:
        return "0"
    name, factor = next((name, factor) for name, factor in units if amount % factor == 0)
    return f"{amount // factor}{gap}{name}"
