"""API keys.

    hr_3fq7k2mzvb5a_QkVn…          hr, the id, the secret
       └─ 12 characters └─ 256 random bits

The id is not secret: it identifies the row and appears in lists and in the audit log. Only the SHA-256 of the whole key is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

PREFIX: Final = "hr"
_ID_BYTES, _SECRET_BYTES = 8, 32
_ID_CHARACTERS: Final = 12
_NO_KEY: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key; its text is shown once."""

    id: str
    text: str = field(repr=False)


def new_key(random_bytes: Callable[[int], bytes]) -> NewKey:
    """Create a key. The caller checks that the id is unused."""
    id = base64.b32encode(random_bytes(_ID_BYTES)).decode().lower()[:_ID_CHARACTERS]
    secret = base64.urlsafe_b64encode(random_bytes(_SECRET_BYTES)).decode().rstrip("=")
    return NewKey(id, f"{PREFIX}_{id}_{secret}")


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def id_of(text: str) -> str:
    """Return the id of a text that has the form of a key; empty if it has not."""
    prefix, _, rest = text.partition("_")
    id, _, _ = rest.partition("_")
    return id if prefix == PREFIX and len(id) == _ID_CHARACTERS else ""


def fits(digest: str | None, text: str) -> bool:
    """Return whether the text is the key of that digest; always False for None, in the same time."""
    return hmac.compare_digest(digest or _NO_KEY, digest_of(text)) and digest is not None
