"""Names that users choose: topics, groups, producers, transactions.

A name is never used as a path, so nearly everything is allowed. A topic name must not contain what people cannot distinguish or type:
text that is not in Unicode normal form C, control characters, white space. The other names are mostly chosen by programs; only control
characters are rejected.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from headrace.errors import InvalidRequest, InvalidTopicName
from headrace.limits import GROUP_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX

INTERNAL_PREFIX: Final = "__"
"""Prefix of internal topics, which hold the broker's tables."""
_CONTROLS: Final = frozenset(("Cc", "Cs"))
_SPACES: Final = frozenset(("Zs", "Zl", "Zp"))


def check_topic_name(name: str) -> None:
    """Raises `InvalidTopicName`."""
    fault = _fault(name, TOPIC_NAME_BYTES_MAX)
    if fault is None and not _SPACES.isdisjoint(map(unicodedata.category, name)):
        fault = "contains white space"
    if fault is None and not unicodedata.is_normalized("NFC", name):
        fault = "is not in Unicode normal form C"
    if fault is None and name in (".", ".."):
        fault = "is reserved"
    if fault is None and name.startswith(INTERNAL_PREFIX):
        fault = f"starts with {INTERNAL_PREFIX!r}, which is reserved for internal topics"
    if fault is not None:
        raise InvalidTopicName(f"topic name {name[:80]!r} {fault}")


def check_name(kind: str, name: str) -> None:
    """Check the name of a group, producer or transaction. Raises `InvalidRequest`."""
    fault = _fault(name, GROUP_NAME_BYTES_MAX)
    if fault is not None:
        raise InvalidRequest(f"{kind} name {name[:80]!r} {fault}")


def _fault(name: str, bytes_max: int) -> str | None:
    """Return the fault of a name as the end of a sentence: 'the name …'."""
    if not name:
        return "is empty"
    if not _CONTROLS.isdisjoint(map(unicodedata.category, name)):
        return "contains a control character or half a surrogate pair"
    if len(name.encode()) > bytes_max:
        return f"is longer than {bytes_max} bytes"
    return None
