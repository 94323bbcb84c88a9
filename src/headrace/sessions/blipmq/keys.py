"""API keys: who is behind one, found out in a time that tells nothing."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from headrace.broker.authorizer import Principal
from headrace.sessions.blipmq.session import VerifyKey


def api_keys(names: Mapping[str, str], *, protocol: str = "blipmq") -> VerifyKey:
    """A check for these keys, each with the name of its principal.

    Only digests are kept, so a memory dump shows no key. Every digest is compared in full, whether or not one has matched
    already, so that neither a guess's first letters nor its place in the list can be told from the time it takes.
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
