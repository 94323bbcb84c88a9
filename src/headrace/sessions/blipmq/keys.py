"""Verification of API keys in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from headrace.broker.authorizer import Principal
from headrace.sessions.blipmq.session import VerifyKey


def api_keys(names: Mapping[str, str], *, protocol: str = "blipmq") -> VerifyKey:
    """Return a function that verifies these keys, each with the name of its principal.

    Only digests are stored, so a memory dump contains no key. Every digest is compared in full, even after a match, so that the time
    reveals nothing about the keys.
    """
    known = [(_digest(key.encode()), Principal(name, protocol)) for key, name in names.items()]

    def verify(key: bytes) -> Principal | None:
        given, found = _digest(key), None
        for digest, principal in known:
            if hmac.compare_digest(digest, given):
                found = principal
        return found

    return verify


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
